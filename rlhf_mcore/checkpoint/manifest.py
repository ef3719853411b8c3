"""Write and verify manifest.json, which contains the size and hash of every file.

It is written last, so a directory with a manifest is complete. The manifest contains its own hash and is accepted
only in the exact form in which it is written. So a single flipped bit anywhere in a checkpoint is detected.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from io import BufferedIOBase, FileIO, RawIOBase
from pathlib import Path
from typing import Any

import xxhash

from rlhf_mcore import __version__
from rlhf_mcore.checkpoint.disk import Disk, spread
from rlhf_mcore.checkpoint.layout import MANIFEST, TRAINER_STATE, step_of
from rlhf_mcore.config.engine_kinds import engine_packages
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, Fields, parse_json, read_bytes
from rlhf_mcore.machine import has_gpu, processor

FORMAT = "rlhf_mcore.checkpoint"
# Version of a checkpoint's documents (manifest, trainer_state.json, dataloader.json). A release reads its own
# version and all earlier versions. To change a document's content, increase VERSION and add a migration from the
# previous version. Older documents pass through all later migrations.
VERSION = 2
FULL = "full"
DELTA = "delta"
LIBRARIES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core",),
    **engine_packages(),
    "transformers": ("transformers",),
}

Migration = Callable[[str, dict[str, Any]], dict[str, Any]]
MIGRATIONS: dict[int, Migration] = {}

_CHUNK_BYTES = 4 * 2**20
_REMEDY = "choose another checkpoint"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The expected size of a file in bytes and the xxh3-128 of its content, in hexadecimal."""

    size: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Base:
    """The full checkpoint that a delta is a difference to: its directory next to the delta, and its manifest's digest.

    ``position``: 1 for the first delta after the full checkpoint, 2 for the next delta.
    """

    name: str
    digest: str
    position: int = 1


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """The entries of a manifest in addition to its files.

    ``metrics`` contains the evaluation at this step, or is empty.
    """

    step: int
    kind: str = FULL
    base: Base | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A parsed manifest. ``files`` is keyed by path relative to the checkpoint, with forward slashes."""

    info: CheckpointInfo
    files: Mapping[str, FileEntry]
    libraries: Mapping[str, str]
    digest: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a checkpoint.

    Values of ``kind`` for damage: manifest | missing | size | hash | unreadable | outside | absent | base.
    "absent" means that the manifest does not name a required file. The kinds extra and unchecked are not damage.
    """

    path: str
    kind: str
    detail: str

    @property
    def is_damage(self) -> bool:
        """Return whether the checkpoint cannot be trusted. Extra files are not damage, because they are not loaded."""
        return self.kind not in ("extra", "unchecked")

    def __str__(self) -> str:
        return f"{self.path}: {self.detail}"


@cache
def library_versions() -> Mapping[str, str]:
    """Return versions of this package and the large libraries without importing them.

    Without a GPU, include the processor.
    """
    versions = {"rlhf_mcore": __version__}
    if not has_gpu() and (kind := processor()):
        versions["processor"] = kind
    for name, distributions in LIBRARIES.items():
        for distribution in distributions:
            try:
                versions[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return versions


def open_unbuffered(path: Path) -> FileIO:
    """Open a file to read it whole."""
    # Without O_NONBLOCK, a link to an endless device such as the kernel's log would block.
    return open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def hash_file(path: Path) -> FileEntry:
    """Return size and hash of a file, read in chunks."""
    with open_unbuffered(path) as file:
        return hash_content(file, path.stat().st_size)


def hash_content(file: RawIOBase | BufferedIOBase, expected: int) -> FileEntry:
    """Return size and hash of the rest of an open file, which probably has ``expected`` bytes."""
    state, size = xxhash.xxh3_128(), 0
    # Most files are small, and clearing a whole chunk takes longer than reading them.
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(expected, 4096))))
    while count := file.readinto(buffer):
        state.update(buffer[:count])
        size += count
    return FileEntry(size, state.hexdigest())


def hash_files(directory: Path, paths: Iterable[str | Path]) -> dict[str, dict[str, Any]]:
    """Return the entries of files as plain JSON that ranks can gather.

    ``paths`` are inside, or relative to, ``directory``.
    """
    names = sorted({relative_name(directory, path) for path in paths})
    num_bytes = sum((directory / name).stat().st_size for name in names)
    entries = spread(lambda name: asdict(hash_file(directory / name)), names, num_bytes)
    return dict(zip(names, entries, strict=True))


def relative_name(directory: Path, path: str | Path) -> str:
    """Return ``path`` relative to ``directory``, with forward slashes. It must not lead out of the directory."""
    name = Path(path)
    if name.is_absolute():
        name = name.relative_to(directory)
    assert ".." not in name.parts and name.parts, f"{path} is not below {directory}"
    return name.as_posix()


def write_manifest(directory: Path, files: Mapping[str, Mapping[str, Any]], info: CheckpointInfo, disk: Disk) -> str:
    """Write and fsync the manifest, and return its digest. All other files must already be durable."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        **asdict(info),
        "metrics": {name: value for name, value in info.metrics.items() if math.isfinite(value)},
        "libraries": dict(library_versions()),
        "files": {name: dict(files[name]) for name in sorted(files)},
    }
    digest, data = _seal(content)
    disk.write(directory / MANIFEST, data)
    return digest


def read_manifest(directory: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        ConfigError: it is missing, damaged, or in a format that this release does not support.
    """
    path = directory / MANIFEST
    data = read_bytes(path, limit=INDEX.num_bytes, remedy=_REMEDY)
    content = dict(parse_json(data, limits=INDEX, where=str(path), remedy=_REMEDY).content)
    if content.get("format") != FORMAT:
        raise ConfigError(f"{path}: not the manifest of a checkpoint of this project; {_REMEDY}")
    digest = content.pop("digest", None)
    migrated = migrate(path, content, content.get("version"))
    if (digest, data) != _seal(content):
        raise ConfigError(f"{path}: the manifest is damaged (its digest differs); {_REMEDY}")
    return _parse(Fields(migrated, str(path), _REMEDY), digest)


def verify(directory: Path, *, hashes: bool = True, model: str | None = None) -> list[Problem]:
    """Return every damaged, missing, truncated or extra file of a checkpoint, by path, or [] if the checkpoint is intact.

    ``delta.verify_chain`` also checks that the manifest names all required files, and checks a delta's base.

    Args:
        hashes: False compares names and sizes only.
        model: hash only the files of this model's directory, without its training state. Compare names and sizes
            of all other files.
    """
    try:
        manifest = read_manifest(directory)
    except ConfigError as error:
        return [Problem(MANIFEST, "manifest", str(error))]
    return compare(directory, manifest, hashes=hashes, model=model)


def compare(
    directory: Path,
    manifest: Manifest,
    *,
    hashes: bool = True,
    model: str | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
    hash_of: Callable[[Path], FileEntry] = hash_file,
) -> list[Problem]:
    """Return the problems of ``verify`` for a manifest that was read already.

    ``progress`` is called with the size of each file. ``hash_of`` returns the hash of a file. Both are called from
    any thread.
    """
    root = directory.resolve()
    num_bytes = sum(entry.size for entry in manifest.files.values())

    def check(item: tuple[str, FileEntry]) -> Problem | None:
        wanted = model is None or item[0].rpartition("/")[0] == model
        problem = _check(root, *item, hash_of if hashes and wanted else None)
        progress(item[1].size)
        return problem

    checked = spread(check, manifest.files.items(), num_bytes)
    problems = [problem for problem in checked if problem is not None]
    known = {*manifest.files, MANIFEST}
    problems += [Problem(name, "extra", "not in the manifest") for name in files_below(root) if name not in known]
    return sorted(problems, key=lambda problem: (problem.path, problem.kind))


def files_below(directory: Path) -> list[str]:
    """Return the paths of all files and links below a directory, relative to it.

    Links to directories are not followed.
    """
    names: list[str] = []
    for folder, folders, files in os.walk(directory):
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        names += [Path(folder, name).relative_to(directory).as_posix() for name in (*files, *linked)]
    return sorted(names)


def _check(root: Path, name: str, entry: FileEntry, hash_of: Callable[[Path], FileEntry] | None) -> Problem | None:
    path = root / name
    if root not in Path(os.path.realpath(path)).parents:
        return Problem(name, "outside", "leads out of the checkpoint")
    try:
        size = path.stat().st_size
        if not path.is_file():
            return Problem(name, "unreadable", "not a regular file")
        if size != entry.size:
            verb = "truncated" if size < entry.size else "too long"
            return Problem(name, "size", f"{verb}: {size} bytes, the manifest has {entry.size}")
        if hash_of is not None and hash_of(path) != entry:
            return Problem(name, "hash", "damaged: its content differs from the manifest's hash")
    except FileNotFoundError:
        return Problem(name, "missing", "missing")
    except OSError as error:
        return Problem(name, "unreadable", f"unreadable ({error.strerror})")
    return None


def _seal(content: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the digest of a manifest, and the manifest with the digest as its last entry."""
    unsealed = json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False).encode()
    digest = xxhash.xxh3_128_hexdigest(unsealed + b"\n")
    return digest, unsealed[:-2] + f',\n "digest": "{digest}"\n}}\n'.encode()


def _parse(content: Fields, digest: str) -> Manifest:
    base, metrics, files = content.object("base", None), content.object("metrics"), content.object("files")
    info = CheckpointInfo(
        content.integer("step"),
        content.text("kind", (FULL, DELTA)),
        Base(base.text("name"), base.text("digest"), base.integer("position", 1)) if base is not None else None,
        {name: metrics.number(name) for name in metrics},
    )
    entries = {
        name: FileEntry(entry.integer("size"), entry.text("xxh3_128"))
        for name in files
        for entry in [files.object(name)]
    }
    return Manifest(info, entries, content.table("libraries"), digest)


def base_of(checkpoint: Path) -> Path | None:
    """Return the full checkpoint that a delta is a difference to, or None for a full checkpoint.

    Raises:
        ConfigError: the base is missing, or was saved again after the delta.
    """
    return find_base(checkpoint, read_manifest(checkpoint))


def find_base(checkpoint: Path, manifest: Manifest) -> Path | None:
    """Return the base of a checkpoint with a manifest that was read already.

    The errors are the same as in ``base_of``.
    """
    base = manifest.info.base
    if base is None:
        return None
    path = checkpoint.resolve().parent / base.name
    wanted = f"{checkpoint.name} holds differences to {base.name}"
    if step_of(base.name) is None or not (path / MANIFEST).is_file():
        raise ConfigError(
            f"{checkpoint}: {wanted}, which is missing next to it; restore it, or choose another checkpoint"
        )
    if read_manifest(path).digest != base.digest:
        raise ConfigError(f"{checkpoint}: {wanted}, which was saved again since; choose another checkpoint")
    return path


def has_base(checkpoint: Path) -> bool:
    """Return whether a checkpoint's base exists. Return True for a full checkpoint or an unreadable manifest."""
    try:
        manifest = read_manifest(checkpoint)
    except ConfigError:
        # damaged: loading it raises the error
        return True
    try:
        find_base(checkpoint, manifest)
    except ConfigError:
        return False
    return True


def migration(version: int) -> Callable[[Migration], Migration]:
    """Register a function (document name, content) -> content in the version after ``version``."""

    def register(function: Migration) -> Migration:
        assert version not in MIGRATIONS, f"version {version} has a migration already"
        MIGRATIONS[version] = function
        return function

    return register


def migrate(path: Path, content: dict[str, Any], version: Any) -> dict[str, Any]:
    """Migrate a document's content from its version to ``VERSION``.

    Raises:
        ConfigError: this release does not support the version.
    """
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ConfigError(
            f"{path}: format version {version!r}, but this release reads versions 1 to {VERSION}; "
            "use the release that wrote it, or choose another checkpoint"
        )
    for number in range(version, VERSION):
        content = MIGRATIONS[number](path.name, content)
    return content


@migration(1)
def _add_inputs(document: str, content: dict[str, Any]) -> dict[str, Any]:
    """Add version 2's fingerprints of the run's inputs and its last steps. All are unknown."""
    return {"inputs": None, "recent": [], **content} if document == TRAINER_STATE else content
