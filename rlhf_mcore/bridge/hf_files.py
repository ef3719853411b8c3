"""Hugging Face model directories: reading rectangles of tensors, and writing whole ones in shards.

Everything read from an index is checked before it is used: a shard must be there, lie inside the directory, and hold the tensors
that the index says.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 4 * 2**30
# What travels with the weights: everything a user of the directory needs to run it.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class HFReader:
    """Reads parts of the tensors of a directory of safetensors. Only the requested rectangles are read from disk."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory).resolve()
        self._open: dict[str, safe_open] = {}
        self._shard_of = self._locate()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._shard_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header.

        Raises:
            ConfigError: there is no such tensor.
        """
        return tuple(self._handle(name).get_slice(name).get_shape())

    def read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """A rectangle of a tensor, in the file's dtype."""
        return self._handle(name).get_slice(name)[where]

    def _handle(self, name: str) -> safe_open:
        if name not in self._shard_of:
            raise ConfigError(
                f"{self.directory}: tensor {name} is missing. Is the checkpoint complete and of this architecture?"
            )
        shard = self._shard_of[name]
        if shard not in self._open:
            try:
                self._open[shard] = safe_open(self.directory / shard, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{self.directory / shard}: not a readable safetensors file ({error}).") from error
        if name not in self._open[shard].keys():  # noqa: SIM118 (a handle, not a dict)
            raise ConfigError(
                f"{self.directory / shard}: the index places tensor {name} here, but the file does not hold it."
            )
        return self._open[shard]

    def _locate(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            for shard in sorted(set(weight_map.values())):
                self._check_shard(shard)
            return weight_map
        self._check_shard(SINGLE)
        with safe_open(self.directory / SINGLE, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), SINGLE)

    def _check_shard(self, shard: str) -> None:
        path = (self.directory / shard).resolve()
        if path.parent != self.directory and not (self.directory / shard).is_file():
            raise ConfigError(f"{self.directory / INDEX}: shard {shard!r} is outside of the directory.")
        if Path(shard).name != shard:
            raise ConfigError(f"{self.directory / INDEX}: shard {shard!r} is not a plain file name.")
        if not path.is_file():
            raise ConfigError(f"{self.directory}: weight file {shard} is missing.")


class HFWriter:
    """Writes full tensors, given one by one, as a Hugging Face directory. At most one shard is held in memory."""

    def __init__(self, directory: str | Path, shard_bytes: int = SHARD_BYTES):
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._written: list[tuple[str, list[str]]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor; it is copied to the host."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous().clone()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        part = f"part-{len(self._written):05d}.safetensors"
        save_file(self._pending, self.directory / part, metadata={"format": "pt"})
        self._written.append((part, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0

    def close(self, companions_from: str | Path) -> None:
        """Name the shards, write the index, and copy config and tokenizer from the directory the model came from."""
        self._flush()
        weight_map = {}
        for number, (part, names) in enumerate(self._written, 1):
            final = SINGLE if len(self._written) == 1 else f"model-{number:05d}-of-{len(self._written):05d}.safetensors"
            (self.directory / part).rename(self.directory / final)
            weight_map.update(dict.fromkeys(names, final))
        if len(self._written) > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
        for name in COMPANIONS:
            source = Path(companions_from) / name
            if source.is_file():
                shutil.copyfile(source, self.directory / name)
