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
from rlhf_mcore.checkpoint.formats import VERSION, migrate
from rlhf_mcore.checkpoint.layout import CONFIG, DATALOADER, RNG_FILE, ROLLOUTS, TRAINER_STATE, step_of
from rlhf_mcore.checkpoint.manifest import read_manifest
from rlhf_mcore.checkpoint.registry import Registry
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import Fields, read_json
from rlhf_mcore.trainer.inputs import Inputs

if TYPE_CHECKING:
    from rlhf_mcore.trainer.ahead import SamplingAhead

_REMEDY = "choose another checkpoint"
# What a run may draw for one prompt that it trains on: dynamic sampling throws batches away, of which there are ten by default.
_DRAWN_PER_PROMPT = 10_000


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
        """The files of a checkpoint, on the first rank; {} on the others. Collective over the world."""
        generators = rng.gather_states({**rng.capture(), **self.generators()})
        if generators is None:
            return {}
        head = {"format": VERSION, "step": step, "world_size": dist.get_world_size()}
        more = {"recent": list(self.recent()), "inputs": self.inputs}
        waiting = {}
        if self.ahead is not None:
            from rlhf_mcore.data.episodes import encode_trajectories

            waiting[ROLLOUTS] = encode_trajectories(self.ahead.finished())
        return {
            **waiting,
            TRAINER_STATE: _encode({**head, "state": self.registry.state_dict(), **more}),
            DATALOADER: _encode({**head, "state": self.data.state_dict()}),
            RNG_FILE: rng.encode(generators),
            CONFIG: self.config_yaml.encode(),
        }

    def load(self, checkpoint: Path) -> list[str]:
        """Restore what :meth:`small_files` has written. Local. Returns what the user should know.

        Raises:
            ConfigError: a file cannot be read, or does not fit this run.
        """
        for name, registry in ((TRAINER_STATE, self.registry), (DATALOADER, self.data)):
            registry.load_state_dict(_read(checkpoint / name).object("state").content, str(checkpoint / name))
        if self.ahead is not None:
            from rlhf_mcore.data.episodes import decode_trajectories

            try:
                self.ahead.load_finished(
                    decode_trajectories((checkpoint / ROLLOUTS).read_bytes(), self.ahead.prompts_by_number())
                )
            except (OSError, ValueError) as error:
                raise ConfigError(f"{checkpoint / ROLLOUTS}: {error}; {_REMEDY}") from error
        states = rng.read_states(checkpoint, dist.get_rank(), dist.get_world_size())
        if states is None:
            return ["another number of ranks than the checkpoint's: random generators begin anew from the seed"]
        rng.restore(states)
        self.set_generators(states)
        return []


def read_step(checkpoint: Path) -> int:
    """The number of steps that a checkpoint's run had made."""
    return _read(checkpoint / TRAINER_STATE).integer("step")


def read_inputs(checkpoint: Path) -> dict[str, Any] | None:
    """What ``RunState.inputs`` was; None where the release that wrote the checkpoint kept no such thing."""
    found = _read(checkpoint / TRAINER_STATE).object("inputs", None)
    if found is None:
        return None
    parts = {name: found.object(name) for name in found}
    return {name: {"path": part.text("path"), "content": part.text("content")} for name, part in parts.items()}


def check_counts(checkpoint: Path) -> None:
    """Compare what the small files of a checkpoint hold of its progress: it was written after one step, of one run.

    Raises:
        ConfigError: two of them contradict each other, naming both, or a value is none that a run can have.
    """
    trainer, data = _read(checkpoint / TRAINER_STATE), _read(checkpoint / DATALOADER)
    counters = trainer.object("state").object("counters", Fields({}, trainer.where, _REMEDY))
    step = read_manifest(checkpoint).info.step
    found = {
        f"the directory's name {checkpoint.name}": step_of(checkpoint.name),
        f"{TRAINER_STATE} (step)": trainer.integer("step"),
        f"{TRAINER_STATE} (counters.steps)": counters.integer("steps", default=None),
        f"{DATALOADER} (step)": data.integer("step"),
    }
    for name, value in found.items():
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
    """Prompts that the sampler has drawn, of all data sets together; None where no sampler's state is there."""
    sampler = data.object("state").object("sampler", None)
    if sampler is None:
        return None
    if "parts" not in sampler:
        return sampler.integer("num_drawn")
    parts = [part for part in sampler.items("parts") if isinstance(part, dict)]
    return sum(Fields(part, data.where, _REMEDY).integer("num_drawn") for part in parts)


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _read(path: Path) -> Fields:
    read = read_json(path, remedy=_REMEDY)
    content = Fields(migrate(path, dict(read.content), read.content.get("format")), read.where, _REMEDY)
    for key in ("step", "world_size"):
        content.integer(key)
    content.object("state")
    return content
