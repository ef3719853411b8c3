"""Router replay: tokens go to the experts that an engine, or an earlier pass, has chosen for them.

R3 of Ma et al. 2025 (arXiv 2510.11370) replays the routes of engines; R2 of Zheng et al. 2025 (arXiv 2507.18071, section 5.3;
arXiv 2512.01374) those of the pass for old logprobs. Experts are given; their weights are gathered from the scores of the router,
which so has the gradient of what was computed.

Megatron has such a replay, whose registry is global to all models of a process, and holds for one microbatch. Here each model has its
own, of the layers in front of MTP layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.inputs import PassInputs
from rlhf_mcore.mcore.mixture import routers
from rlhf_mcore.parallel.collectives import reduce_sums
from rlhf_mcore.types import ROUTES, Microbatch

if TYPE_CHECKING:
    from rlhf_mcore.mcore.model import MegatronModel

Step = Callable[[Iterator[Microbatch], torch.nn.Module], Any]  # a forward pass of a chunk, over the next microbatch


@dataclass(slots=True, eq=False)
class RoutedLayer:
    """Chooses the experts of a layer where Megatron asks a replayed routing for them (``Router.router_replay``)."""

    routing: Routing
    column: int  # of the layer among those with experts
    usual: Any  # what was there before
    given: Tensor | None = None  # [n, k] routes of this rank's tokens, in the running forward pass
    waiting: deque[Tensor | None] = field(default_factory=deque)  # routes of passes that will be computed again

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers [n, k] of the experts that tokens go to, of ``scores`` [n, experts]."""
        if self.usual is not None:
            values, own = self.usual.get_replay_topk(scores, topk, num_groups, group_topk, compute_topk)
        else:
            values, own = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen, given = own, self._take()
        if given is not None:
            known = given[:, :1] > 0
            chosen = torch.where(known, given.long() - 1, own)
            values = scores.gather(1, chosen)
            if self.routing.runs and self.routing.learns:
                changed = (own.sort(-1).values != chosen.sort(-1).values).any(-1)
                self.routing.count(torch.stack([changed.sum(), known.sum()]))
        if self.routing.noted is not None:
            self.routing.note(self.column, chosen)
        return values, chosen

    def _take(self) -> Tensor | None:
        """Return the routes of the microbatch that is computed now.

        A backward pass computes layers again in the order of their forward passes. The first time these had no gradients.
        """
        if not self.routing.runs:
            return self.waiting.popleft()
        if self.routing.learns and not torch.is_grad_enabled():
            self.waiting.append(self.given)
        return self.given


@dataclass(slots=True, eq=False)
class Routing:
    """The routes of a model's layers on this rank. Microbatches with a field ``ROUTES`` are replayed."""

    groups: ModelGroups
    device: torch.device
    per_token: int
    num_layers: int  # with experts, in all of the model
    layers: dict[int, list[RoutedLayer]] = field(default_factory=dict)  # by the id of their chunk
    runs: bool = False  # whether a forward pass is running, which is not one that is computed again
    learns: bool = False
    # Routes by the id of a microbatch and by layer, where a pass is recorded.
    noted: dict[int, dict[int, Tensor]] | None = None
    num_unshared: int = 0  # rows of updates whose shared beginning an engine had routed otherwise
    _current: int = 0  # the id of the microbatch that is run
    # Of updates: tokens and layers whose router had chosen others, and all that were replayed.
    _counts: Tensor | None = None
    # Microbatches, and the places of this rank's tokens.
    _recorded: list[tuple[Microbatch, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, model: MegatronModel) -> Routing:
        """Take over the choice of experts of a model."""
        geometry = model.spec.geometry
        assert geometry.experts is not None
        columns = {layer: column for column, layer in enumerate(geometry.moe_layers)}
        routing = cls(model.groups, model.platform.device(), geometry.experts.per_token, len(columns))
        for chunk in model.chunks:
            layers = routing.layers[id(chunk)] = []
            for router in routers([chunk]):
                usual: Any = router.router_replay
                layer = router.router_replay = RoutedLayer(routing, columns[router.layer_number - 1], usual)
                layers.append(layer)
        return routing

    def steps(self, step: Step, microbatches: Sequence[Microbatch], inputs: PassInputs, *, learns: bool) -> Step:
        """Return ``step`` for a pass over these microbatches, with their routes. They are taken out of their fields."""
        self.learns = learns
        layers = [layer for of_chunk in self.layers.values() for layer in of_chunk]
        for layer in layers:
            layer.waiting.clear()
        places = [self._places(microbatch, inputs) for microbatch in microbatches]
        columns = [layer.column for layer in layers]
        given = {
            id(microbatch): self._cut(_computed(microbatch, microbatch.fields.pop(ROUTES)), own, columns)
            for microbatch, own in zip(microbatches, places, strict=True)
            if ROUTES in microbatch.fields
        }
        if given:
            given = dict(zip(given, inputs.platform.to_device(list(given.values())), strict=True))
        if self.noted is not None:
            self._recorded = list(zip(microbatches, places, strict=True))
        rows = {layer: row for row, layer in enumerate(layers)}

        def run(iterator: Iterator[Microbatch], chunk: torch.nn.Module) -> Any:
            microbatch = next(iterator)
            routes = given.get(id(microbatch))
            for layer in self.layers[id(chunk)]:
                layer.given = None if routes is None else routes[rows[layer]]
            self._current, self.runs = id(microbatch), True
            try:
                return step(iter([microbatch]), chunk)
            finally:
                self.runs = False

        return run

    def _places(self, microbatch: Microbatch, inputs: PassInputs) -> Tensor:
        """Return the places [n] of this rank's tokens in each line of a microbatch."""
        places = inputs.of_rank(microbatch, torch.arange(microbatch.width)[None])[0]
        layout = self.groups.layout
        return places.chunk(layout.tp)[self.groups.tp_rank] if layout.sequence_parallel else places

    def _cut(self, routes: Tensor, places: Tensor, columns: Sequence[int]) -> Tensor:
        """Return of routes [b, T, L, k] those of this rank's layers and tokens: [layers, n * b, k]."""
        if routes.shape[2:] != (self.num_layers, self.per_token):
            raise RuntimeError(
                f"routes of {routes.size(2)} layers with {routes.size(3)} experts per token were recorded, and the model has "
                f"{self.num_layers} with {self.per_token}"
            )
        return routes[:, places][:, :, list(columns)].permute(2, 1, 0, 3).flatten(1, 2).contiguous()

    def note(self, column: int, chosen: Tensor) -> None:
        """Keep the experts [n, k] that a layer has chosen in the running pass."""
        assert self.noted is not None
        self.noted.setdefault(self._current, {})[column] = chosen.to(torch.int16) + 1

    def count(self, counts: Tensor) -> None:
        """Add to the counts of updates: [2]."""
        self._counts = counts if self._counts is None else self._counts + counts

    def mismatch(self) -> dict[str, float]:
        """Return the share of tokens and layers of the last updates that were replayed otherwise than their router had chosen.

        ``unshared_rows`` counts the rows whose beginning was computed again because it was routed otherwise. Nothing where no routes
        were replayed. Collective over the model's ranks.
        """
        changed, known = [0.0, 0.0] if self._counts is None else self._counts.tolist()
        layout = self.groups.layout
        unshared = self.num_unshared / (layout.tp * layout.cp * layout.pp)
        self._counts, self.num_unshared = None, 0
        own = {"changed": changed, "known": known, "unshared": unshared}
        sums = reduce_sums(own, self.groups.collection.intra_dist_opt)
        if not sums["known"]:
            return {}
        return {"route_mismatch": sums["changed"] / sums["known"], "unshared_rows": round(sums["unshared"])}

    def recorded(self) -> tuple[list[Tensor], list[Microbatch]]:
        """Return routes [b, T, layers, k] int32 of the microbatches of the recorded pass, on the host, and these microbatches.

        Collective over the ranks that run them together.
        """
        wholes = [self._whole(microbatch, places) for microbatch, places in self._recorded]
        microbatches = [microbatch for microbatch, _ in self._recorded]
        self.noted, self._recorded = None, []
        return wholes, microbatches

    def _whole(self, microbatch: Microbatch, places: Tensor) -> Tensor:
        """Add up what ranks have noted of a microbatch: each token and layer once."""
        assert self.noted is not None
        noted, pgs, layout = self.noted.pop(id(microbatch), {}), self.groups.collection, self.groups.layout
        height = microbatch.token_ids.size(0)
        whole = torch.zeros(
            height, microbatch.width, self.num_layers, self.per_token, dtype=torch.int32, device=self.device
        )
        for column, routes in noted.items():
            whole[:, places, column] = routes.int().view(len(places), height, -1).transpose(0, 1)
        for group, is_split in ((pgs.tp, layout.sequence_parallel), (pgs.cp, layout.cp > 1), (pgs.pp, layout.pp > 1)):
            if is_split:
                dist.all_reduce(whole, group=group)
        whole = whole.cpu()
        return whole if microbatch.tree is None else whole[:, microbatch.tree.sources]


def _computed(microbatch: Microbatch, routes: Tensor) -> Tensor:
    """Return of routes [b, T, L, k] in the row layout those of the computed tokens: of a row that knows them, if one does."""
    if (tree := microbatch.tree) is None:
        return routes
    is_known = (routes[0, :, 0, 0] > 0).numpy()
    places = np.concatenate([np.flatnonzero(~is_known), np.flatnonzero(is_known)[::-1]])
    chosen = np.zeros(microbatch.width, np.int64)
    chosen[tree.sources.numpy()[places]] = places  # the last one wins
    return routes[:, torch.from_numpy(chosen)] * (tree.uses > 0)[None, :, None, None]
