"""What a checkpoint holds of a trained role: a Hugging Face directory, and beside its weights what the optimizer needs to go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlhf_mcore.bridge.export import Exporter
from rlhf_mcore.bridge.state_files import STATE_INDEX, RankState, StateReader, gather_index, state_file
from rlhf_mcore.bridge.tensor_files import FileImage
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.optimizer_state import (
    load_optimizer_scalars,
    optimizer_scalars,
    optimizer_shards,
    unrounded_masters,
)

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

TRAINING = "training"


class RoleFiles:
    """Writes and reads one role's part of a checkpoint, ``<checkpoint>/<name>``. Built and called collectively."""

    def __init__(self, name: str, model: MegatronModel, optimizer: MegatronOptimizer, exporter: Exporter):
        self.name = name
        self._model, self._optimizer, self._exporter = model, optimizer, exporter
        self._image: FileImage | None = None

    def write(self, checkpoint: Path) -> list[Path]:
        """Write this rank's files straight from the live tensors and return their paths. Collective over the world.

        Comes to its end on every rank, whatever happens to the files of this one, and raises afterwards.
        """
        state = self._state()
        index = gather_index(state.described, self._model.spec.geometry, optimizer_scalars(self._optimizer))
        directory = checkpoint / self.name
        (directory / TRAINING).mkdir(parents=True, exist_ok=True)
        paths = self._exporter.write(directory)
        if state.described:
            path = directory / TRAINING / state_file(dist.get_rank())
            state.write(path)
            paths.append(path)
        return paths + _write_index(directory, index)

    def snapshot(self) -> Callable[[Path], list[Path]]:
        """Copy everything into host memory that is kept for the next time. Collective over the world.

        Returns what writes the copy: it needs no other rank, and may run in a thread of its own, until the next snapshot.
        """
        images = self._exporter.snapshot()
        state = self._state()
        if state.described:
            image = self._image_for(state)
            state.copy_to(image)
        self._model.platform.synchronize()
        index = gather_index(state.described, self._model.spec.geometry, optimizer_scalars(self._optimizer))

        def write(checkpoint: Path) -> list[Path]:
            directory = checkpoint / self.name
            (directory / TRAINING).mkdir(parents=True, exist_ok=True)
            paths = [image.write(directory) for image in images]
            paths += self._exporter.write_companions(directory)
            if state.described:
                paths.append(image.write(directory / TRAINING))
            return paths + _write_index(directory, index)

        return write

    def load_state(self, checkpoint: Path) -> None:
        """Fill the optimizer from a checkpoint whose weights the model has already. Local.

        Raises:
            ConfigError: the state is damaged, of another model, or does not belong to these weights.
        """
        directory = checkpoint / self.name
        reader = StateReader(directory / TRAINING, self._model.spec.geometry)
        reader.read_into(optimizer_shards(self._model, self._optimizer))
        load_optimizer_scalars(self._optimizer, reader.scalars)
        if wrong := unrounded_masters(self._model, self._optimizer):
            raise ConfigError(
                f"{directory}: the weights of {wrong[0]} are not its fp32 master weights in {TRAINING}/, rounded. "
                "Resume from another checkpoint, or start from the weights alone (model.path)."
            )

    def _state(self) -> RankState:
        return RankState(optimizer_shards(self._model, self._optimizer), self._model.spec.geometry)

    def _image_for(self, state: RankState) -> FileImage:
        if self._image is None or self._image.layout.header != state.layout.header:
            pinned = self._model.platform.device().type == "cuda"
            self._image = FileImage.empty(state_file(dist.get_rank()), state.layout, pinned)
        return self._image


def _write_index(directory: Path, index: dict[str, Any] | None) -> list[Path]:
    if index is None:
        return []
    path = directory / TRAINING / STATE_INDEX
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
    return [path]
