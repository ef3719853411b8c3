"""Check that the content of a checkpoint with intact files is valid, that is, that a run can have saved it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mcore.bridge.files.saved_model import SavedModel
from rlhf_mcore.checkpoint.delta import Restored, readable, restore_file, verify_chain
from rlhf_mcore.checkpoint.disk import spread
from rlhf_mcore.checkpoint.layout import TRAINING
from rlhf_mcore.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Problem,
    compare,
    find_base,
    hash_file,
    read_manifest,
)
from rlhf_mcore.checkpoint.rng import check_states
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.parallel.collectives import Ask
from rlhf_mcore.trainer.resume import Checker

UNTRAINED = ("reference", "teacher")  # models in a checkpoint that have no optimizer


def check_saved(checkpoint: Path, weights: Mapping[str, Path], *, values: bool = True, base: str | None = None) -> None:
    """Read models, optimizers and random generators as a resuming run does, before anything is built.

    Args:
        checkpoint: a checkpoint whose files match its manifest.
        weights: for each model, the Hugging Face directory with its weights.
        values: whether to check the values too; if false, only names, shapes and offsets.
        base: path of the adapters' base model, if the path in the adapters' files does not exist here.

    Raises:
        ConfigError: a file has content that no run can have saved; the message names file and tensor.
    """
    check_states(checkpoint)
    for model, training in _list_trained(checkpoint, weights):
        saved = SavedModel(weights[model], training, base)
        if values:
            _refuse(saved.find_problem(range(len(saved.tensors))))


def _list_trained(checkpoint: Path, models: Iterable[str]) -> Iterator[tuple[str, Path | None]]:
    """Yield each model with the directory of its optimizer's state."""
    for model in models:
        training = checkpoint / model / TRAINING
        if model not in UNTRAINED and not training.is_dir():
            raise ConfigError(f"{training} is missing: the state of the optimizer; choose another checkpoint")
        yield model, training if training.is_dir() else None


def _refuse(problem: Sequence[Any] | None) -> None:
    if problem is not None:
        raise ConfigError(problem[1])


class SharedChecker(Checker):
    """Check checkpoints on the first rank; all ranks share the reading.

    Args:
        ask: sends a request to all ranks, which answer it with ``serve``.
        values: whether to check the values of models and optimizers too.
        base: path of the adapters' base model, if the path in the adapters' files does not exist here.
    """

    def __init__(self, ask: Ask, *, values: bool, base: str | None = None):
        self._ask, self._values, self._base = ask, values, base
        self._hashes: dict[Path, FileEntry] = {}

    def verify(self, checkpoint: Path, *, hashes: bool) -> list[Problem]:
        """Call ``verify_chain``; all ranks compute the hashes."""
        if hashes and (files := [file for file in _list_files(checkpoint) if file[1] not in self._hashes]):
            request = [[size, str(path)] for size, path in files]
            for name, entry in chain.from_iterable(self._ask({"hash": request})):
                self._hashes[Path(name)] = FileEntry(*entry)
        return verify_chain(checkpoint, hashes=hashes, hash_of=lambda path: self._hashes.get(path) or hash_file(path))

    def readable(self, checkpoint: Path, model: str, scratch: Path) -> Path:
        """Call ``delta.readable``; all ranks restore files."""
        return readable(checkpoint, model, scratch, self._restore)

    def check_saved(self, checkpoint: Path, weights: Mapping[str, Path]) -> None:
        """Check like ``saved_checkpoint.check_saved``; all ranks read the values."""
        check_states(checkpoint)
        for model, training in _list_trained(checkpoint, weights):
            saved = SavedModel(weights[model], training, self._base)
            if not self._values:
                continue
            files = sorted({tensor.file for tensor in saved.tensors})
            opened = [str(weights[model]), None if training is None else str(training), self._base]
            request = {"values": [[file.stat().st_size, str(file)] for file in files], "model": opened}
            answers = [answer for answer in self._ask(request) if answer]
            _refuse(min((problem for _, problem in answers if problem), default=None))
            read = {name for names, _ in answers for name in names}
            _refuse(saved.find_problem([n for n, t in enumerate(saved.tensors) if str(t.file) not in read]))

    def _restore(self, files: Sequence[Restored]) -> None:
        request = [[index.stat().st_size, str(target), str(index), str(base)] for index, base, target in files]
        done = {name for restored in self._ask({"restore": request}) for name in restored}
        for index, base, target in files:
            if str(target) not in done:
                restore_file(index, base, target)


def serve(request: Any) -> list[Any]:
    """Answer a request of a ``SharedChecker`` on this rank."""
    try:
        return answer(request, dist.get_rank(), dist.get_world_size())
    except Exception:  # the first rank then reads the files itself, and raises the error
        return []


def answer(request: Any, rank: int, num_ranks: int) -> list[Any]:
    """Hash, check or restore a rank's share of the files of a request.

    Return the path and hash of each file; the files whose values were checked, with the first problem; or the paths of the
    restored files.
    """
    if "restore" in request:
        return [
            name for _, name, *sources in share(request["restore"], rank, num_ranks) if _is_restored(name, *sources)
        ]
    if "values" in request:
        weights, training, base = request["model"]
        saved = SavedModel(Path(weights), None if training is None else Path(training), base, check=False)
        mine = {name for _, name in share(request["values"], rank, num_ranks)}
        return [sorted(mine), saved.find_problem([n for n, t in enumerate(saved.tensors) if str(t.file) in mine])]
    files = share(request["hash"], rank, num_ranks)
    found = spread(lambda file: _hash(file[1]), files, sum(size for size, _ in files))
    return [file for file in found if file is not None]


def share(files: Sequence[Sequence[Any]], rank: int, num_ranks: int) -> list[Sequence[Any]]:
    """Return a rank's share of the files: at most an equal part of all bytes plus one file.

    Each file is a sequence that starts with its size in bytes and its path. The first rank gets the smallest share, because it also
    reads the headers of all files.
    """
    loads, mine = [0] * num_ranks, []
    for file in sorted(files, key=lambda file: (-file[0], file[1])):
        least = min(range(num_ranks), key=lambda other: (loads[other], -other))
        loads[least] += file[0]
        if least == rank:
            mine.append(file)
    return mine


def _hash(name: str) -> list[Any] | None:
    """Return path and hash of a file, or None if it cannot be read."""
    try:
        return [name, astuple(hash_file(Path(name)))]
    except OSError:
        return None


def _is_restored(target: str, index: str, base: str) -> bool:
    try:
        restore_file(Path(index), Path(base), Path(target))
    except Exception:  # the first rank tries again, and raises the error
        return False
    return True


def _list_files(checkpoint: Path) -> list[tuple[int, Path]]:
    """List size and path of the files of a checkpoint and of its base whose content ``verify_chain`` compares."""
    try:
        manifest = read_manifest(checkpoint)
    except ConfigError:
        return []
    files = []
    for root, names in [(checkpoint, manifest), *_base(checkpoint, manifest)]:
        flawed = {problem.path for problem in compare(root, names, hashes=False)}
        files += [(e.size, root.resolve() / name) for name, e in names.files.items() if name not in flawed]
    return files


def _base(checkpoint: Path, manifest: Manifest) -> list[tuple[Path, Manifest]]:
    try:
        base = find_base(checkpoint, manifest)
        return [(base, read_manifest(base))] if base is not None else []
    except ConfigError:
        return []
