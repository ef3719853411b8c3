"""What has to hold in a run that learns from given responses: ``algorithm.kind`` sft or reward_model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhf_mcore.config.data_files import read_columns
from rlhf_mcore.config.derive import longest_example, padded_to, rows_per_example
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.model_files import ModelShape
from rlhf_mcore.config.schema import Config

RL_GROUPS = ("rollout.", "bridge.", "reward.", "critic.", "reference.")  # keys that such a run does not look at
STARTING_HEADS = {"sft": ("lm",), "reward_model": ("lm", "sequence")}  # kinds of model.path
MESSAGES = "messages"  # sft: in the place of prompt and response


def example_problems(cfg: Config) -> Iterator[str]:
    """Check that every file is there, is of a known kind, and has the columns of an example."""
    if not cfg.data.train:
        yield "data.train=[] names no file; give a list of .parquet or .jsonl files"
    if cfg.evaluate.every > 0 and not cfg.data.eval:
        yield f"evaluate.every={cfg.evaluate.every} but data.eval=[]; name files in data.eval or set evaluate.every=0"
    for field, files in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        for file in files:
            yield from map(FileProblem, _file_problems(cfg, file, field))


def _file_problems(cfg: Config, file: str, field: str) -> Iterator[str]:
    try:
        columns = read_columns(Path(file), field)
    except ConfigError as error:
        yield str(error)
        return
    wanted = wanted_columns(cfg)
    if missing := [key for key, column in wanted.items() if column not in columns]:
        if cfg.algorithm.kind == "sft" and MESSAGES in columns:
            return
        named = " and ".join(f"{wanted[key]!r}" for key in missing)
        remedy = f"Set {' and '.join(missing)}" + (f", or give a column {MESSAGES!r}" if len(wanted) == 2 else "")
        yield (
            f"{field}: {file} has no column {named}, which algorithm.kind={cfg.algorithm.kind} reads; "
            f"its columns are: {', '.join(columns) or 'none'}. {remedy}"
        )


def wanted_columns(cfg: Config) -> dict[str, str]:
    """Columns of an example, by the keys that name them: the prompt, then its responses."""
    data = cfg.data
    if cfg.algorithm.kind == "sft":
        return {"data.prompt_key": data.prompt_key, "data.response_key": data.response_key}
    return {
        "data.prompt_key": data.prompt_key,
        "data.chosen_key": data.chosen_key,
        "data.rejected_key": data.rejected_key,
    }


def step_problems(cfg: Config) -> Iterator[str]:
    """Whether a step is one update, and a microbatch has room for an example."""
    trainer, kind = cfg.trainer, cfg.algorithm.kind
    if trainer.minibatch_size not in (None, trainer.prompts_per_step):
        yield (
            f"trainer.minibatch_size={trainer.minibatch_size}: with algorithm.kind={kind} a step is one update, of "
            f"trainer.prompts_per_step={trainer.prompts_per_step} examples; set it to null"
        )
    if trainer.ppo_epochs != 1:
        yield f"trainer.ppo_epochs={trainer.ppo_epochs}: with algorithm.kind={kind} examples are not repeated; set it to 1"
    multiple = padded_to(cfg.actor.layout)
    needed = -(-longest_example(cfg) // multiple) * multiple * rows_per_example(cfg)
    if trainer.max_tokens_per_microbatch < max(needed, 2):
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} has no room for "
            f"{rows_per_example(cfg)} rows of data.max_tokens={longest_example(cfg)}; raise it to {max(needed, 2)} or more"
        )


def length_problems(cfg: Config, shape: ModelShape) -> Iterator[str]:
    """Whether the model has positions for the longest example. Without data.max_tokens that is found out when data are read."""
    longest = cfg.data.max_tokens
    if longest is not None and longest > shape.max_positions:
        yield (
            f"data.max_tokens={longest} exceeds max_position_embeddings={shape.max_positions} of model.path; lower it"
        )
