"""Read Megatron-core's ``torch_dist`` checkpoints from their index, without process group, megatron or code from the file.

A key is a Megatron parameter. Layers are either part of its name or stacked on its first axis. Experts are either
part of its name or stacked on the next axis.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from os.path import exists, isfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.formats.foreign_pickle import Name, Shell, read_pickle
from rlhf_mcore.bridge.files.formats.foreign_tensors import load_part
from rlhf_mcore.bridge.files.formats.tiles import Index, Rows, Tile, Tiled, TiledSource, check_tiles, expert_form
from rlhf_mcore.bridge.files.hf_files import inside
from rlhf_mcore.bridge.map.rules import hf_shapes, is_padded, row_runs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import read_bytes, read_json, read_text, shorten
from rlhf_mcore.geometry import ModelGeometry

INDEX = ".metadata"
BACKEND = "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
COMPANIONS = "huggingface"  # a converted checkpoint stores config.json and the tokenizer here
CACHE_BYTES = 64 * 2**20
MAX_INDEX_BYTES = 256 * 2**20
MAX_DIMENSIONS, MAX_ELEMENTS = 8, 2**48
_METADATA = Name("torch.distributed.checkpoint.metadata", "Metadata")
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


@dataclass(frozen=True, slots=True)
class ForeignPart:
    """A rectangle of a tensor, and its bytes in a file in ``torch.save`` format."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[ForeignPart]


def read_index(path: Path, is_wanted: Callable[[str], object]) -> dict[str, IndexedTensor]:
    """Read the tensors of an index whose names are wanted.

    Raises:
        ConfigError: the file cannot be read, or is not an index.
    """
    data = read_bytes(path, limit=MAX_INDEX_BYTES, remedy="is it the index of a checkpoint?")
    try:
        content = read_pickle(data)
        state = content.state if isinstance(content, Shell) and content.name == _METADATA else None
        if not isinstance(state, dict) or not all(
            isinstance(state.get(key), dict) for key in ("state_dict_metadata", "storage_data")
        ):
            raise ValueError("not the index of a checkpoint")
        stored = _places_of_parts(state["storage_data"])
        tensors = {
            name: entry
            for name, entry in state["state_dict_metadata"].items()
            if isinstance(name, str)
            and is_wanted(name)
            and isinstance(entry, Shell)
            and entry.name.name == "TensorStorageMetadata"
        }
        budget = len(stored)
        result = {}
        for name, entry in tensors.items():
            result[name] = _tensor(name, entry, stored, budget)
            budget -= len(result[name].parts)
    except ValueError as error:
        raise ConfigError(f"{path}: refused ({error}). The file is damaged or has another format.") from error
    return result


def _places_of_parts(entries: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Shell]:
    """Map each part's tensor and start to its place."""
    places = {}
    for key, info in entries.items():
        place = key.state if isinstance(key, Shell) else None
        if not isinstance(place, dict) or not isinstance(info, Shell) or not isinstance(info.state, dict):
            raise ValueError("an entry of storage_data is malformed")
        if isinstance(place.get("fqn"), str) and place.get("offset") is not None:  # otherwise bytes, not a tensor
            places[place["fqn"], _sizes_of(place["offset"])] = info
    return places


def _tensor(name: str, entry: Shell, stored: dict[tuple[str, tuple[int, ...]], Shell], budget: int) -> IndexedTensor:
    shown = shorten(name, 200)
    state = entry.state if isinstance(entry.state, dict) else {}
    chunks = state.get("chunks")
    if not isinstance(chunks, list) or len(chunks) > max(budget, 1):  # a pickle may refer to the same list repeatedly
        raise ValueError(f"{shown} has more parts than there are in files")
    properties = state.get("properties")
    described = properties.state if isinstance(properties, Shell) else None
    if isinstance(described, tuple) and described:
        dtype = _dtype_of(described[0])
    elif isinstance(described, dict):
        dtype = _dtype_of(described.get("dtype"))
    else:
        raise ValueError(f"{shown} has no dtype")
    return IndexedTensor(dtype, _sizes_of(state.get("size")), [_part(shown, name, chunk, stored) for chunk in chunks])


def _part(shown: str, name: str, chunk: Any, stored: dict[tuple[str, tuple[int, ...]], Shell]) -> ForeignPart:
    place = chunk.state if isinstance(chunk, Shell) else None
    if not isinstance(place, dict):
        raise ValueError(f"a part of {shown} is malformed")
    start, shape = _sizes_of(place.get("offsets")), _sizes_of(place.get("sizes"))
    info = stored.get((name, start))
    if info is None:
        raise ValueError(f"part {start} of {shown} is in no file")
    file, offset, length = (info.state.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or type(offset) is not int or type(length) is not int:
        raise ValueError(f"part {start} of {shown} has a malformed place")
    if min(offset, length) < 0:
        raise ValueError(f"part {start} of {shown} starts before its file")
    if info.state.get("transform_descriptors"):
        raise ValueError(f"{shown} is compressed ({shorten(info.state['transform_descriptors'])}), which is not read")
    return ForeignPart(start, shape, file, offset, length)


def _sizes_of(value: Any) -> tuple[int, ...]:
    """Return a shape or an index: a tuple, or a ``torch.Size`` of a tuple."""
    if isinstance(value, Shell) and value.name == Name("torch", "Size") and value.args:
        value = value.args[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise ValueError("a malformed shape")
    if not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value) or prod(value) > MAX_ELEMENTS:
        raise ValueError(f"an impossible shape ({shorten(value)})")
    return tuple(value)


def _dtype_of(value: Any) -> torch.dtype:
    named = isinstance(value, Name) and value.module == "torch"
    dtype = getattr(torch, value.name, None) if named else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"dtype {shorten(value.name if isinstance(value, Name) else value)} is not supported for weights"
        )
    return dtype


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
            chunk = load_part(path, offset, part.length, check=self._check)
            if (chunk.shape, chunk.dtype) != (part.shape, dtype):
                raise ConfigError(
                    f"{path}: the tensor at byte {offset} is {chunk.dtype} {tuple(chunk.shape)}, the index has {dtype} {part.shape}."
                )
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
