"""The small files of a checkpoint: counters and controllers, data position, random generators, configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.checkpoint import rng
from rlhf_mcore.checkpoint.layout import CONFIG, DATALOADER, RNG_FILE, ROLLOUTS, TRAINER_STATE, step_of
from rlhf_mcore.checkpoint.manifest import VERSION, migrate, read_manifest
from rlhf_mcore.checkpoint.registry import Registry
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.episodes import decode_trajectories, encode_trajectories
from rlhf_mcore.foreign import Fields, read_json
from rlhf_mcore.trainer.inputs import Inputs

if TYPE_CHECKING:
    from rlhf_mcore.trainer.ahead import SamplingAhead


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run after ``step``, from ``checkpoint``. If ``checkpoint`` is None, the run loads the configured weights.

    ``weights``: Hugging Face weight directory per role. ``continues``: the run continues its own record, up to ``step``.
    ``is_over``: no steps are left. ``inputs``: fingerprints of the run's inputs, from the first rank.
    """

    checkpoint: Path | None = None
    step: int = 0
    weights: dict[str, Path] = field(default_factory=dict)
    continues: bool = False
    is_over: bool = False
    notes: list[str] = field(default_factory=list)
    inputs: Inputs = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunState:
    """All state of a run that a checkpoint stores in addition to the models.

    ``registry`` and ``data`` store the stateful objects; their state is equal on all ranks. ``generators`` and ``set_generators``
    read and set additional random generators of this rank. ``recent`` returns the last steps (step, time, loss, reward).
    It serves readers of the file; a resumed run reads the same values from its metrics. ``inputs``: fingerprints of the run's
    inputs from the first rank, see ``inputs.fingerprints``. ``ahead``: sampled responses that are not yet trained on; on the first
    rank.
    """

    registry: Registry
    data: Registry
    config_yaml: str
    recent: Callable[[], Sequence[Mapping[str, Any]]] = list
    generators: Callable[[], dict[str, Tensor]] = dict
    set_generators: Callable[[Mapping[str, Tensor]], None] = lambda states: None
    inputs: Inputs = field(default_factory=dict)
    ahead: SamplingAhead | None = None

    def small_files(self, step: int) -> dict[str, bytes]:
        """Return the small files of a checkpoint on the first rank, {} on other ranks. Collective over the world."""
        generators = rng.gather_states({**rng.capture(), **self.generators()})
        if generators is None:
            return {}
        head = {"format": VERSION, "step": step, "world_size": dist.get_world_size()}
        more = {"recent": list(self.recent()), "inputs": self.inputs}
        waiting = {}
        if self.ahead is not None:
            waiting[ROLLOUTS] = encode_trajectories(self.ahead.finished_trajectories())
        return {
            **waiting,
            TRAINER_STATE: _encode({**head, "state": self.registry.state_dict(), **more}),
            DATALOADER: _encode({**head, "state": self.data.state_dict()}),
            RNG_FILE: rng.encode(generators),
            CONFIG: self.config_yaml.encode(),
        }


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


_REMEDY = "choose another checkpoint"
# Limit on sampled prompts per trained prompt. Dynamic sampling drops prompts; by default it samples at most ten batches.
_DRAWN_PER_PROMPT = 10_000


def restore_state(state: RunState, checkpoint: Path) -> list[str]:
    """Restore the state that ``RunState.small_files`` wrote. Local. Returns notes for the user.

    Raises:
        ConfigError: a file cannot be read, or does not match this run.
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
    generators = rng.read_states(checkpoint, dist.get_rank(), dist.get_world_size())
    if generators is None:
        return ["another number of ranks than the checkpoint's: random generators begin anew from the seed"]
    rng.restore(generators)
    state.set_generators(generators)
    return []


def read_step(checkpoint: Path) -> int:
    """Return the number of steps that the run had completed at the checkpoint."""
    return _read(checkpoint / TRAINER_STATE).integer("step")


def read_inputs(checkpoint: Path) -> dict[str, Any] | None:
    """Return the stored ``RunState.inputs``. Returns None if an older release wrote the checkpoint without inputs."""
    inputs = _read(checkpoint / TRAINER_STATE).object("inputs", None)
    if inputs is None:
        return None
    parts = {name: inputs.object(name) for name in inputs}
    return {name: {"path": part.text("path"), "content": part.text("content")} for name, part in parts.items()}


def check_counts(checkpoint: Path) -> None:
    """Check that the small files of a checkpoint agree on its progress: all must come from one step of one run.

    Raises:
        ConfigError: two files contradict each other (the message names both), or a value is impossible.
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
                f"{checkpoint}: the manifest records step {step}, but {name} records step {value}; {_REMEDY}"
            )
    trained, drawn = counters.integer("prompts", default=None), _num_drawn(data)
    if trained is not None and drawn is not None and not trained <= drawn <= max(trained, 1) * _DRAWN_PER_PROMPT:
        raise ConfigError(
            f"{data.where}: the sampler has read {drawn} prompts, but {TRAINER_STATE} counts {trained} trained prompts; "
            f"{_REMEDY}"
        )


def _num_drawn(data: Fields) -> int | None:
    """Return the number of prompts that the sampler has read from all data sets. Returns None if there is no sampler state."""
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
