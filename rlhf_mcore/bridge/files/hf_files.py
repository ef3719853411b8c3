"""Read rectangles of tensors in Hugging Face model directories, and copy the files that belong to the weights.

Everything read from an index is checked before use. A shard must exist, be inside the directory, and contain the
tensors that the index names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_mcore.bridge.files.dequantise import QuantisedMatrix
from rlhf_mcore.bridge.map.pieces import Piece, view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.adapters import name_in_memory
from rlhf_mcore.foreign import INDEX as INDEX_LIMITS
from rlhf_mcore.foreign import read_bytes, read_json, shorten
from rlhf_mcore.geometry import LocalParameter, ModelGeometry
from rlhf_mcore.parallel.collectives import broadcast_json, on_every_rank
from rlhf_mcore.readers.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    ALL_TARGETS,
    TASKS,
    adapted_modules,
    read_adapters,
    short_names,
)
from rlhf_mcore.readers.model_files import COMPANIONS, WEIGHT_DTYPES, stored_format_of
from rlhf_mcore.readers.stacked_experts import StackedMatrix, part_of_stack

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 4 * 2**30
READERS = 4  # threads of a rank that check files or read parameters
_OF_FILES = ("quantization_config", "auto_map")  # entries of config.json that describe other files of a directory
_REMEDY = "Download or export the model again."


class HFReader:
    """Read parts of tensors in a directory of safetensors files. Only the requested rectangles are read from disk.

    A quantised matrix, which is stored as several tensors, appears here as one bf16 tensor. Its rectangles are
    dequantised when they are read. An expert's matrix can also be read from a tensor with all experts. ``single`` is
    the only file to read, if given; the index is then ignored. So it is if ``shard_of`` maps the tensors to their
    files. Threads may read different tensors at once.

    Raises:
        ConfigError: a file is missing, damaged or outside of the directory, or its quantised format is not supported.
    """

    def __init__(self, directory: str | Path, single: str | None = None, *, shard_of: dict[str, str] | None = None):
        self.directory = Path(directory).resolve()
        self._single = single
        self._open: dict[str, safe_open] = {}
        self._opening: dict[str, Lock] = {}
        self._names: dict[
            str, frozenset[str]
        ] = {}  # tensor names by file, because safetensors builds them again for every call
        self._shard_of = self._locate() if shard_of is None else shard_of
        stored = None if single is not None else stored_format_of(self.directory)
        self._matrices: dict[str, QuantisedMatrix] = {}
        self.names = set(self._shard_of)
        if stored is not None:
            self.names = stored.weights(self._shard_of.keys())
            self._matrices = {
                name: QuantisedMatrix(stored, parts, self._slice, f"{self.directory}: tensor {name}")
                for name, parts in stored.matrices(self._shard_of.keys()).items()
            }

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header.

        Raises:
            ConfigError: there is no such tensor.
        """
        matrix = self._matrices.get(name)
        if matrix is not None:
            return matrix.shape
        if (part := self._part(name)) is not None:
            return part.shape(self.shape(part.tensor))
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of a tensor in safetensors' spelling (``F32``, ``BF16``, ``I8``, ``F8_E4M3``, ...).

        Raises:
            ConfigError: there is no such tensor.
        """
        matrix = self._matrices.get(name)
        if matrix is not None:
            return matrix.dtype
        part = self._part(name)
        return str(self._slice(name if part is None else part.tensor).get_dtype())

    def shard(self, name: str) -> str:
        """Name of the file that contains a tensor."""
        if name in self._matrices:
            return self._shard_of[self._matrices[name].parts.values]
        part = self._part(name)
        return self._shard_of[name if part is None else part.tensor]

    @property
    def shard_of(self) -> dict[str, str]:
        """Name of the file that contains each stored tensor, from the index."""
        return self._shard_of

    def check_index(self) -> None:
        """Compare the index with the contents of the files.

        Raises:
            ConfigError: a tensor is in two files, or in a different file than the index names.
        """
        shard_of: dict[str, str] = {}
        for shard in sorted(set(self._shard_of.values())):
            for name in self._names_in(shard):
                if name in shard_of:
                    raise ConfigError(
                        f"{self.directory}: tensor {name} is in {shard_of[name]} and in {shard}. {_REMEDY}"
                    )
                shard_of[name] = shard
        for name, shard in shard_of.items():
            if name not in self._shard_of:
                raise ConfigError(
                    f"{self.directory / shard} holds tensor {name}, which {INDEX} does not name. {_REMEDY}"
                )
        for name in self._shard_of:
            self._handle(name)

    def close(self) -> None:
        """Close the files and unmap their memory. They are reopened when needed."""
        self._open.clear()

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """Read a rectangle of a tensor in the dtype that ``dtype`` names."""
        matrix = self._matrices.get(name)
        if matrix is not None:
            return matrix.read(where)
        if (part := self._part(name)) is not None:
            rows = part.rows(where[0], self.shape(part.tensor))
            return self._slice(part.tensor)[part.expert, rows, where[1]]
        return self._slice(name)[where]

    def tensors(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole tensor in the file's dtype, file by file, except the tensors in ``without``."""
        for name in sorted(self.names.difference(without), key=lambda name: (self.shard(name), name)):
            yield name, self.read(name, (slice(None),) * len(self.shape(name)))

    def _part(self, name: str) -> StackedMatrix | None:
        """Return the place of an expert's matrix in a tensor with all experts, if the files contain only that one."""
        part = None if name in self._shard_of else part_of_stack(name)
        return part if part is not None and part.tensor in self._shard_of else None

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> safe_open:
        if name not in self._shard_of:
            raise ConfigError(
                f"{self.directory}: tensor {name} is missing. Is the checkpoint complete and of this architecture?"
            )
        shard = self._shard_of[name]
        handle = self._file_of(shard)
        if name not in self._names_in(shard):
            raise ConfigError(
                f"{self.directory / shard}: the index places tensor {name} here, but the file does not hold it."
            )
        return handle

    def _names_in(self, shard: str) -> frozenset[str]:
        if shard not in self._names:
            self._names[shard] = frozenset(self._file_of(shard).keys())
        return self._names[shard]

    def _file_of(self, shard: str) -> safe_open:
        with self._opening.setdefault(shard, Lock()):
            if shard not in self._open:
                try:
                    self._open[shard] = safe_open(self.directory / shard, framework="pt")
                except (OSError, SafetensorError) as error:
                    raise ConfigError(
                        f"{self.directory / shard}: not a readable safetensors file ({error}). Download or export it again."
                    ) from error
            return self._open[shard]

    def _locate(self) -> dict[str, str]:
        index, single = self.directory / INDEX, self._single or SINGLE
        if self._single is not None or not os.path.lexists(index):
            self._check_shard(single)
            return dict.fromkeys(self._names_in(single), single)
        weight_map = read_json(index, limits=INDEX_LIMITS, remedy=_REMEDY).table("weight_map")
        with ThreadPoolExecutor(READERS) as threads:
            list(threads.map(self._check_shard, sorted(set(weight_map.values()))))
        return weight_map

    def _check_shard(self, shard: str) -> None:
        inside(self.directory, shard, where=f"{self.directory / INDEX}: shard", also=_blobs(self.directory))


def locate_tensors(directory: str | Path) -> dict[str, str]:
    """Return the file of each tensor of a model directory, for ``HFReader``. Collective over the world.

    Only the first rank reads the index and looks at the files, because a large model has an index of megabytes and
    hundreds of files.

    Raises:
        ConfigError, on every rank: as ``HFReader``.
    """
    found = on_every_rank(lambda: HFReader(directory).shard_of if dist.get_rank() == 0 else None)
    shard_of: dict[str, str] = broadcast_json(found, 0)
    return shard_of


def inside(directory: Path, name: str, minimum: int = 0, *, where: str = "", also: Sequence[Path] = ()) -> Path:
    """Return the path of file ``name`` in a directory. ``name`` comes from a file, so it is not trusted.

    A link may lead into ``also``.

    Raises:
        ConfigError: ``name`` is not a plain name or leads out of the directory, or the file is missing or has
            fewer than ``minimum`` bytes.
    """
    path = directory / name
    if not name or os.path.basename(name) != name or name in (".", ".."):
        raise ConfigError(f"{where or f'{directory}:'} {shorten(name, 1000)!r} is not a plain file name")
    if not os.path.isfile(path):
        raise ConfigError(f"{directory}: weight file {shorten(name)} is missing")
    if path.resolve().parent not in (directory.resolve(), *also):
        raise ConfigError(f"{path}: a link to {path.resolve()}, outside of the directory. Copy the file here instead.")
    if path.stat().st_size < minimum:
        raise ConfigError(
            f"{path}: {path.stat().st_size} bytes, but at least {minimum} are required. The file is truncated."
        )
    return path


def companion_files(sources: Sequence[str | Path]) -> list[Path]:
    """List the config and tokenizer files that belong to the weights.

    For each file, the first source that has it wins.

    Raises:
        ConfigError: a file is a link out of its directory. Its target may be any file, and would be copied.
    """
    directories = [Path(source).resolve() for source in sources]
    places = [[directory for directory in directories if os.path.isfile(directory / name)] for name in COMPANIONS]
    return [
        inside(holders[0], name, also=_blobs(holders[0]))
        for name, holders in zip(COMPANIONS, places, strict=True)
        if holders
    ]


def _blobs(directory: Path) -> list[Path]:
    """Return the directory of a cached directory's files in a Hugging Face cache: snapshots/<revision>/* -> ../../blobs/*."""
    return [directory.parent.parent / "blobs"] if directory.parent.name == "snapshots" else []


def copy_companions(
    sources: Sequence[str | Path], directory: Path, dtype: torch.dtype, updates: Mapping[str, Any] | None = None
) -> None:
    """Copy the config and tokenizer files that belong to the weights.

    For each file, the first source that has it wins.

    The copied config gets ``dtype`` and ``updates``. Its quantisation is removed, because written weights are not
    quantised. Its ``auto_map`` is removed, because code is not copied.
    """
    for companion in companion_files(sources):
        data = read_bytes(companion, limit=INDEX_LIMITS.num_bytes, remedy=_REMEDY)
        (directory / companion.name).write_bytes(data)
    path = directory / "config.json"
    config = {key: value for key, value in read_json(path).content.items() if key not in _OF_FILES}
    if isinstance(text := config.get("text_config"), dict):
        config["text_config"] = {key: value for key, value in text.items() if key not in _OF_FILES}
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    path.write_text(json.dumps({**config, key: str(dtype).removeprefix("torch."), **(updates or {})}, indent=2) + "\n")


_OF_MODEL = ("config.json", "generation_config.json")  # with them it would look like a model


def open_adapters(directory: str | Path, model: ModelGeometry) -> tuple[HFReader, ModelGeometry]:
    """Open a PEFT directory with adapters of ``model``. Return the reader of its tensors, and the adapters' geometry.

    Raises:
        ConfigError: a tensor is missing, belongs to no adapter of the model, or has the wrong shape or dtype. Or
            adapter_config.json requires more than plain low-rank adapters.
    """
    adapters = read_adapters(directory, model)
    return HFReader(directory, single=ADAPTER_WEIGHTS), adapters


def adapter_companions(sources: Sequence[str | Path]) -> list[Path]:
    """List the tokenizer files that belong to adapters. The config stays in the base model's directory."""
    return [path for path in companion_files(sources) if path.name not in _OF_MODEL]


def adapter_config(adapters: ModelGeometry, base: str, dropout: float = 0.0) -> dict[str, Any]:
    """Return the content of adapter_config.json. ``base`` is the directory of the model."""
    sizes = adapters.adapter
    assert sizes is not None
    possible = adapted_modules(replace(adapters, adapter=replace(sizes, targets=ALL_TARGETS)))
    modules = adapted_modules(adapters)
    if sizes.use_rslora and any(".experts." in module for module in modules):
        # PEFT joins gate and up of transformers' stacked experts into one adapter with twice the rank and twice the alpha. This
        # preserves alpha / rank, but not alpha / sqrt(rank).
        sizes = replace(sizes, alpha=sizes.scale * sizes.rank, use_rslora=False)
    return {
        "peft_type": "LORA",
        "task_type": TASKS[adapters.head],
        "base_model_name_or_path": base,
        "r": sizes.rank,
        "lora_alpha": int(sizes.alpha) if sizes.alpha == int(sizes.alpha) else sizes.alpha,
        "lora_dropout": dropout,
        "target_modules": list(map(name_in_memory, short_names(modules, possible))),
        "use_rslora": sizes.use_rslora,
        "use_dora": sizes.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None if adapters.head == "lm" else ["score"],
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def write_companions(
    sources: Sequence[str | Path], directory: Path, adapters: ModelGeometry, base: str, dropout: float = 0.0
) -> list[Path]:
    """Write adapter_config.json and copy the tokenizer files. Return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / ADAPTER_CONFIG]
    paths[0].write_text(json.dumps(adapter_config(adapters, base, dropout), indent=2) + "\n", encoding="utf-8")
    for source in adapter_companions(sources):
        paths.append(directory / source.name)
        paths[-1].write_bytes(read_bytes(source, limit=INDEX_LIMITS.num_bytes, remedy="download the model again"))
    return paths


def load(
    parameters: Sequence[LocalParameter],
    geometry: ModelGeometry,
    reader: HFReader,
    *,
    fresh_head: bool = False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Fill this rank's tensors from a Hugging Face directory. Set the vocabulary's padding rows to zero.

    ``READERS`` threads read one parameter each, because a single reader of network storage waits most of the time.
    ``fresh_head``: the directory contains a language model, and the scalar head starts at zero, so its first value
    is 0 everywhere. ``progress`` is called with the bytes of every filled tensor.

    Raises:
        ConfigError: a tensor is missing, has another shape than in the config, or has a value that is not finite.
            Or its dtype is not a dtype of unquantised weights, which a cast to the model's dtype only rounds.
    """
    expected = hf_shapes(geometry)

    def fill(parameter: LocalParameter) -> int:
        parts = pieces(parameter.name, geometry, parameter.shard)
        if sum(piece.numel for piece in parts) < parameter.tensor.numel():
            parameter.tensor.zero_()
        for piece in parts:
            if fresh_head and piece.hf_name.startswith("score."):
                parameter.tensor.zero_()
                continue
            _check_tensor(reader, piece.hf_name, expected[piece.hf_name])
            view(parameter.tensor, piece).copy_(reader.read(piece.hf_name, piece.slices))
        # The extremes show a NaN or an infinity. Unlike isfinite, they need no memory, and a fortieth of its time on a CPU.
        if not torch.stack(torch.aminmax(parameter.tensor)).isfinite().all():
            _refuse_values(reader, parameter, parts)
        return parameter.tensor.nbytes

    with ThreadPoolExecutor(READERS) as threads:
        # The first error in the order of the parameters is raised. Parameters that no thread has begun are then skipped.
        for num_bytes in threads.map(torch.no_grad()(fill), parameters):
            progress(num_bytes)


def _refuse_values(reader: HFReader, parameter: LocalParameter, parts: Sequence[Piece]) -> None:
    """Raise ConfigError for the first tensor of the directory that gave a parameter a NaN or an infinity."""
    name = next(part.hf_name for part in parts if not view(parameter.tensor, part).isfinite().all())
    dtype = str(parameter.tensor.dtype).removeprefix("torch.")
    range_hint = ", or choose bf16, which has a larger range" if dtype == "float16" else ""
    raise ConfigError(
        f"{reader.directory}: tensor {name} has values that are not finite in {dtype}: no model can use it. Download or export the "
        f"model again{range_hint}"
    )


def _check_tensor(reader: HFReader, name: str, expected: tuple[int, ...]) -> None:
    shape, dtype = reader.shape(name), reader.dtype(name)
    if shape != expected:
        raise ConfigError(f"{reader.directory}: tensor {name} has shape {shape}, but config.json requires {expected}.")
    if dtype not in WEIGHT_DTYPES:
        raise ConfigError(
            f"{reader.directory}: tensor {name} has dtype {dtype}, not one of {', '.join(WEIGHT_DTYPES)}: quantised or "
            "converted weights cannot be trained. Use the unquantised model."
        )
