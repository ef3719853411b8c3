"""Read Megatron-core's ``torch_dist`` checkpoints from their index, without process group, megatron or code from the file.

A key is a Megatron parameter. Layers are either part of its name or stacked on its first axis. Experts are either
part of its name or stacked on the next axis.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from functools import partial
from os.path import exists, isfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.formats.foreign_index import ForeignPart, read_index
from rlhf_mcore.bridge.files.formats.located import locate_one, read
from rlhf_mcore.bridge.files.formats.tiles import Index, Rows, Tile, Tiled, TiledSource, check_tiles, expert_form
from rlhf_mcore.bridge.files.hf_files import inside
from rlhf_mcore.bridge.map.rules import hf_shapes, is_padded, row_runs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import read_json, read_text, shorten
from rlhf_mcore.geometry import ModelGeometry

INDEX = ".metadata"
BACKEND = "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
COMPANIONS = "huggingface"  # a converted checkpoint stores config.json and the tokenizer here
CACHE_BYTES = 64 * 2**20
# Entries that are not weights: optimizer state, and numerical state of single modules.
_NOT_WEIGHTS = re.compile(r"(.*\.)?optimizer\.|rng_state|rerun_state|.*\._extra_state|opt_param_scheduler")
_WRAPPERS = re.compile(r"(model\.|module\.)+(?=embedding\.|decoder\.|output_layer\.)")
_EXPERT = re.compile(r"mlp\.experts\.(?:experts\.)?(?:(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(_[wv])?")


def find_checkpoint(directory: Path) -> Path:
    """Return the directory of the weights: ``directory`` itself, or the directory that its tracker file names.

    Raises:
        ConfigError: there is no ``torch_dist`` checkpoint.
    """
    tracker = directory / TRACKER
    weights = directory
    if exists(tracker):
        step = read_text(tracker, limit=1000).strip()
        if not re.fullmatch(r"\d{1,12}|release", step):
            raise ConfigError(f"{tracker}: {shorten(step, 40)!r} is neither a step nor 'release'")
        weights = directory / (step if step == "release" else f"iter_{int(step):07d}")
    if not isfile(weights / INDEX):
        raise ConfigError(
            f"{weights}: not a torch_dist checkpoint (no {INDEX}); give the directory of a step (iter_0001000) or the directory "
            f"with {TRACKER}. The older 'torch' format (mp_rank_*) is pickle, which is not supported."
        )
    _check_backend(weights)
    return weights


def _check_backend(directory: Path) -> None:
    path = directory / BACKEND
    if not exists(path):
        return
    backend = read_json(path).text("sharded_backend")
    if backend != "torch_dist":
        raise ConfigError(
            f"{path}: sharded_backend is {shorten(backend)!r}; only 'torch_dist' is supported. Save with --ckpt-format torch_dist."
        )


def open_torch_dist(directory: Path, companions: Path, geometry: ModelGeometry, *, check: bool = True) -> TiledSource:
    """Open a ``torch_dist`` checkpoint as Hugging Face tensors.

    With ``check``, compare checksums when parts are read.

    Raises:
        ConfigError: files are missing, truncated or unsafe, or contain other tensors than the geometry requires.
    """
    chunks = _Chunks(CACHE_BYTES, check=check)
    tensors: dict[str, Tiled] = {}
    rows: defaultdict[str, list[Rows]] = defaultdict(list)
    for key, tensor in read_index(directory / INDEX, lambda name: not _NOT_WEIGHTS.match(name)).items():
        tiles = []
        for part in tensor.parts:
            path = inside(directory, part.file, part.offset + part.length)
            tiles.append(Tile(part.start, part.shape, path.name, partial(chunks.load, path, part, tensor.dtype)))
        tensors[key] = Tiled(tensor.dtype, tensor.shape, tiles)
        for name, run in _rows(key, tensors[key].shape, geometry, directory):
            rows[name].append(run)
        check_tiles(key, tensors[key], directory)
    shapes = hf_shapes(geometry)
    whole = {name: _in_order(name, tensor, shapes[name], directory) for name, tensor in rows.items() if name in shapes}
    ordered = {name: whole[name] for name in shapes if name in whole}
    return TiledSource(directory, companions, tensors, ordered, shapes)


class _Chunks:
    """A cache of the last chunks. Parts of one chunk are usually read one after the other."""

    def __init__(self, limit_bytes: int, *, check: bool):
        self._limit, self._cached_bytes, self._check = limit_bytes, 0, check
        self._cached: OrderedDict[tuple[Path, int], Tensor] = OrderedDict()

    def load(self, path: Path, part: ForeignPart, dtype: torch.dtype, inside: tuple[slice, ...]) -> Tensor:
        """Read a rectangle of a part."""
        offset = part.offset
        if (path, offset) not in self._cached:
            while self._cached and self._cached_bytes + part.length > self._limit:
                self._cached_bytes -= self._cached.popitem(last=False)[1].nbytes
            located = locate_one(path, offset, part.length, check=self._check)
            if (located.shape, located.dtype) != (part.shape, dtype):
                raise ConfigError(
                    f"{path}: the tensor at byte {offset} is {located.dtype} {located.shape}, the index has {dtype} {part.shape}."
                )
            chunk = read(path, located, tuple(slice(0, size) for size in located.shape))
            self._cached[path, offset] = chunk
            self._cached_bytes += chunk.nbytes
        self._cached.move_to_end((path, offset))
        return self._cached[path, offset][inside]


class _Content(NamedTuple):
    """A Megatron parameter, or a half of one, in a tensor of a checkpoint."""

    parameter: str
    lead: Index  # position in the stack
    half: str  # "_w": the gate's rows only, "_v": the up projection's rows only


def _contents(key: str, shape: Index, geometry: ModelGeometry) -> Iterator[_Content]:
    """Yield the Megatron parameters in a checkpoint tensor."""
    name = _WRAPPERS.sub("", key, count=1) if _WRAPPERS.match(key) else key
    match = re.fullmatch(r"decoder\.layers\.(?:(\d+)\.)?(\D.*)", name)
    if not match:
        yield _Content(name, (), "")
        return
    layers = (
        [(int(match.group(1)), ())]
        if match.group(1)
        else [(i, (i,)) for i in range(_stack(shape, 0, geometry.num_layers))]
    )
    expert = _EXPERT.fullmatch(match.group(2))
    for layer, lead in layers:
        prefix = f"decoder.layers.{layer}."
        if expert is None:
            tail, half = (
                (match.group(2)[:-2], match.group(2)[-2:])
                if match.group(2)[-2:] in ("_w", "_v")
                else (match.group(2), "")
            )
            yield _Content(prefix + tail, lead, half)
            continue
        number, linear, half = expert.groups()
        one = f"{prefix}mlp.experts.{linear}"
        if number is not None:
            yield _Content(f"{one}{number}", lead, half or "")
            continue
        for k in range(_stack(shape, len(lead), geometry.num_experts)):
            yield _Content(f"{one}{k}", (*lead, k), half or "")


def _stack(shape: Index, axis: int, expected: int) -> int:
    if len(shape) <= axis or shape[axis] != expected:
        raise ConfigError(f"a stack of shape {shape} does not have {expected} entries on axis {axis}")
    return expected


def _rows(key: str, shape: Index, geometry: ModelGeometry, where: Path) -> Iterator[tuple[str, Rows]]:
    try:
        for content in _contents(key, shape, geometry):
            runs, full = row_runs(content.parameter, geometry)
            form = expert_form(content.parameter, geometry)
            if content.half and form is not None:
                raise ConfigError("separate gate and up projections of these experts are not supported")
            if content.half:
                runs = [runs["_w_v".index(content.half) // 2]]
                full = (runs[0].count, *full[1:])
            own = shape[len(content.lead) :]
            padded = is_padded(content.parameter, geometry)
            if len(own) != len(full) or own[1:] != full[1:] or (own[0] < full[0] if padded else own[0] != full[0]):
                raise ConfigError(
                    f"shape {shape} differs from config.json, which requires {full} after {len(content.lead)} stacked axes"
                )
            for run in runs:
                row = run.row - (runs[0].row if content.half else 0)
                yield run.hf_name, Rows(run.hf_row, run.count, key, content.lead, row, form)
    except (ConfigError, KeyError, IndexError) as error:
        text = error.args[0] if error.args else error
        raise ConfigError(f"{where}: tensor {key} does not belong to this model ({text}).") from error


def _in_order(name: str, runs: list[Rows], shape: Index, where: Path) -> list[Rows]:
    ordered = sorted(runs, key=lambda rows: rows.hf_row)
    end = 0
    for rows in ordered:
        if rows.hf_row != end:
            what = "twice" if rows.hf_row < end else "with a gap"
            keys = ", ".join(dict.fromkeys(rows.key for rows in ordered))
            raise ConfigError(f"{where}: {name} is stored {what} ({keys}); check tie_word_embeddings in config.json")
        end += rows.count
    if end != shape[0]:
        raise ConfigError(f"{where}: {name} has {end} of {shape[0]} rows.")
    return ordered
