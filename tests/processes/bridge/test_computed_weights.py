"""A parameter that an engine's loader computes; vLLM is imported for it, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.map.trace import trace
from rlhf_mcore.config.errors import ConfigError


class Doubled(torch.nn.Module):
    """A model whose loader computes what the kernels read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self.scale.data.copy_(2 * tensor)


def test_a_parameter_that_a_loader_computes_is_refused_and_not_filled_with_zeros() -> None:
    with pytest.raises(ConfigError, match=r"of scale .*computed values.*set bridge.method=gather"):
        trace(Doubled(), {"scale": (3,)}, probe=False)
