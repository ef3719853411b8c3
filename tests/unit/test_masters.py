"""Test masters with remainders, and the slow version of Transformer Engine's kernel, against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from rlhf_mcore.masters import SplitMaster, rounds_to
from tests.fused_adam import adam_param_remainder, join, split

# (bits of a master, bits of its weight, remainder). 0x8000 is a tie: away from zero, for both signs.
CASES = [
    (0x3F7FC000, 0x3F80, -0x4000),  # 1 - 2^-10 rounds to 1
    (0x3F804000, 0x3F80, 0x4000),
    (0x3F808000, 0x3F81, -0x8000),  # a tie, as with ties to even
    (0x3F7E8000, 0x3F7F, -0x8000),  # a tie that ties to even round to 0x3F7E
    (0xBF7E8000, 0xBF7F, -0x8000),
    (0xBF7FC000, 0xBF80, -0x4000),
    (0x00000000, 0x0000, 0),
    (0x80000001, 0x8000, 1),
    (0x3F7FFFFF, 0x3F80, -1),  # the carry changes the exponent
]


def bits(values: list[int], size: int) -> torch.Tensor:
    kind = torch.int32 if size == 32 else torch.int16
    signed = [value - (1 << size) if value >= 1 << (size - 1) else value for value in values]
    return torch.tensor(signed, dtype=kind).view(torch.float32 if size == 32 else torch.bfloat16)


@pytest.fixture
def examples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    masters, weights, remainders = zip(*CASES, strict=True)
    return bits(list(masters), 32), bits(list(weights), 16), torch.tensor(remainders, dtype=torch.int16)


def test_masters_are_weights_and_remainders(examples: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    masters, weights, remainders = (tensor.view(3, 3) for tensor in examples)
    assert torch.equal(SplitMaster(weights, remainders).float().view(torch.int32), masters.view(torch.int32))
    assert rounds_to(masters, weights)
    target = SplitMaster(weights, torch.zeros(3, 3, dtype=torch.int16))
    for row in range(3):
        target.permute([1, 0])[:, row].copy_(masters[row])
    assert torch.equal(target.remainders, remainders)
    target.zero_()
    assert torch.equal(target.float(), weights.float())


def test_weights_that_ties_to_even_rounded_keep_their_value() -> None:
    master, weight = bits([0x3F7E8000], 32), bits([0x3F7E], 16)
    assert torch.equal(master.bfloat16(), weight) and rounds_to(master, weight)
    target = SplitMaster(weight.clone(), torch.zeros(1, dtype=torch.int16))
    target.copy_(master)
    assert torch.equal(target.weights, weight)
    assert torch.equal(target.float().view(torch.int32), torch.tensor([0x3F7E7FFF], dtype=torch.int32))


@pytest.mark.parametrize("master", [0x3F7E7FFF, 0x3F808000, 0x3F818001])
def test_masters_of_other_weights_are_rejected(master: int) -> None:
    """The weight 0x3F80 or 0x3F81 is not the rounded master."""
    weight = bits([0x3F80 if master < 0x3F80FFFF and master != 0x3F808000 else 0x3F7F], 16)
    assert not rounds_to(bits([master], 32), weight)
    with pytest.raises(ValueError, match="differ from the rounded"):
        SplitMaster(weight, torch.zeros(1, dtype=torch.int16)).copy_(bits([master], 32))


def test_16_bit_floats_round_to_even() -> None:
    master = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11])  # ties of fp16
    assert rounds_to(master, torch.tensor([1.0, 1 + 2**-9], dtype=torch.float16))
    assert not rounds_to(master, torch.tensor([1 + 2**-10, 1 + 2**-9], dtype=torch.float16))


def test_the_slow_kernel_splits_and_joins(examples: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    masters, weights, remainders = examples
    assert all(
        torch.equal(a.view(torch.int16), b.view(torch.int16))
        for a, b in zip(split(masters), (weights, remainders), strict=True)
    )
    assert torch.equal(join(weights, remainders).view(torch.int32), masters.view(torch.int32))


def test_the_slow_kernel_makes_adamws_steps() -> None:
    """The first step of AdamW moves by lr in the direction of the gradient. bf16 moments are rounded: 0.1 to 0x3DCD."""
    weights = torch.tensor([1.0, 1.0, -1.0], dtype=torch.bfloat16)
    first, second = torch.zeros(2, 3, dtype=torch.bfloat16)
    remainders = torch.zeros(3, dtype=torch.int16)
    lists = [[torch.tensor([1.0, 1.0, -2.0])], [weights], [first], [second], [remainders]]
    adam_param_remainder(0, torch.zeros(1), lists, 2**-10, 0.9, 0.75, 0.0, 1, 1, 1, 0.0)
    assert join(weights, remainders).tolist() == pytest.approx([1 - 2**-10, 1 - 2**-10, -1 + 2**-10], abs=2**-23)
    assert weights.tolist() == [1.0, 1.0, -1.0], "the step is smaller than half of a bf16 weight's last bit"
    assert first.view(torch.int16).tolist() == [0x3DCD, 0x3DCD, 0xBE4D - 0x10000]
    assert second.tolist() == [0.25, 0.25, 1.0]
