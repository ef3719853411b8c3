"""Whole loads, and nothing but whole loads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_mcore.rollout.engine import ExpectedTensors, VersionedWeights


class Tied(nn.Module):
    """Embedding and head share a tensor; the norm is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


EMBED, NORM, HEAD = (("embed.weight", (5, 3)), ("norm.weight", (3,)), ("head.weight", (5, 3)))


def load(*tensors: tuple[str, tuple[int, ...]]) -> list[str]:
    pairs = ((name, torch.zeros(shape)) for name, shape in tensors)
    return [name for name, _ in ExpectedTensors.of_model(Tied()).check_each(pairs)]


def test_a_whole_model_passes_with_its_tied_tensor_under_either_name_or_both() -> None:
    assert load(EMBED, NORM) == ["embed.weight", "norm.weight"]
    assert load(HEAD, NORM) == ["head.weight", "norm.weight"]
    assert load(NORM, EMBED, HEAD) == ["norm.weight", "embed.weight", "head.weight"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([EMBED, HEAD], "1 tensors .* not sent .* norm.weight"),
        ([NORM], "1 tensors .* not sent .* embed.weight"),
        ([EMBED, NORM, EMBED], "'embed.weight' was sent .* twice"),
        ([EMBED, ("norm.weight", (2,))], r"'norm.weight' has shape \(2,\), .* needs \(3,\)"),
        ([EMBED, NORM, ("bias", (1,))], "'bias' is not part"),
    ],
)
def test_anything_else_is_refused_by_name(tensors: list[tuple[str, tuple[int, ...]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(*tensors)


def test_weights_are_usable_from_the_end_of_a_load_to_the_begin_of_the_next() -> None:
    weights = VersionedWeights()
    with pytest.raises(RuntimeError, match="no weights were ever loaded"):
        weights.require_weights()
    weights.begin_load()
    with pytest.raises(RuntimeError, match="did not finish"):
        weights.require_weights()
    weights.commit_load(6)
    weights.require_weights()
    assert weights.policy_version == 6
    weights.begin_load()
    assert weights.policy_version == -1
    with pytest.raises(RuntimeError, match="did not finish"):
        weights.require_weights()
    weights.abandon("it sleeps")
    with pytest.raises(RuntimeError, match="it sleeps"):
        weights.require_weights()
