"""The small files of a checkpoint: counters and controllers, the place in the data, random generators, the configuration."""

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
from rlhf_mcore.data.trajectory_files import decode_trajectories, encode_trajectories
from rlhf_mcore.foreign import Fields, read_json
from rlhf_mcore.trainer.inputs import Inputs

if TYPE_CHECKING:
    from rlhf_mcore.trainer.ahead import SamplingAhead


@dataclass(frozen=True, slots=True)
class Start:
    """A run begins after ``step`` with what ``checkpoint`` holds; None: with the weights of the configuration.

    ``weights``: by role the Hugging Face directory with its weights. ``continues``: the run's own record continues, up to this step.
    ``is_over``: nothing is left to do. ``inputs``: fingerprints of what the run is made from; the first rank's.
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
    """Everything of a run beside its models that continues where it was.

    ``registry`` and ``data`` hold the objects with a state, equal on all ranks; ``generators`` and ``set_generators`` are further
    random generators of this rank. ``recent`` tells of the last steps (step, time, loss, reward): for readers of the file, a run that
    is resumed has it from its metrics. ``inputs``: what the run was made from, see ``inputs.fingerprints``; the first rank's.
    ``ahead``: responses that wait to be learned from, on the first rank.
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
        """Return the files of a checkpoint on the first rank, {} on the others. Collective over the world."""
        generators = rng.gather_states({**rng.capture(), **self.generators()})
        if generators is None:
            return {}
        head = {"format": VERSION, "step": step, "world_size": dist.get_world_size()}
        more = {"recent": list(self.recent()), "inputs": self.inputs}
        waiting = {}
        if self.ahead is not None:
            waiting[ROLLOUTS] = encode_trajectories(self.ahead.finished())
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
    generators = rng.read_states(checkpoint, dist.get_rank(), dist.get_world_size())
    if generators is None:
        return ["another number of ranks than the checkpoint's: random generators begin anew from the seed"]
    rng.restore(generators)
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
