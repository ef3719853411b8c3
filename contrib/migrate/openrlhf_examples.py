"""Key tables for OpenRLHF's programs that train one model on examples: train_sft, train_rm and train_dpo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhf_mcore_contrib.migrate.openrlhf import ADAPTERS, MODEL_ROWS, MUON, adam, data_files, schedule
from rlhf_mcore_contrib.migrate.table import Joint, Lost, Row, Table, Values, pair, path

# Keys of the actor in train_ppo_ray -> keys of the only model in these programs. `--pretrain` is the model in all programs.
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


def one_model(flags: Values) -> dict[str, Any]:
    """Rename flags from ``sources.read_flags`` to the names of these programs."""
    return {ONE_MODEL.get(name, name): value for name, value in flags.items()}


def _example_tokens(rows: int) -> Joint:
    """Compute the microbatch size: train.micro_batch_size examples, each with ``rows`` sequences of the longest length."""

    def convert(values: Values) -> dict[str, Any]:
        longest = int(values["data.max_len"])
        return {
            "data.max_tokens": longest,
            "data.overlong_prompts": "drop",  # OpenRLHF truncates; here longer examples are dropped
            "trainer.max_tokens_per_microbatch": rows * longest * int(values["train.micro_batch_size"]),
        }

    return Joint(("data.max_len", "train.micro_batch_size"), convert)


def _kind(name: str) -> Joint:
    return Joint(("kind",), lambda _: {"algorithm.preset": name})


_SUPERVISED_ROWS = (
    *(replace(row, theirs=ONE_MODEL.get(row.theirs, row.theirs)) for row in MODEL_ROWS),
    Row("train.batch_size", "trainer.prompts_per_step", int),
    Row("train.max_epochs", "trainer.num_epochs", float),
    Row("data.dataset", "data.train", data_files),
    Row("eval.dataset", "data.eval", lambda names: data_files(names, "data.eval")),
)
_SUPERVISED_JOINTS = (
    ADAPTERS,
    schedule(""),
    Joint(("adam.betas",), pair("actor.optimizer.beta1", "actor.optimizer.beta2")),
    Joint(("optim",), adam),
)
_SFT_ROWS = (
    *_SUPERVISED_ROWS,
    Row("data.input_key", "data.prompt_key", str),
    Row("data.output_key", "data.response_key", str),
)
_RM_ROWS = (
    *_SUPERVISED_ROWS,
    Row("data.prompt_key", "data.prompt_key", str),
    Row("data.chosen_key", "data.chosen_key", str),
    Row("data.rejected_key", "data.rejected_key", str),
)
_SUPERVISED_DEFAULTS = {
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
_SUPERVISED_REASONS = {
    "ckpt": "checkpoints and models go to one run directory here",
    "data.dataset_probs": "see data.weights",
    "data.dataset_split": "name the file of the split",
    "data.input_template": "write the template into the prompts, or use messages",
    "data.max_samples": "all rows are used here; cut the file",
    "data.multiturn": "give a column messages instead; its last message is learned",
    "ds": "models are trained by Megatron-core here; choose actor.layout",
    "eval.split": "name the file of the split",
    "eval.steps": "set evaluate.every with data.eval",
    "logger": "metrics go to metrics.jsonl and to logging.trackers here",
    "loss": "the loss of a pair is the sigmoid loss of Bradley and Terry here",
    "model": "see the keys of model",
    "muon": MUON,
}
SFT = Table(
    "OpenRLHF (train_sft)",
    _SFT_ROWS,
    (*_SUPERVISED_JOINTS, _kind("sft"), _example_tokens(1)),
    {
        **_SUPERVISED_DEFAULTS,
        "adam.lr": 5e-6,
        "data.input_key": "input",
        "data.max_len": 2048,
        "train.micro_batch_size": 8,
    },
    _SUPERVISED_REASONS,
)
RM = Table(
    "OpenRLHF (train_rm)",
    _RM_ROWS,
    (*_SUPERVISED_JOINTS, _kind("reward_model"), _example_tokens(2)),
    {**_SUPERVISED_DEFAULTS, "adam.lr": 9e-6, "data.max_len": 512, "train.micro_batch_size": 1},
    _SUPERVISED_REASONS,
)


def _ipo(values: Values) -> dict[str, Any]:
    if not values["ipo"]:
        return {}
    raise Lost(
        "log ratios are means over tokens here and sums in OpenRLHF; choose a new algorithm.dpo.beta",
        {"algorithm.preset": "ipo"},
    )


DPO = Table(
    "OpenRLHF (train_dpo)",
    (
        *_RM_ROWS,
        Row("beta", "algorithm.dpo.beta", float),
        Row("label_smoothing", "algorithm.dpo.label_smoothing", float),
        Row("nll_loss_coef", "algorithm.dpo.nll_coef", float),
        Row("ref_pretrain", "reference.path", path),
        Row("ref_offload", "reference.offload", lambda on: "always" if on else "never"),
    ),
    (*_SUPERVISED_JOINTS, _kind("dpo"), Joint(("ipo",), _ipo), _example_tokens(2)),
    {**_SUPERVISED_DEFAULTS, "adam.lr": 1e-5, "data.max_len": 512, "train.micro_batch_size": 8},
    {**_SUPERVISED_REASONS, "loss": "choose algorithm.dpo.loss"},
)
SUPERVISED_TABLES = {"train_sft": SFT, "train_rm": RM, "train_dpo": DPO}
