"""Brings a run back to where it was at a checkpoint: at its start, and at its end to the best one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.files.transfer import load
from rlhf_mcore.checkpoint.delta import readable, verify_chain
from rlhf_mcore.checkpoint.layout import BEST, checkpoint_path, linked_step
from rlhf_mcore.config.errors import ConfigError, shortened
from rlhf_mcore.parallel.collectives import broadcast_json, on_every_rank
from rlhf_mcore.roles.model import RoleModel, TrainedModel
from rlhf_mcore.roles.role_files import RoleFiles
from rlhf_mcore.trainer.run_state import RunState
from rlhf_mcore.trainer.saved_state import restore_state

if TYPE_CHECKING:
    from rlhf_mcore.cli.saving import SavedModel


@dataclass(frozen=True, slots=True)
class Restorer:
    """Brings a run to where it was at a checkpoint. Others leave the device while ``room`` is entered."""

    directory: Path  # of the run
    state: RunState
    files: Sequence[RoleFiles]
    models: Sequence[SavedModel]
    room: Callable[[], AbstractContextManager[None]]

    def resume(self, checkpoint: Path) -> list[str]:
        """Restore everything but the weights, which were loaded when the models were built. Collective over the world.

        Returns what the user should know.
        """
        for part in self.files:
            on_every_rank(partial(part.load_state, checkpoint))
        return on_every_rank(lambda: restore_state(self.state, checkpoint))

    def load_best(self, last_step: int, *, hashes: bool) -> int | None:
        """Restore the best checkpoint: weights, optimizers, counters. Collective over the world.

        Returns its step; None where there is none, and where it is that of the last step.

        Raises:
            ConfigError: it is damaged.
        """
        best = broadcast_json(on_every_rank(lambda: self._find_best(last_step, hashes)), 0)
        if best is None:
            return None
        step, weights = best
        # Responses of engines are compared with the weights of the engines.
        with self.room():
            for saved in self.models:
                if isinstance(saved.model, TrainedModel):
                    on_every_rank(partial(_load_weights, saved.model, weights[saved.name]))
            self.resume(checkpoint_path(self.directory, step))
        return int(step)

    def _find_best(self, last_step: int, hashes: bool) -> tuple[int, dict[str, str]] | None:
        """Return the best step, and by model the directory with its weights; on the first rank."""
        step = linked_step(self.directory, BEST) if dist.get_rank() == 0 else None
        if step is None or step == last_step:
            return None
        checkpoint = checkpoint_path(self.directory, step)
        problems = verify_chain(checkpoint, hashes=hashes)
        if damage := [problem for problem in problems if problem.is_damage]:
            raise ConfigError(
                f"checkpoint.load_best_model_at_end: checkpoint-{step}, the best one, is damaged ({shortened(damage, 3)}); "
                "the last one is whole, use that"
            )
        return step, {model.name: str(readable(checkpoint, model.name, self.directory)) for model in self.models}


def _load_weights(model: RoleModel, directory: str) -> None:
    parameters = model.local_parameters() if model.adapter is None else model.adapter_parameters()
    if model.model is not None:  # what is not on the device is loaded into its copy on the host
        parameters = [replace(each, tensor=model.model.movable.current(each.tensor)) for each in parameters]
    if model.adapter_geometry is not None:
        from rlhf_mcore.roles.adapters import load_adapters

        load_adapters(parameters, model.adapter_geometry, directory)
    else:
        load(parameters, model.spec.geometry, HFReader(directory))
