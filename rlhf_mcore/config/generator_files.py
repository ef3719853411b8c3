"""Read the small files of a directory that only has to generate: its model, of any architecture, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import isdir, isfile
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.model_files import TOKENIZER_FILES, is_dequantised, read_config, sizes_of, weight_problems
from rlhf_mcore.geometry import ModelGeometry


def tokenizer_problems(path: str, field: str) -> Iterator[str]:
    """List the problems of a directory that should hold a tokenizer. A missing directory is reported elsewhere."""
    folder = Path(path)
    if isdir(folder) and not any(isfile(folder / name) for name in TOKENIZER_FILES):
        yield (
            f"{field}={path} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}); "
            "copy the model's tokenizer files there or set model.tokenizer_path"
        )


def inspect_generator(path: str, field: str, *, needs_weights: bool = True) -> tuple[ModelGeometry | None, list[str]]:
    """Inspect a directory that only has to generate, like ``inspect_model``: any architecture will do that the engine knows.

    ``needs_weights``: whether it holds the weights too.
    The sizes are None also where config.json does not have them under the usual keys.
    """
    prefix = f"{field}={path}"
    is_delta = any(Path(path).glob("*.safetensors.delta"))  # of our own checkpoints: made whole before it is read
    problems = [] if is_delta or not needs_weights else list(weight_problems(Path(path), prefix))
    try:
        hf_config = read_config(path, prefix)
    except ConfigError as error:
        return None, [*error.problems, *problems]
    if "auto_map" in hf_config:
        problems.append(f"{prefix}: config.json has auto_map (code from the directory would be run): refused")
    try:
        if "quantization_config" in hf_config and not is_dequantised(hf_config):
            problems.append(
                f"{prefix}: quantised weights (quantization_config) are not supported; use the unquantised model"
            )
    except ConfigError as error:
        problems.extend(error.problems)
    try:
        return sizes_of(hf_config), problems
    except ConfigError:
        return None, problems
