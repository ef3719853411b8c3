"""Reads the small files of a checkpoint: compares what they count, and restores a run's objects from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mcore.checkpoint import saved_rng
from rlhf_mcore.checkpoint.formats import migrate
from rlhf_mcore.checkpoint.layout import DATALOADER, ROLLOUTS, TRAINER_STATE, step_of
from rlhf_mcore.checkpoint.manifest import read_manifest
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.trajectory_files import decode_trajectories
from rlhf_mcore.foreign import Fields, read_json
from rlhf_mcore.trainer.run_state import RunState

_REMEDY = "choose another checkpoint"
# What a run may draw for one prompt that it trains on: dynamic sampling throws batches away, of which there are ten by default.
_DRAWN_PER_PROMPT = 10_000


def restore_state(state: RunState, checkpoint: Path) -> list[str]:
    """Restore what ``RunState.small_files`` has written. Local. Returns what the user should know.

    Raises:
        ConfigError: a file cannot be read, or does not fit this run.
    """
    for name, registry in ((TRAINER_STATE, state.registry), (DATALOADER, state.data)):
        registry.load_state_dict(_read(checkpoint / name).object("state").content, str(checkpoint / name))
    if state.ahead is not None:
        try:
            state.ahead.load_finished(
                decode_trajectories((checkpoint / ROLLOUTS).read_bytes(), state.ahead.prompts_by_number())
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{checkpoint / ROLLOUTS}: {error}; {_REMEDY}") from error
    generators = saved_rng.read_states(checkpoint, dist.get_rank(), dist.get_world_size())
    if generators is None:
        return ["another number of ranks than the checkpoint's: random generators begin anew from the seed"]
    saved_rng.restore(generators)
    state.set_generators(generators)
    return []


def read_step(checkpoint: Path) -> int:
    """Return the number of steps that a checkpoint's run had made."""
    return _read(checkpoint / TRAINER_STATE).integer("step")


def read_inputs(checkpoint: Path) -> dict[str, Any] | None:
    """Return what ``RunState.inputs`` was; None where the release that wrote the checkpoint kept no such thing."""
    inputs = _read(checkpoint / TRAINER_STATE).object("inputs", None)
    if inputs is None:
        return None
    parts = {name: inputs.object(name) for name in inputs}
    return {name: {"path": part.text("path"), "content": part.text("content")} for name, part in parts.items()}


def check_counts(checkpoint: Path) -> None:
    """Compare what the small files of a checkpoint hold of its progress: it was written after one step, of one run.

    Raises:
        ConfigError: two of them contradict each other, naming both, or a value is none that a run can have.
    """
    trainer, data = _read(checkpoint / TRAINER_STATE), _read(checkpoint / DATALOADER)
    counters = trainer.object("state").object("counters", Fields({}, trainer.where, _REMEDY))
    step = read_manifest(checkpoint).info.step
    states = {
        f"the directory's name {checkpoint.name}": step_of(checkpoint.name),
        f"{TRAINER_STATE} (step)": trainer.integer("step"),
        f"{TRAINER_STATE} (counters.steps)": counters.integer("steps", default=None),
        f"{DATALOADER} (step)": data.integer("step"),
    }
    for name, value in states.items():
        if value is not None and value != step:
            raise ConfigError(
                f"{checkpoint}: the manifest is that of step {step}, but {name} is of step {value}; {_REMEDY}"
            )
    trained, drawn = counters.integer("prompts", default=None), _num_drawn(data)
    if trained is not None and drawn is not None and not trained <= drawn <= max(trained, 1) * _DRAWN_PER_PROMPT:
        raise ConfigError(
            f"{data.where}: the sampler has drawn {drawn} prompts, but {TRAINER_STATE} counts {trained} that were trained on; "
            f"{_REMEDY}"
        )


def _num_drawn(data: Fields) -> int | None:
    """Count the prompts that the sampler has drawn, of all data sets together; None without a sampler's state."""
    sampler = data.object("state").object("sampler", None)
    if sampler is None:
        return None
    if "parts" not in sampler:
        return sampler.integer("num_drawn")
    parts = [part for part in sampler.items("parts") if isinstance(part, dict)]
    return sum(Fields(part, data.where, _REMEDY).integer("num_drawn") for part in parts)


def _read(path: Path) -> Fields:
    read = read_json(path, remedy=_REMEDY)
    content = Fields(migrate(path, dict(read.content), read.content.get("format")), read.where, _REMEDY)
    for key in ("step", "world_size"):
        content.integer(key)
    content.object("state")
    return content
