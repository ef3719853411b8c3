"""Read the tensors of a PEFT directory of adapters, and write the files beside its tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.bridge.files.hf_files import HFReader, companion_files
from rlhf_mcore.config.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config, read_adapters
from rlhf_mcore.foreign import INDEX, read_bytes
from rlhf_mcore.geometry import ModelGeometry

_OF_MODEL = ("config.json", "generation_config.json")  # they would make the directory look like a model's


def open_adapters(directory: str | Path, model: ModelGeometry) -> tuple[HFReader, ModelGeometry]:
    """Open a PEFT directory of adapters of ``model``. Returns the reader of its tensors and the geometry of the adapters.

    Raises:
        ConfigError: a tensor is missing, is none of an adapter of the model, or has another shape or dtype than its layer asks for;
            or adapter_config.json asks for more than plain low-rank adapters.
    """
    adapters = read_adapters(directory, model)
    return HFReader(directory, single=ADAPTER_WEIGHTS), adapters


def adapter_companions(sources: Sequence[str | Path]) -> list[Path]:
    """List the files that travel with adapters: the tokenizer's. The config is that of the base, and stays there."""
    return [path for path in companion_files(sources) if path.name not in _OF_MODEL]


def write_companions(
    sources: Sequence[str | Path], directory: Path, adapters: ModelGeometry, base: str, dropout: float = 0.0
) -> list[Path]:
    """Write adapter_config.json, and copy what travels along. Returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / ADAPTER_CONFIG]
    paths[0].write_text(json.dumps(adapter_config(adapters, base, dropout), indent=2) + "\n", encoding="utf-8")
    for source in adapter_companions(sources):
        paths.append(directory / source.name)
        paths[-1].write_bytes(read_bytes(source, limit=INDEX.num_bytes, remedy="download the model again"))
    return paths
