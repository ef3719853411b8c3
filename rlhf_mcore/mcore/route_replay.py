"""Router replay: send tokens to the experts that an engine or an earlier pass chose for them.

R3 (Ma et al. 2025, arXiv 2510.11370) replays the routes of engines. R2 (Zheng et al. 2025, arXiv 2507.18071, section
5.3; arXiv 2512.01374) replays the routes of the pass for old logprobs. Only the choice of experts is replayed. Their
weights are gathered from the router's scores, so the router gets the gradient of the computed output.

Megatron's own replay uses a registry that is global to all models of a process and valid for one microbatch. Here
each model has its own registry, for all layers except MTP layers.
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

Step = Callable[[Iterator[Microbatch], torch.nn.Module], Any]  # a forward pass of a chunk over the next microbatch


@dataclass(slots=True, eq=False)
class RoutedLayer:
    """Choose the experts of a layer when Megatron asks a replayed routing for them (``Router.router_replay``)."""

    routing: Routing
    column: int  # index of the layer among the MoE layers
    usual: Any  # the value that this object replaced
    given: Tensor | None = None  # [n, k] routes of this rank's tokens in the current forward pass
    waiting: deque[Tensor | None] = field(default_factory=deque)  # routes of passes that will be recomputed

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and indices [n, k] of the chosen experts, from ``scores`` [n, experts]."""
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

        A backward pass recomputes layers in the order of their forward passes. Those forward passes ran without
        gradients.
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
    num_layers: int  # number of MoE layers in the whole model
    layers: dict[int, list[RoutedLayer]] = field(default_factory=dict)  # by the id of their chunk
    runs: bool = False  # whether a forward pass is running that is not a recomputation
    learns: bool = False
    # Routes by the id of a microbatch and by layer, while a pass is recorded.
    noted: dict[int, dict[int, Tensor]] | None = None
    num_unshared: int = 0  # rows of updates that an engine routed differently in their shared prefix
    _current: int = 0  # id of the current microbatch
    # For updates: the number of tokens and layers whose router chose other experts, and the number replayed.
    _counts: Tensor | None = None
    # Microbatches, and the positions of this rank's tokens.
    _recorded: list[tuple[Microbatch, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, model: MegatronModel) -> Routing:
        """Create the routing of a model and connect it to all routers."""
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
        """Return ``step`` wrapped to replay the routes of these microbatches.

        The routes are removed from the fields.
        """
        self.learns = learns
        layers = [layer for of_chunk in self.layers.values() for layer in of_chunk]
        for layer in layers:
            layer.waiting.clear()
        places = [self._places(microbatch, inputs) for microbatch in microbatches]
        columns = [layer.column for layer in layers]
        given = {
            id(microbatch): self._select_local(
                _to_computed_tokens(microbatch, microbatch.fields.pop(ROUTES)), own, columns
            )
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
        """Return the positions [n] of this rank's tokens in each row of a microbatch."""
        places = inputs.of_rank(microbatch, torch.arange(microbatch.width)[None])[0]
        layout = self.groups.layout
        return places.chunk(layout.tp)[self.groups.tp_rank] if layout.sequence_parallel else places

    def _select_local(self, routes: Tensor, places: Tensor, columns: Sequence[int]) -> Tensor:
        """Select this rank's layers and tokens from routes [b, T, L, k]: [layers, n * b, k]."""
        if routes.shape[2:] != (self.num_layers, self.per_token):
            raise RuntimeError(
                f"recorded routes have {routes.size(2)} layers and {routes.size(3)} experts per token, but the model has "
                f"{self.num_layers} layers and {self.per_token} experts per token"
            )
        return routes[:, places][:, :, list(columns)].permute(2, 1, 0, 3).flatten(1, 2).contiguous()

    def note(self, column: int, chosen: Tensor) -> None:
        """Record the experts [n, k] that a layer chose in the current pass."""
        assert self.noted is not None
        self.noted.setdefault(self._current, {})[column] = chosen.to(torch.int16) + 1

    def count(self, counts: Tensor) -> None:
        """Add ``counts`` [2] to the counts for updates."""
        self._counts = counts if self._counts is None else self._counts + counts

    def mismatch(self) -> dict[str, float]:
        """Return the fraction of replayed tokens and layers whose router chose other experts, over the last updates.

        ``unshared_rows`` is the number of rows whose prefix was recomputed because it was routed differently. Return
        {} if no routes were replayed. Collective over the model's ranks.
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

    def pop_recorded(self) -> tuple[list[Tensor], list[Microbatch]]:
        """Return the routes of the recorded pass, one tensor per microbatch, and the microbatches.

        Routes are [b, T, layers, k] int32 on the host. Collective over the ranks that run them together.
        """
        wholes = [self._whole(microbatch, places) for microbatch, places in self._recorded]
        microbatches = [microbatch for microbatch, _ in self._recorded]
        self.noted, self._recorded = None, []
        return wholes, microbatches

    def _whole(self, microbatch: Microbatch, places: Tensor) -> Tensor:
        """Add up the records of all ranks for a microbatch. Exactly one rank records each token and layer."""
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


def _to_computed_tokens(microbatch: Microbatch, routes: Tensor) -> Tensor:
    """Convert routes [b, T, L, k] from the row layout to the computed tokens.

    For a token that several rows share, prefer a row with known routes.
    """
    if (tree := microbatch.tree) is None:
        return routes
    is_known = (routes[0, :, 0, 0] > 0).numpy()
    places = np.concatenate([np.flatnonzero(~is_known), np.flatnonzero(is_known)[::-1]])
    chosen = np.zeros(microbatch.width, np.int64)
    chosen[tree.sources.numpy()[places]] = places  # the last write wins
    return routes[:, torch.from_numpy(chosen)] * (tree.uses > 0)[None, :, None, None]
