"""A model's distributions of next tokens, as the few tokens that it finds most probable."""

from __future__ import annotations

from torch import Tensor

from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.top_tokens import top_tokens
from rlhf_mcore.types import Microbatch


def top_of_outputs(
    model: MegatronModel, outputs: Tensor, microbatch: Microbatch, count: int, vocab_size: int, temperature: float
) -> Tensor:
    """Compute the ``count`` most probable next tokens among the first ``vocab_size``, zeros where the loss mask is zero.

    ``outputs``: of the last stage for a placed microbatch. Returns [b, T, 2, count + 1] fp32, see :func:`top_tokens`.
    """
    places = microbatch.placed.get("counted")
    hidden, weight, added = model.output_layer(outputs, places)
    found = top_tokens(
        hidden,
        weight,
        count,
        vocab_size=vocab_size,
        temperature=temperature,
        group=model.groups.collection.tp,
        chunk_tokens=model.logit_chunk_tokens,
        added=added,
    )
    return model.in_shape(microbatch, outputs.shape[:2], places, found)
