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
from rlhf_mcore.checkpoint.formats import VERSION
from rlhf_mcore.checkpoint.layout import CONFIG, DATALOADER, RNG_FILE, ROLLOUTS, TRAINER_STATE
from rlhf_mcore.checkpoint.registry import Registry
from rlhf_mcore.trainer.inputs import Inputs

if TYPE_CHECKING:
    from rlhf_mcore.trainer.ahead import SamplingAhead


CheckSaved = Callable[[Path, Mapping[str, Path]], None]  # a checkpoint, and by model the directory with its weights


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
            from rlhf_mcore.data.trajectory_files import encode_trajectories

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
