"""Load a rank's rectangles of a Hugging Face directory into its Megatron tensors, with the families' rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.map.pieces import Piece, view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import LocalParameter, ModelGeometry
from rlhf_mcore.readers.model_files import WEIGHT_DTYPES


def load(
    parameters: Sequence[LocalParameter],
    geometry: ModelGeometry,
    reader: HFReader,
    *,
    fresh_head: bool = False,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Fill this rank's tensors from a Hugging Face directory. Set the vocabulary's padding rows to zero.

    ``fresh_head``: the directory contains a language model, and the scalar head starts at zero, so its first value
    is 0 everywhere. ``progress`` is called with the bytes of every filled tensor.

    Raises:
        ConfigError: a tensor is missing, has another shape than in the config, or has a value that is not finite.
            Or its dtype is not a dtype of unquantised weights, which a cast to the model's dtype only rounds.
    """
    expected = hf_shapes(geometry)
    for parameter in parameters:
        parts = pieces(parameter.name, geometry, parameter.shard)
        if sum(piece.numel for piece in parts) < parameter.tensor.numel():
            parameter.tensor.zero_()
        for piece in parts:
            if fresh_head and piece.hf_name.startswith("score."):
                parameter.tensor.zero_()
                continue
            _check_tensor(reader, piece.hf_name, expected[piece.hf_name])
            view(parameter.tensor, piece).copy_(reader.read(piece.hf_name, piece.slices))
        if not parameter.tensor.isfinite().all():
            _refuse_values(reader, parameter, parts)
        progress(parameter.tensor.nbytes)


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
