"""Check that the content of a checkpoint with intact files is valid, that is, that a run can have saved it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open

from rlhf_mcore.bridge.files.file_values import FileValues, Types, ValueReader
from rlhf_mcore.bridge.files.saved_model import Known, check_saved_model
from rlhf_mcore.bridge.files.state_files import MASTER, STATE_INDEX
from rlhf_mcore.checkpoint.delta import Restored, readable, restore_file, verify_chain
from rlhf_mcore.checkpoint.disk import spread
from rlhf_mcore.checkpoint.layout import DELTA_INDEX, TRAINING
from rlhf_mcore.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Problem,
    compare,
    find_base,
    hash_content,
    hash_file,
    open_unbuffered,
    read_manifest,
)
from rlhf_mcore.checkpoint.rng import check_states
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, read_json
from rlhf_mcore.parallel.collectives import Ask
from rlhf_mcore.trainer.resume import Checker

UNTRAINED = ("reference", "teacher")  # models in a checkpoint that have no optimizer


def check_saved(
    checkpoint: Path,
    weights: Mapping[str, Path],
    *,
    values: bool = True,
    base: str | None = None,
    known: Known = lambda path: None,
) -> None:
    """Read models, optimizers and random generators as a resuming run does, before anything is built.

    Args:
        checkpoint: a checkpoint whose files match its manifest.
        weights: for each model, the Hugging Face directory with its weights.
        values: whether to check the values too; if false, only names, shapes and offsets.
        base: path of the adapters' base model, if the path in the adapters' files does not exist here.
        known: as in ``check_saved_model``.

    Raises:
        ConfigError: a file has content that no run can have saved; the message names file and tensor.
    """
    check_states(checkpoint)
    for model, directory in weights.items():
        training = checkpoint / model / TRAINING
        if model not in UNTRAINED and not training.is_dir():
            raise ConfigError(f"{training} is missing: the state of the optimizer; choose another checkpoint")
        check_saved_model(directory, training if training.is_dir() else None, values=values, base=base, known=known)


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
        self._found: dict[Path, FileValues] = {}

    def verify(self, checkpoint: Path, *, hashes: bool) -> list[Problem]:
        """Call ``verify_chain``; all ranks compute the hashes."""
        if hashes:
            self._read(checkpoint, _list_files(checkpoint))
        return verify_chain(checkpoint, hashes=hashes, hash_of=lambda path: self._hashes.get(path) or hash_file(path))

    def readable(self, checkpoint: Path, model: str, scratch: Path) -> Path:
        """Call ``delta.readable``; all ranks restore files."""
        return readable(checkpoint, model, scratch, self._restore)

    def check_saved(self, checkpoint: Path, weights: Mapping[str, Path]) -> None:
        """Call ``saved_checkpoint.check_saved``; all ranks read the values."""
        if self._values:
            made = {model: path for model, path in weights.items() if path != checkpoint / model}
            paths = [(file.resolve(), model) for model, path in made.items() for file in path.glob("*.safetensors")]
            self._read(checkpoint, [(path, path.stat().st_size, model) for path, model in paths])
        check_saved(checkpoint, weights, values=self._values, base=self._base, known=self._found.get)

    def _read(self, checkpoint: Path, files: Sequence[tuple[Path, int, str]]) -> None:
        """Let all ranks read ``files``: tuples of path, size and model. The model is "" if the values are not checked."""
        request = []
        for path, size, model in files:
            judged = model if self._values else ""
            if path not in (self._found if judged else self._hashes):
                request.append([size, str(path), judged])
        if not request:
            return
        compared = _compared_types(checkpoint) if self._values else {}
        for found in self._ask({"read": request, "compared": compared}):
            for name, entry, values in found:
                self._hashes[Path(name)] = FileEntry(*entry)
                if values is not None:
                    self._found[Path(name)] = FileValues(*values)

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
    """Read or restore a rank's share of the files of a request. Returns the files that could be read or restored."""
    if "restore" in request:
        return [
            name for _, name, *sources in share(request["restore"], rank, num_ranks) if _is_restored(name, *sources)
        ]
    files = share(request["read"], rank, num_ranks)
    found = spread(lambda file: _read_file(file, request["compared"]), files, sum(size for size, *_ in files))
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


def _read_file(file: Sequence[Any], compared: Mapping[str, Types]) -> list[Any] | None:
    """Return path, hash and values of a file; the values are None if they are not checked. Returns None if reading fails."""
    size, name, model = file
    try:
        with open_unbuffered(Path(name)) as content:
            if not model:
                return [name, astuple(hash_content(content, size)), None]
            reader = ValueReader(content, compared.get(model, {}))
            return [name, astuple(hash_content(reader, size)), astuple(reader.values) if reader.values else None]
    except OSError:
        return None


def _is_restored(target: str, index: str, base: str) -> bool:
    try:
        restore_file(Path(index), Path(base), Path(target))
    except Exception:  # the first rank tries again, and raises the error
        return False
    return True


def _list_files(checkpoint: Path) -> list[tuple[Path, int, str]]:
    """List the files of a checkpoint and of its base whose content ``verify_chain`` compares."""
    try:
        manifest = read_manifest(checkpoint)
    except ConfigError:
        return []
    files = []
    for root, names in [(checkpoint, manifest), *_base(checkpoint, manifest)]:
        flawed = {problem.path for problem in compare(root, names, hashes=False)}
        for name, entry in names.files.items():
            has_values = root is checkpoint and "/" in name and name.endswith(".safetensors")
            if name not in flawed:
                files.append((root.resolve() / name, entry.size, name.split("/")[0] if has_values else ""))
    return files


def _base(checkpoint: Path, manifest: Manifest) -> list[tuple[Path, Manifest]]:
    try:
        base = find_base(checkpoint, manifest)
        return [(base, read_manifest(base))] if base is not None else []
    except ConfigError:
        return []


def _compared_types(checkpoint: Path) -> dict[str, Types]:
    """Return dtype and shape of each tensor with master weights, for each model of a checkpoint that may be damaged."""
    found = {}
    for path in sorted(checkpoint.glob(f"*/{TRAINING}/{STATE_INDEX}")):
        model = path.parent.parent
        try:
            tensors = read_json(path, limits=INDEX).object("tensors").content
            types = _stored_types(model)
            found[model.name] = {name: types[name] for name, entry in tensors.items() if MASTER in entry["kinds"]}
        except Exception:  # the first rank compares these values, if it finds no other error
            continue
    return {model: types for model, types in found.items() if types}


def _stored_types(model: Path) -> Types:
    """Return dtype and shape of each tensor of a model, from full files and from deltas."""
    types: dict[str, tuple[str, Sequence[int]]] = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                types[name] = (part.get_dtype(), part.get_shape())
    for path in model.glob(f"*{DELTA_INDEX}"):
        header = json.loads(read_json(path, limits=INDEX).text("header"))
        types |= {name: (part["dtype"], part["shape"]) for name, part in header.items() if name != "__metadata__"}
    return types
