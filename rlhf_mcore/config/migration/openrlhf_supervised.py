"""OpenRLHF: the command lines of ``openrlhf.cli.train_sft`` and ``openrlhf.cli.train_rm``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhf_mcore.config.migration import openrlhf
from rlhf_mcore.config.migration.table import Joint, Row, Table, Values, pair

# What is the actor's in train_ppo_ray belongs to the only model in these two programs; `--pretrain` is any of these.
ONE_MODEL = {
    "actor.model_name_or_path": "model.model_name_or_path",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable",
    "actor.aux_loss_coef": "model.aux_loss_coef",
    "actor.adam.lr": "adam.lr",
    "actor.adam.eps": "adam.eps",
    "actor.adam.weight_decay": "adam.weight_decay",
    "actor.adam.betas": "adam.betas",
    "actor.lr_scheduler": "lr_scheduler",
    "actor.lr_warmup_ratio": "lr_warmup_ratio",
    "actor.max_norm": "max_norm",
}


def read(flags: Values) -> dict[str, Any]:
    """Flags of ``openrlhf_flags.read_flags`` under the names of these programs."""
    return {ONE_MODEL.get(name, name): value for name, value in flags.items()}


def _tokens(rows: int) -> Joint:
    """``rows`` of an example of train.micro_batch_size, all of the longest, are a microbatch."""

    def convert(values: Values) -> dict[str, Any]:
        longest = int(values["data.max_len"])
        return {
            "data.max_tokens": longest,
            "data.overlong_prompts": "drop",  # they cut, here longer examples are left out
            "trainer.max_tokens_per_microbatch": rows * longest * int(values["train.micro_batch_size"]),
        }

    return Joint(("data.max_len", "train.micro_batch_size"), convert)


def _kind(name: str) -> Joint:
    return Joint(("kind",), lambda _: {"algorithm.preset": name})


ROWS = (
    *(replace(row, theirs=ONE_MODEL.get(row.theirs, row.theirs)) for row in openrlhf.MODEL_ROWS),
    Row("train.batch_size", "trainer.prompts_per_step", int),
    Row("data.dataset", "data.train", openrlhf.data_files),
    Row("eval.dataset", "data.eval", lambda names: openrlhf.data_files(names, "data.eval")),
)
JOINTS = (
    openrlhf.schedule(""),
    Joint(("adam.betas",), pair("actor.optimizer.beta1", "actor.optimizer.beta2")),
    Joint(("optim",), openrlhf.adam),
)
SFT_ROWS = (
    *ROWS,
    Row("data.input_key", "data.prompt_key", str),
    Row("data.output_key", "data.response_key", str),
)
RM_ROWS = (
    *ROWS,
    Row("data.prompt_key", "data.prompt_key", str),
    Row("data.chosen_key", "data.chosen_key", str),
    Row("data.rejected_key", "data.rejected_key", str),
)
DEFAULTS = {
    "kind": True,
    "adam.betas": (0.9, 0.95),
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
    "train.batch_size": 128,
    "train.seed": 42,
    "data.apply_chat_template": False,
    "ckpt.load_enable": False,
    "ckpt.max_num": 3,
}
REASONS = {
    "ckpt": "checkpoints and models go to one run directory here",
    "data.dataset_probs": "see data.weights",
    "data.dataset_split": "name the file of the split",
    "data.input_template": "write the template into the prompts, or use messages",
    "data.max_samples": "all rows are used here; cut the file",
    "data.multiturn": "give a column messages instead; its last message is learned",
    "ds": "models are trained by Megatron-core here; choose actor.layout",
    "eval.split": "name the file of the split",
    "eval.steps": "set evaluate.every with data.eval",
    "logger": "metrics go to metrics.jsonl and TensorBoard here",
    "loss": "pairs are told apart by the sigmoid of the difference (Bradley and Terry) here",
    "model": "see the keys of model",
    "muon": "AdamW is the only optimizer",
    "train.max_epochs": "depends on the number of rows: set trainer.num_steps to epochs x rows / train.batch_size",
}
SFT = Table(
    "OpenRLHF (train_sft)",
    SFT_ROWS,
    (*JOINTS, _kind("sft"), _tokens(1)),
    {**DEFAULTS, "adam.lr": 5e-6, "data.input_key": "input", "data.max_len": 2048, "train.micro_batch_size": 8},
    REASONS,
)
RM = Table(
    "OpenRLHF (train_rm)",
    RM_ROWS,
    (*JOINTS, _kind("reward_model"), _tokens(2)),
    {**DEFAULTS, "adam.lr": 9e-6, "data.max_len": 512, "train.micro_batch_size": 1},
    REASONS,
)
TABLES = {"train_sft": SFT, "train_rm": RM}
