"""An engine without computation, only with the tensors that a bridge writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rlhf_mcore.rollout.engine import VersionedWeights


class Engine(VersionedWeights):
    """An engine that holds every Hugging Face tensor unchanged, or other tensors, each with its own dtype."""

    def __init__(
        self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype | Mapping[str, torch.dtype] = torch.float64
    ):
        super().__init__()
        self.model = nn.Module()
        for name, shape in shapes.items():
            owner = self.model
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            own = dtype if isinstance(dtype, torch.dtype) else dtype[name]
            owner.register_parameter(last, nn.Parameter(torch.zeros(tuple(shape), dtype=own), requires_grad=False))

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @contextmanager
    def begin(self, version: int) -> Iterator[nn.Module]:
        self.begin_load()
        yield self.model
        self.commit_load(version)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        self.begin_load()
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)
        self.commit_load(version)
