"""Delta saves: weight files as compressed differences to the last full checkpoint.

Chains have length one: the base of a delta is always a full checkpoint. The delta's manifest names it, with the digest of the base's
manifest. ``delta_files`` defines how a file is stored.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from rlhf_mcore.checkpoint.contents import lacking, model_files, model_names
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import DELTA_DATA, DELTA_INDEX, MANIFEST, TRAINING, scan, transitional_path
from rlhf_mcore.checkpoint.manifest import (
    Base,
    Problem,
    base_of,
    compare,
    find_base,
    read_manifest,
    relative_name,
    verify,
)
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_files import own_directory, refuse_link


def is_weight_file(name: str) -> bool:
    """Return whether a path in a checkpoint is a file of a model's weights: ``actor/*.safetensors``, not its training state."""
    parts = name.split("/")
    return len(parts) == 2 and name.endswith(".safetensors")


def choose_base(run: Path, full_every: int) -> Base | None:
    """Return the base of the next save: the newest full checkpoint, or None when a full save is due.

    Args:
        run: the run directory.
        full_every: number of saves from one full one to the next.
    """
    full: Base | None = None
    # Position of the newest delta to each base. Retention may have removed earlier ones.
    last: dict[str, int] = {}
    for checkpoint in scan(run):
        try:
            manifest = read_manifest(checkpoint.path)
        except ConfigError:
            continue
        if manifest.info.base is not None:
            last[manifest.info.base.name] = manifest.info.base.position
        else:
            full = Base(checkpoint.path.name, manifest.digest)
    position = last.get(full.name, 0) + 1 if full else 0
    return replace(full, position=position) if full and position < full_every else None


def encode(directory: Path, paths: Iterable[str | Path], base: Path) -> list[Path]:
    """Replace the weight files among ``paths`` by differences to ``base``, a full checkpoint. Returns the paths of all files now.

    Each rank does this for the files that it wrote. Local.
    """
    from rlhf_mcore.checkpoint.delta_files import encode_file

    out = []
    for path in paths:
        name = relative_name(directory, path)
        if is_weight_file(name):
            out += encode_file(directory, name, base)
        else:
            out.append(directory / name)
    return out


def verify_chain(
    checkpoint: Path,
    *,
    hashes: bool = True,
    model: str | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[Problem]:
    """Return the problems of ``manifest.verify`` and ``contents.lacking``, and the damage of a delta's base.

    ``progress`` is called with the size of each file of the checkpoint itself after it was compared, from any thread.
    """
    try:
        manifest = read_manifest(checkpoint)
    except ConfigError as error:
        return [Problem(MANIFEST, "manifest", str(error))]
    problems = compare(checkpoint, manifest, hashes=hashes, model=model, progress=progress)
    problems += lacking(checkpoint, manifest.files)
    try:
        base = find_base(checkpoint, manifest)
    except ConfigError as error:
        return [*problems, Problem(MANIFEST, "base", str(error))]
    if base is not None:
        below = [problem for problem in verify(base, hashes=hashes, model=model) if problem.is_damage]
        problems += [Problem(f"../{base.name}/{problem.path}", "base", problem.detail) for problem in below]
    return problems


def readable(checkpoint: Path, role: str = "actor", scratch: Path | None = None) -> Path:
    """Return a Hugging Face directory of a checkpoint's model with the files of the manifest only. One process calls it.

    It is the checkpoint's own directory, unless the checkpoint is a delta or the directory has further files. Then a new one is
    made: whole files are linked, differences restored.

    Args:
        checkpoint: a committed checkpoint.
        role: the model in it.
        scratch: where a new directory is made, by default the run directory, from which ``recover`` removes it.

    Raises:
        ConfigError: the manifest names no such model, or a difference or its base is damaged.
    """
    manifest = read_manifest(checkpoint)
    base = base_of(checkpoint)
    names = model_files(manifest.files, role)
    if not names:
        models = ", ".join(model_names(manifest.files))
        raise ConfigError(f"{checkpoint}: the manifest names no model {role!r}, only: {models}; choose one of these")
    if base is None and set(names) >= {path.name for path in (checkpoint / role).iterdir()} - {TRAINING}:
        return checkpoint / role
    scratch = scratch or checkpoint.resolve().parent
    scratch.mkdir(parents=True, exist_ok=True)
    whole = own_directory(transitional_path(scratch, manifest.info.step, "full", manifest.digest[:8])) / role
    refuse_link(whole)
    if not whole.is_dir():
        half = own_directory(transitional_path(scratch, manifest.info.step, "full")) / role
        Disk().remove_tree(half)
        _restore(checkpoint / role, names, base, half)
        half.rename(whole)
        half.parent.rmdir()
    return whole


def _restore(source: Path, names: list[str], base: Path | None, out: Path) -> None:
    """Restore the files that are stored as differences, and link the others."""
    from rlhf_mcore.checkpoint.delta_files import restore_file

    out.mkdir(parents=True)
    for name in names:
        if name.endswith(DELTA_INDEX):
            assert base is not None, f"{source / name} has no base"
            restore_file(source / name, base, out / name.removesuffix(DELTA_INDEX))
        elif not name.endswith(DELTA_DATA):
            _link(source / name, out / name)


def _link(file: Path, target: Path) -> None:
    """Hard-link a file that nobody writes to, or copy it where the storage has no hard links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
