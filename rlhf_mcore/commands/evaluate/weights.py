"""Load the weights of evaluated models, from any supported format, tensor by tensor into an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from rlhf_mcore.bridge.files.formats import fsdp, torch_dist
from rlhf_mcore.bridge.files.formats.convert import checked_types
from rlhf_mcore.bridge.files.formats.source import AdaptedSource, ModelSource
from rlhf_mcore.bridge.files.hf_files import COMPANIONS, HFReader, open_adapters
from rlhf_mcore.bridge.map.rules import Shapes, hf_shapes
from rlhf_mcore.bridge.run.merged import scale_b
from rlhf_mcore.commands.evaluate.checkpoints import EvaluatedModel
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.families.adapters import pairs_of
from rlhf_mcore.families.mtp import mtp_tensors
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.observability.files import digest_of_file, sketch_of_file
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, read_adapters
from rlhf_mcore.readers.model_files import read_config, read_geometry
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import AddsAdapters, AnyEngine, EngineModel
from rlhf_mcore.sampling.rollouts import RolloutSetup
from rlhf_mcore.trainer.batches import BatchSampler

_OF_MODEL = ("config.json", "generation_config.json")
RELEASE_BYTES = 2**30  # after reading this many bytes, mapped pages are released
_FILES = {
    "hf": "*.safetensors",
    "adapter": "adapter_model.safetensors",
    "fsdp": "model_world_size_*.pt",
    "megatron": "*.distcp",
}


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a model without MTP layers, which engines without speculative decoding do not use.

    ``read`` yields every whole tensor, in the dtype of the files. Only one tensor is in memory at a time.
    """

    shapes: Shapes
    read: Callable[[], Iterator[tuple[str, Tensor]]]


def open_weights(model: EvaluatedModel) -> Weights:
    """Open the weights of a model in any format.

    Raises:
        ConfigError: shards or adapters are missing or unsafe, or do not match the tensors that config.json requires.
    """
    if model.format == "hf":
        reader = HFReader(model.weights)
        mtp = set(mtp_tensors(reader.names, read_config(model.files, model.files)))
        return Weights(
            {name: reader.shape(name) for name in sorted(reader.names - mtp)}, lambda: reader.tensors(without=mtp)
        )
    directory, files = Path(model.weights), Path(model.files)
    geometry = read_geometry(files)
    source: ModelSource
    if model.format == "adapter":
        source = AdaptedSource(directory, files, geometry)
    elif model.format == "fsdp":
        source = fsdp.open_fsdp(directory, files, geometry)
    else:
        source = torch_dist.open_torch_dist(torch_dist.find_checkpoint(directory), files, geometry)
    types = checked_types(source, geometry)
    mtp = set(mtp_tensors(types, read_config(files, model.files)))
    shapes = {name: shape for name, (_, shape) in types.items() if name not in mtp}
    return Weights(shapes, lambda: _read_all(source, shapes))


def _read_all(source: ModelSource, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    since_release = 0
    for name, shape in shapes.items():
        tensor = source.read(name, 0, shape[0])
        yield name, tensor
        since_release += tensor.nbytes
        if since_release >= RELEASE_BYTES:
            source.release()
            since_release = 0


@dataclass(frozen=True, slots=True)
class EngineAdapters:
    """Adapters of one base model that an engine adds to its weights. Each adapter has a number."""

    base: str
    directories: tuple[str, ...]  # by their numbers
    shapes: Shapes  # shapes of A and B for the largest rank, by their PEFT names

    def fits(self, model: EvaluatedModel) -> bool:
        """Return whether the engine computes this model: the base, or the base with one of the adapters."""
        is_base = model.format == "hf" and os.path.realpath(model.weights) == os.path.realpath(self.base)
        return is_base or model.weights in self.directories

    def choose(self, engine: AnyEngine, model: EvaluatedModel) -> None:
        """Make an engine sample with the adapter of a model, or without adapters if the model is the base.

        Raises:
            ConfigError: the adapter is damaged.
        """
        assert isinstance(engine, AddsAdapters), "other engines receive merged weights"
        number = self.directories.index(model.weights) if model.weights in self.directories else None
        if number is not None:
            engine.load_adapter(number, self._read(number))
        engine.use_adapter(number)

    def _read(self, number: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A and scale * B of an adapter for each Hugging Face module."""
        reader, geometry = open_adapters(self.directories[number], read_geometry(self.base))
        assert geometry.adapter is not None
        tensors = {name: reader.read(name, (slice(None),) * 2) for name in hf_shapes(geometry)}
        return {module: (a, scale_b(b, geometry.adapter.scale)) for module, (a, b) in pairs_of(tensors).items()}


def engine_adapters(cfg: Config, models: Sequence[EvaluatedModel]) -> EngineAdapters | None:
    """Return the adapters that the engine adds to its weights, as in training, or None if engines receive merged weights.

    All of these adapters have the same base model.

    Raises:
        ConfigError: adapters are damaged, or do not fit their model.
    """
    adapted = [model for model in models if model.format == "adapter"]
    if not adapted or cfg.actor.lora.sync == "merge":
        return None
    base, kind = adapted[0].files, engine_kind(cfg.rollout.engine)
    added: dict[str, ModelGeometry] = {}
    for model in sorted(adapted, key=lambda model: model.weights):
        if os.path.realpath(model.files) == os.path.realpath(base):
            geometry = read_adapters(model.weights, read_geometry(base))
            if not any(kind.adapter_problems(cfg.rollout, geometry)):
                added[model.weights] = geometry
    if not added:
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    for geometry in sorted(added.values(), key=lambda geometry: geometry.adapter.rank if geometry.adapter else 0):
        shapes |= hf_shapes(geometry)
    return EngineAdapters(base, tuple(added), shapes)


def weight_sketches(model: EvaluatedModel) -> list[str]:
    """Return a short fingerprint of each weight file, to distinguish sets of weights."""
    place = Path(model.weights)
    if model.format == "megatron":
        place = torch_dist.find_checkpoint(place)
    files = sorted(place.glob(_FILES[model.format]))
    if model.format == "adapter":
        files += [*sorted(Path(model.files).glob(_FILES["hf"])), place / ADAPTER_CONFIG]
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
        self._engine: AnyEngine | None = None
        self._built_for: tuple[object, ...] = ()
        self._loaded = ""  # directory of the weights in the engine
        self._version = 0

    def start(self, cfg: Config, model: EvaluatedModel, on_progress: Callable[[], object]) -> BatchSampler:
        """Load the weights of ``model`` into an engine, and return its sampler. Collective.

        ``cfg``: the configuration for this model.
        """
        added = self._adapters if self._adapters is not None and self._adapters.fits(model) else None
        held = model if added is None else EvaluatedModel.from_directory(added.base)
        weights = on_every_rank(lambda: open_weights(held))
        tokenizer = cfg.model.tokenizer_path or model.files
        own_tokenizer = {name: d for name, d in companion_digests(tokenizer).items() if name not in _OF_MODEL}
        needs = (companion_digests(model.files), own_tokenizer, weights.shapes, added is not None)
        if needs != self._built_for:
            self.close()
            engine_model = EngineModel.of(cfg, self.dtype, weights.shapes, None if added is None else added.shapes)
            if added is not None:
                engine_model = replace(engine_model, num_adapters=len(added.directories))
            # Evaluate the saved weights, without quantisation.
            self._engine = build_engine(cfg.rollout.model_copy(update={"quantization": None}), engine_model)
            self._built_for = needs
        engine = self._engine
        assert engine is not None
        engine.on_progress = on_progress
        if (directory := os.path.realpath(held.weights)) != self._loaded:
            on_every_rank(lambda: self._load(engine, model.files, weights))
            self._loaded = directory
        if added is not None:
            on_every_rank(lambda: added.choose(engine, model))
        decode = partial(load_tokenizer(tokenizer).batch_decode, skip_special_tokens=True)
        setup = RolloutSetup()
        if cfg.environment.function is not None:
            from rlhf_mcore.environments.build import EpisodeSpec
            from rlhf_mcore.rollout.vllm.tool_calls import ToolCallParser

            spec = EpisodeSpec.of(cfg, engine.rank.num_engines, ToolCallParser)
            setup = on_every_rank(lambda: spec.build() if engine.rank.is_lead else RolloutSetup())
        return BatchSampler(engine, engine.rank, decode, engine.ranks, setup)

    def _load(self, engine: AnyEngine, path: str, weights: Weights) -> None:
        try:
            engine.load_weights(weights.read(), version=self._version)
        except ValueError as error:
            raise ConfigError(f"{path}: the weights do not fit config.json: {error}") from error
        self._version += 1

    def close(self) -> None:
        """Close the engine, if any."""
        if self._engine is not None:
            self._engine.close()
            self._engine, self._built_for, self._loaded = None, (), ""
