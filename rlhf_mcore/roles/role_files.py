"""The files of a role in a checkpoint: a Hugging Face directory, and the state of the optimizer in a subdirectory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.state_files import STATE_INDEX, RankState, gather_index, state_file
from rlhf_mcore.bridge.files.state_reader import StateReader, check_scalars
from rlhf_mcore.bridge.files.tensor_files import FileImage
from rlhf_mcore.checkpoint.layout import TRAINING
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.mcore.optimizer import Optimizer
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.residency.ledger import WEIGHTS
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.trained_model import TrainedModel

_COUNTS = ("num_updates", "num_bad_updates")


class RoleFiles:
    """Write and read one model's part of a checkpoint, ``<checkpoint>/<name>``.

    Built and called on every rank of the world.

    A role that is not trained has only weights.
    """

    def __init__(self, name: str, role: RoleModel, exporter: Exporter):
        self.name, self._role, self._exporter = name, role, exporter
        self._image: FileImage | None = None

    def num_bytes(self) -> int:
        """Return the size of the files that this rank writes. Local."""
        state = self._build_state().layout
        # The index is about as large as the headers, because it names the same tensors.
        return self._exporter.num_bytes + state.num_bytes + len(state.header)

    def is_finite(self) -> bool:
        """Return whether this rank's weights and optimizer state are all finite.

        True if the role is not trained. Local.
        """
        return not isinstance(self._role, TrainedModel) or self._role.is_finite()

    def write(self, checkpoint: Path) -> list[Path]:
        """Write this rank's files directly from the live tensors and return their paths. Collective over the world.

        If files of this rank fail, it still takes part in all collectives, and raises afterwards.
        """
        directory = checkpoint / self.name
        index = self._gather_index(state := self._build_state())
        with self._role.on_device():
            paths = self._exporter.write(directory)
        if state.described:
            (directory / TRAINING).mkdir(exist_ok=True)
            state.write(path := directory / TRAINING / state_file(dist.get_rank()))
            paths.append(path)
        return paths + _write_index(directory, index)

    def snapshot(self) -> Callable[[Path], list[Path]]:
        """Copy everything to host memory, which is reused for the next snapshot. Collective over the world.

        Weights that are offloaded are copied before this method returns, and so are weights that are joined from
        several ranks or columns. A thread copies the other weights and the state of the optimizer (most of the bytes)
        while the run continues. The next update waits for the thread, after evaluation and generation.

        Return a function that writes the copy. It needs no other rank, and can run in a separate thread until the
        next snapshot.
        """
        model, optimizer = self._role.model, self._optimizer
        stays = optimizer is not None and model is not None and WEIGHTS not in model.movable.parts
        with self._role.on_device():
            weights, copy_weights = self._exporter.snapshot()
            if not stays:
                copy_weights()
        images, copies = [(image, "") for image in weights], [copy_weights] if stays else []
        state = self._build_state()
        if state.described:
            if self._image is None or self._image.layout.header != state.layout.header:
                self._image = FileImage.empty(state_file(dist.get_rank()), state.layout)
            copies.append(partial(state.copy_to, self._image))
            images.append((self._image, TRAINING))
        copied: Future[None] | None = None
        if copies:
            assert optimizer is not None
            copied = optimizer.read_in_thread(partial(_run_all, copies))
        if self._role.model is not None:
            self._role.model.platform.synchronize()
        index = self._gather_index(state)

        def write(checkpoint: Path) -> list[Path]:
            if copied is not None:
                copied.result()
            directory = checkpoint / self.name
            for folder in {directory, *(directory / folder for _, folder in images)}:
                folder.mkdir(parents=True, exist_ok=True)
            paths = [image.write(directory / folder) for image, folder in images]
            return paths + self._exporter.write_rest(directory) + _write_index(directory, index)

        return write

    def load_state(self, checkpoint: Path) -> None:
        """Load the optimizer's state from a checkpoint whose weights are already loaded. Local.

        Raises:
            ConfigError: the state is damaged, is for another model, or does not match these weights.
        """
        role, optimizer = self._role, self._optimizer
        if not isinstance(role, TrainedModel) or optimizer is None:
            return
        directory = checkpoint / self.name
        reader = StateReader(directory / TRAINING, self._role.trained_geometry)
        check_scalars(reader.scalars)
        reader.read_into(optimizer.shards())
        optimizer.load_scalars(reader.scalars.content)
        role.num_updates, role.num_bad = map(reader.scalars.integer, _COUNTS)
        if wrong := optimizer.unrounded_masters():
            raise ConfigError(
                f"{directory}: the weights of {wrong[0]} differ from its rounded fp32 master weights in {TRAINING}/. "
                "Resume from another checkpoint, or start from the weights alone (model.path)."
            )

    @property
    def _optimizer(self) -> Optimizer | None:
        """Return the optimizer of a trained role, or None if this rank holds no part of it."""
        return self._role.model.optimizer if self._role.model is not None else None

    def _build_state(self) -> RankState:
        return RankState(self._optimizer.shards() if self._optimizer is not None else [], self._role.trained_geometry)

    def _gather_index(self, state: RankState) -> dict[str, Any] | None:
        """Gather the index of a trained role's state. Return it on the first rank, and None on others."""
        role = self._role
        if not isinstance(role, TrainedModel):
            return None
        scalars = None
        if self._optimizer is not None:
            counts = dict(zip(_COUNTS, (role.num_updates, role.num_bad), strict=True))
            scalars = {**self._optimizer.scalars(), **counts}
        return gather_index(state.described, self._role.trained_geometry, scalars, world_group(), role.trained)


def _run_all(actions: Sequence[Callable[[], None]]) -> None:
    for action in actions:
        action()


def _write_index(directory: Path, index: dict[str, Any] | None) -> list[Path]:
    if index is None:
        return []
    path = directory / TRAINING / STATE_INDEX
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")
    return [path]
