"""Load the weights of evaluated models, from any supported format, tensor by tensor into an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_mcore.bridge.files.formats import fsdp, torch_dist
from rlhf_mcore.bridge.files.formats.adapted import AdaptedSource
from rlhf_mcore.bridge.files.formats.checks import checked_types
from rlhf_mcore.bridge.files.formats.source import ModelSource
from rlhf_mcore.bridge.files.hf_files import COMPANIONS, HFReader, open_adapters
from rlhf_mcore.bridge.map.rules import Shapes, hf_shapes
from rlhf_mcore.bridge.run.merged import scaled
from rlhf_mcore.commands.evaluate.checkpoints import ShardedModel
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.families.adapters import pairs_of
from rlhf_mcore.families.mtp import mtp_tensors
from rlhf_mcore.observability.files import digest_of_file, sketch_of_file
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, read_adapters
from rlhf_mcore.readers.model_files import read_config, read_geometry
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import AddsAdapters, Engine, EngineModel
from rlhf_mcore.trainer.batch_sampler import BatchSampler

_OF_MODEL = ("config.json", "generation_config.json")
RELEASE_BYTES = 2**30  # after reading this many bytes, mapped pages are released
_FILES = {
    "hf": "*.safetensors",
    "adapter": "adapter_model.safetensors",
    "fsdp": "model_world_size_*.pt",
    "megatron": "*.distcp",
}


class DirectoryWeights:
    """The weights in a Hugging Face directory, without MTP layers, which engines without speculative decoding do not use."""

    def __init__(self, directory: str):
        self._reader = HFReader(directory)
        self._mtp = set(mtp_tensors(self._reader.names, read_config(directory, directory)))

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return self._reader.names - self._mtp

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._reader.shape(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full tensor, in the dtype of the files."""
        return self._reader.tensors(without=self._mtp)


class ShardedWeights:
    """Full tensors from another trainer's shards, or from a model with adapters. They are built one by one and not written to disk.

    Raises:
        ConfigError: shards or adapters are missing or unsafe, or do not match the tensors that config.json requires.
    """

    def __init__(self, model: ShardedModel):
        directory, files = Path(model.weights), Path(model.files)
        geometry = read_geometry(files)
        if model.format == "adapter":
            self._source: ModelSource = AdaptedSource(directory, files, geometry)
        elif model.format == "fsdp":
            self._source = fsdp.open_fsdp(directory, files, geometry)
        else:
            self._source = torch_dist.open_torch_dist(torch_dist.find_checkpoint(directory), files, geometry)
        types = checked_types(self._source, geometry)
        mtp = set(mtp_tensors(types, read_config(files, str(files)))) if model.format == "adapter" else set()
        self._types = {name: kind for name, kind in types.items() if name not in mtp}

    @property
    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._types)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._types[name][1]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full tensor, in the dtype of the shards."""
        since_release = 0
        for name, (_, shape) in self._types.items():
            tensor = self._source.read(name, 0, shape[0])
            yield name, tensor
            since_release += tensor.nbytes
            if since_release >= RELEASE_BYTES:
                self._source.release()
                since_release = 0


@dataclass(frozen=True, slots=True)
class EngineAdapters:
    """Adapters of one base model that an engine adds to its weights. Each adapter has a number."""

    base: str
    directories: tuple[str, ...]  # by their numbers
    shapes: Shapes  # shapes of A and B for the largest rank, by their PEFT names

    def is_base(self, directory: str) -> bool:
        """Return whether a directory is the base model."""
        return os.path.realpath(directory) == os.path.realpath(self.base)

    def adds(self, model: ShardedModel | None) -> bool:
        """Return whether the engine adds the adapters of this model."""
        return model is not None and model.weights in self.directories

    def choose(self, engine: AddsAdapters, model: ShardedModel | None) -> None:
        """Make an engine sample with the adapter of a model, or without adapters if ``model`` is None.

        Raises:
            ConfigError: the adapter is damaged.
        """
        number = None if model is None else self.directories.index(model.weights)
        if number is not None:
            engine.load_adapter(number, self._read(number))
        engine.use_adapter(number)

    def _read(self, number: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and scale * B of an adapter for each Hugging Face module."""
        reader, geometry = open_adapters(self.directories[number], read_geometry(self.base))
        assert geometry.adapter is not None
        tensors = {name: reader.read(name, (slice(None),) * 2) for name in hf_shapes(geometry)}
        return {module: (a, scaled(b, geometry.adapter.scale)) for module, (a, b) in pairs_of(tensors).items()}


def engine_adapters(cfg: Config, models: Sequence[ShardedModel | None]) -> EngineAdapters | None:
    """Return the adapters that the engine adds to its weights, as in training, or None if engines receive merged weights.

    All of these adapters have the same base model.

    Raises:
        ConfigError: adapters are damaged, or do not fit their model.
    """
    adapted = [model for model in models if model is not None and model.format == "adapter"]
    if not adapted or cfg.actor.lora.sync == "merge":
        return None
    base, kind = adapted[0].files, engine_kind(cfg.rollout.engine)
    own = {model.weights for model in adapted if os.path.realpath(model.files) == os.path.realpath(base)}
    geometries = {directory: read_adapters(directory, read_geometry(base)) for directory in sorted(own)}
    added = {
        name: geometry for name, geometry in geometries.items() if not any(kind.adapter_problems(cfg.rollout, geometry))
    }
    if not added:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for geometry in sorted(added.values(), key=lambda geometry: geometry.adapter.rank if geometry.adapter else 0):
        shapes |= hf_shapes(geometry)
    return EngineAdapters(base, tuple(added), shapes)


def open_weights(directory: str, sharded: ShardedModel | None) -> DirectoryWeights | ShardedWeights:
    """Open the weights of a Hugging Face directory, or the sharded weights if there are any."""
    return DirectoryWeights(directory) if sharded is None else ShardedWeights(sharded)


def weight_sketches(directory: str | None, sharded: ShardedModel | None = None) -> list[str]:
    """Return a short fingerprint of each weight file, to distinguish sets of weights."""
    if sharded is not None:
        place = Path(sharded.weights)
        directory = str(torch_dist.find_checkpoint(place) if sharded.format == "megatron" else place)
    if directory is None:
        return []
    files = sorted(Path(directory).glob(_FILES[sharded.format if sharded is not None else "hf"]))
    if sharded is not None and sharded.format == "adapter":
        files += [*sorted(Path(sharded.files).glob(_FILES["hf"])), Path(directory) / ADAPTER_CONFIG]
    return [sketch_of_file(file) for file in files]


def companion_digests(directory: str) -> dict[str, str]:
    """Return the digests of a model's other files, by file name."""
    return {name: digest_of_file(path) for name in COMPANIONS if (path := Path(directory, name)).is_file()}


class Engines:
    """The engine. It is reused for checkpoints with the same files and shapes, and its weights for checkpoints that differ only in
    their adapters."""

    def __init__(self, dtype: str, adapters: EngineAdapters | None = None) -> None:
        self.dtype = dtype
        self._adapters = adapters
        self._engine: Engine | None = None
        self._built_for: dict[str, Any] = {}
        self._loaded: tuple[str, ShardedModel | None] | None = None
        self._version = 0

    def start(self, cfg: Config, sharded: ShardedModel | None, on_progress: Callable[[], object]) -> BatchSampler:
        """Load the weights of ``cfg.model``, or the sharded weights instead, into an engine. Collective."""
        added = self._adapters
        if added is not None and not (added.adds(sharded) or (sharded is None and added.is_base(cfg.model.path))):
            added = None
        merged = sharded if added is None else None
        reader = on_every_rank(lambda: open_weights(cfg.model.path, merged))
        shapes = {name: reader.shape(name) for name in sorted(reader.names)}
        tokenizer = cfg.model.tokenizer_path or cfg.model.path
        needs = {
            "files": companion_digests(cfg.model.path),
            "tokenizer": {
                name: digest for name, digest in companion_digests(tokenizer).items() if name not in _OF_MODEL
            },
            "shapes": shapes,
            "adapters": added is not None,
        }
        if needs != self._built_for:
            self.close()
            model = EngineModel.of(cfg, self.dtype, shapes, None if added is None else added.shapes)
            if added is not None:
                model = replace(model, num_adapters=len(added.directories))
            # Evaluate the saved weights, without quantisation.
            self._engine = build_engine(cfg.rollout.model_copy(update={"quantization": None}), model)
            self._built_for = needs
        engine = self._engine
        assert engine is not None
        engine.on_progress = on_progress
        weights = os.path.realpath(cfg.model.path), merged
        if weights != self._loaded:
            on_every_rank(lambda: self._load(engine, cfg.model.path, reader))
            self._loaded = weights
        if added is not None:
            assert isinstance(engine, AddsAdapters), "other engines receive merged weights"
            adds = engine
            on_every_rank(lambda: added.choose(adds, sharded))
        loaded = load_tokenizer(tokenizer)
        decode = partial(loaded.batch_decode, skip_special_tokens=True)
        if cfg.environment.function is not None:
            from rlhf_mcore.environments.build import EpisodeSpec, build_episode_sampler
            from rlhf_mcore.rollout.vllm.tool_calls import ToolCallParser

            spec = EpisodeSpec.of(cfg, engine.rank.num_engines, ToolCallParser)
            return build_episode_sampler(spec, engine, engine.rank, engine.ranks, decode)
        return BatchSampler(engine, engine.rank, decode, ranks=engine.ranks)

    def _load(self, engine: Engine, path: str, reader: DirectoryWeights | ShardedWeights) -> None:
        try:
            engine.load_weights(reader.tensors(), version=self._version)
        except ValueError as error:
            raise ConfigError(f"{path}: the weights do not fit config.json: {error}") from error
        self._version += 1

    def close(self) -> None:
        """Close the engine, if any."""
        if self._engine is not None:
            self._engine.close()
            self._engine, self._built_for, self._loaded = None, {}, None
