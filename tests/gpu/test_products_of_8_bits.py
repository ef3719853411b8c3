"""Compare the fp8 weights that a sync sends, for products in 8-bit blocks, with Transformer Engine's quantiser.

Skipped without a GPU or Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_mcore.bridge.run.quantised import largest_magnitudes, quantise, scales_of
from rlhf_mcore.families.quantised import FP8_OF_TRAINING, quantisation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def quantiser() -> Any:
    module = pytest.importorskip("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    import transformer_engine_torch as native

    kinds = dict(rowwise=True, columnwise=False, force_pow_2_scales=False, amax_epsilon=0.0, block_scaling_dim=2)
    return module.Float8BlockQuantizer(native.DType.kFloat8E4M3, **kinds)


@pytest.mark.parametrize("shape", [(4096, 4096), (1536, 8960), (256, 272), (1024, 208)])
@pytest.mark.parametrize("kind", ["normal", "rows of many sizes", "a block of zeros"])
def test_bytes_and_scales_are_those_of_transformer_engine(quantiser: Any, shape: tuple[int, int], kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) * 0.02
    if kind == "rows of many sizes":
        weight *= torch.exp(3 * torch.randn(shape[0], 1, generator=generator))
    elif kind == "a block of zeros":
        weight[:128, :128] = 0
    held = weight.bfloat16().cuda()
    theirs = quantiser(held)
    training = quantisation(FP8_OF_TRAINING)
    largest = largest_magnitudes(held, (0, 0), training)
    sent = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    quantise(held, (0, 0), largest, training, sent)
    rows, columns = (-(-size // 128) for size in shape)
    assert torch.equal(theirs._rowwise_data.view(torch.uint8), sent.view(torch.uint8))
    assert torch.equal(theirs._rowwise_scale_inv[:rows, :columns], scales_of(largest, training))
