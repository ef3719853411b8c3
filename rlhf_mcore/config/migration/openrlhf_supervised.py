"""OpenRLHF: the command lines of ``openrlhf.cli.train_sft`` and ``openrlhf.cli.train_rm``."""

from __future__ import annotations

from typing import Any

from rlhf_mcore.config.migration.openrlhf import data_files, warmup
from rlhf_mcore.config.migration.table import Joint, Lost, Row, Table, Values, choose, pair, path, positive

# What train_ppo_ray says of its actor, the two programs with one model say of that: `--pretrain` is any of these.
ONE_MODEL = {
    "actor.model_name_or_path": "model.model_name_or_path",
    "actor.gradient_checkpointing_enable": "model.gradient_checkpointing_enable",
    "actor.adam.weight_decay": "adam.weight_decay",
    "actor.adam.betas": "adam.betas",
    "actor.lr_scheduler": "lr_scheduler",
    "actor.lr_warmup_ratio": "lr_warmup_ratio",
    "actor.max_norm": "max_norm",
    "actor.aux_loss_coef": "model.aux_loss_coef",
}


def read(flags: Values) -> dict[str, Any]:
    """Flags of ``openrlhf.read_flags`` under the names of these programs."""
    return {ONE_MODEL.get(name, name): value for name, value in flags.items()}


def _schedule(values: Values) -> dict[str, Any]:
    names = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear"}
    name = choose({**names, "constant": "constant", "constant_with_warmup": "constant"})(values["lr_scheduler"])
    has_floor = values["lr_scheduler"] == "cosine_with_min_lr"
    floor = float(values["min_lr_ratio"]) * float(values["adam.lr"]) if has_floor else 0.0
    return {"actor.optimizer.schedule.name": name, "actor.optimizer.schedule.min_lr": floor}


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


def _adam(values: Values) -> dict[str, Any]:
    if values["optim"] != "adam":
        raise Lost("AdamW is the only optimizer")
    return {}


def _kind(name: str) -> Joint:
    return Joint(("kind",), lambda _: {"algorithm.preset": name})


ROWS = (
    Row("model.model_name_or_path", "model.path", path),
    Row("ds.param_dtype", "model.dtype", choose({"bf16": "bf16", "fp16": "fp16"})),
    Row("bf16", "model.dtype", lambda on: "bf16" if on else "auto"),
    Row("ds.tensor_parallel_size", "actor.layout.tp", int),
    Row("ds.packing_samples", "trainer.packing", bool),
    Row("model.gradient_checkpointing_enable", "actor.recompute.granularity", lambda on: "full" if on else "off"),
    Row("model.aux_loss_coef", "actor.moe.aux_loss_coef", float),
    Row("adam.lr", "actor.optimizer.lr", float),
    Row("adam.eps", "actor.optimizer.eps", float),
    Row("adam.weight_decay", "actor.optimizer.weight_decay", float),
    Row("max_norm", "actor.optimizer.clip_grad", float),
    Row("lr_warmup_ratio", "actor.optimizer.schedule.warmup_ratio", warmup),
    Row("train.batch_size", "trainer.prompts_per_step", int),
    Row("train.seed", "seed", int),
    Row("train.full_determinism_enable", "deterministic", bool),
    Row("data.dataset", "data.train", data_files),
    Row("data.apply_chat_template", "data.apply_chat_template", lambda on: "true" if on else "false"),
    Row("eval.dataset", "data.eval", lambda names: data_files(names, "data.eval")),
    Row("ckpt.output_dir", "output_dir", str),
    Row("ckpt.save_steps", "checkpoint.save_steps", positive),
    Row("ckpt.max_num", "checkpoint.save_total_limit", int),
    Row("ckpt.load_enable", "checkpoint.resume", lambda on: "auto" if on else "never"),
    Row("logger.wandb.project", "project", str),
    Row("logger.wandb.run_name", "experiment", str),
    Row("logger.tensorboard_dir", "logging.tensorboard", bool),
)
JOINTS = (
    Joint(("lr_scheduler", "min_lr_ratio", "adam.lr"), _schedule),
    Joint(("adam.betas",), pair("actor.optimizer.beta1", "actor.optimizer.beta2")),
    Joint(("optim",), _adam),
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
