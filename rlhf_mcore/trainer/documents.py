"""The small files of a checkpoint: counters and controllers, the place in the data, random generators, the configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.checkpoint import rng
from rlhf_mcore.checkpoint.layout import CONFIG, DATALOADER, RNG_FILE, TRAINER_STATE
from rlhf_mcore.checkpoint.registry import Registry
from rlhf_mcore.config.errors import ConfigError

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything of a run beside its models that goes on where it was.

    ``registry`` and ``data`` hold the objects with a state, equal on all ranks; ``generators`` and ``set_generators`` are further
    random generators of this rank. ``recent`` tells of the last steps (step, time, loss, reward): for readers of the file, a run that
    is resumed has it from its metrics.
    """

    registry: Registry
    data: Registry
    config_yaml: str
    recent: Callable[[], Sequence[Mapping[str, Any]]] = list
    generators: Callable[[], dict[str, Tensor]] = dict
    set_generators: Callable[[Mapping[str, Tensor]], None] = lambda states: None

    def documents(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint, on the first rank; {} on the others. Collective over the world."""
        generators = rng.gather_states({**rng.capture(), **self.generators()})
        if generators is None:
            return {}
        head = {"format": _FORMAT, "step": step, "world_size": dist.get_world_size()}
        recent = list(self.recent())
        return {
            TRAINER_STATE: _encode({**head, "state": self.registry.state_dict(), "recent": recent}),
            DATALOADER: _encode({**head, "state": self.data.state_dict()}),
            RNG_FILE: rng.encode(generators),
            CONFIG: self.config_yaml.encode(),
        }

    def load(self, checkpoint: Path) -> list[str]:
        """Take up what :meth:`documents` has written. Local. Returns what the user should know.

        Raises:
            ConfigError: a file cannot be read, or does not fit this run.
        """
        for name, registry in ((TRAINER_STATE, self.registry), (DATALOADER, self.data)):
            registry.load_state_dict(_read(checkpoint / name)["state"], str(checkpoint / name))
        states = rng.read_states(checkpoint, dist.get_rank(), dist.get_world_size())
        if states is None:
            return ["another number of ranks than the checkpoint's: random generators begin anew from the seed"]
        rng.restore(states)
        self.set_generators(states)
        return []


def read_step(checkpoint: Path) -> int:
    """The number of steps that a checkpoint's run had made."""
    return int(_read(checkpoint / TRAINER_STATE)["step"])


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1).encode() + b"\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable ({error}); choose another checkpoint") from error
    if not isinstance(content, dict) or content.keys() - {"recent"} != {"format", "step", "world_size", "state"}:
        raise ConfigError(f"{path}: not the state of a run; choose another checkpoint")
    if content["format"] != _FORMAT or type(content["step"]) is not int or not isinstance(content["state"], dict):
        raise ConfigError(
            f"{path}: format {content['format']!r}, this version reads {_FORMAT}; choose another checkpoint"
        )
    return content
