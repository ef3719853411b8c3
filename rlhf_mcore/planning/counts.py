"""Count a model's parameters, in total or on one rank, and the operations of its passes, from its geometry alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from rlhf_mcore.families import end_rules, layer_rules
from rlhf_mcore.families.base import Rule
from rlhf_mcore.families.vision import TOWER
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.observability.throughput import ModelFlops
from rlhf_mcore.parallel.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class Elements:
    """Numbers of a model's elements on a rank: outside the layers, in the layers without their experts, and in experts."""

    ends: float = 0.0
    layers: float = 0.0
    experts: float = 0.0
    largest_layer: float = 0.0

    @property
    def in_layers(self) -> float:
        return self.layers + self.experts

    @property
    def total(self) -> float:
        return self.ends + self.in_layers


def elements(geometry: ModelGeometry, layers: Iterable[int], ends: float, tp: int, ep: int, etp: int) -> Elements:
    """Sum the elements of ``layers`` on a rank, plus ``ends``. ``ep`` divides the number of experts, and ``etp`` each expert."""
    first = first_alike(geometry)
    counts = Counter(first[layer] for layer in layers)
    parts = [(count, *_layer_elements(geometry, layer, tp, ep, etp)) for layer, count in counts.items()]
    return Elements(
        ends,
        sum(count * dense for count, dense, _ in parts),
        sum(count * experts for count, _, experts in parts),
        max((dense + experts for _, dense, experts in parts), default=0.0),
    )


def end_elements(geometry: ModelGeometry, tp: int, *, tied_head: bool = False) -> tuple[float, float]:
    """Sum the elements before and after the layers on a rank. A tied output layer counts only with ``tied_head``."""
    before, behind = end_rules(geometry, tied_head=tied_head)
    return sum(_dense(before, geometry, tp)), sum(_dense(behind, geometry, tp))


@lru_cache(maxsize=64)
def first_alike(geometry: ModelGeometry) -> tuple[int, ...]:
    """Return, for every layer (MTP layers included), the first layer with the same parameters.

    Adapters may exist in some layers only.
    """
    firsts: dict[object, int] = {}
    kinds = (
        (geometry.layer_kind(layer), layer in geometry.mtp_numbers)
        if geometry.adapter is None
        else tuple((rule.mcore, *rule.tensors) for rule in layer_rules(geometry, layer))
        for layer in range(geometry.num_layers + geometry.mtp_layers)
    )
    return tuple(firsts.setdefault(kind, layer) for layer, kind in enumerate(kinds))


@lru_cache(maxsize=2048)
def _layer_elements(geometry: ModelGeometry, layer: int, tp: int, ep: int, etp: int) -> tuple[float, float]:
    rules = layer_rules(geometry, layer)
    experts = [rule for rule in rules if "{k}" in rule.mcore]
    dense = _dense((rule for rule in rules if "{k}" not in rule.mcore), geometry, tp)
    return sum(dense), sum(_dense(experts, geometry, etp)) * geometry.num_experts / ep


def _dense(rules: Iterable[Rule], geometry: ModelGeometry, tp: int) -> Iterator[float]:
    return (rule.numel(geometry) / (1 if rule.kind in ("replicated", "transposed") else tp) for rule in rules)


@lru_cache(maxsize=4096)
def stage_elements(geometry: ModelGeometry, layout: ParallelLayout, pp: int) -> Elements:
    """Sum the elements of a pipeline rank of the trainer, in all its model chunks."""
    layers = [layer for chunk in range(layout.vpp or 1) for layer in layout.layers_of(geometry.num_layers, pp, chunk)]
    # The first and the last stage each hold a tied embedding.
    before, behind = end_elements(geometry, layout.tp, tied_head=layout.pp > 1)
    ends = before if pp == 0 else 0.0
    if pp == layout.pp - 1:
        ends += behind
        layers += geometry.mtp_numbers
        if geometry.mtp_layers and layout.num_stages > 1:  # MTP layers read a copy of the embedding
            ends += before
    return elements(geometry, layers, ends, layout.tp, layout.ep, layout.expert_tp)


def tower_elements(geometry: ModelGeometry, names: frozenset[str]) -> int:
    """Sum the elements of a tower's tensors with these names."""
    rules = end_rules(geometry)[0] if names else []
    return sum(rule.numel(geometry) for rule in rules if rule.mcore.startswith(TOWER) and rule.mcore in names)


def num_parameters(geometry: ModelGeometry) -> int:
    """Count the elements of the Hugging Face model, or of its adapters."""
    return int(stage_elements(geometry, ParallelLayout(1), 0).total)


@lru_cache(maxsize=64)
def active_parameters(geometry: ModelGeometry) -> int:
    """Count the elements that multiply a token: all except the embedding and the experts to which it is not routed."""
    _, behind = end_elements(geometry, 1, tied_head=True)
    return int(_active(elements(geometry, range(geometry.num_layers), behind, 1, 1, 1), geometry))


def _active(whole: Elements, geometry: ModelGeometry) -> float:
    if geometry.experts is None:
        return whole.total
    return whole.ends + whole.layers + whole.experts * geometry.experts.per_token / geometry.experts.count


def model_flops(geometry: ModelGeometry) -> ModelFlops:
    """Count the operations of a forward pass, see :mod:`rlhf_mcore.observability.throughput`."""
    logits = geometry.vocab_size * geometry.hidden_size if geometry.head == "lm" else 0
    states = 0.0 if (delta := geometry.delta) is None else 6.0 * len(delta.layers) * delta.values * delta.key_dim
    if (space := geometry.space) is not None:
        states += 4.0 * geometry.count_layers("state_space") * space.inner * space.state_dim
    windows, tokens = ((), 0) if (window := geometry.window) is None else (window.layers, window.tokens)
    pair = window_pair = 0.0
    for sizes, layers in geometry.attentions:
        each, cut = 2.0 * sizes.num_heads * (sizes.head_dim + sizes.value_dim), len({*layers} & {*windows})
        pair, window_pair = pair + (len(layers) - cut) * each, window_pair + cut * each
    return ModelFlops(
        token=2.0 * (active_parameters(geometry) - logits) + states,
        pair=pair,
        logits=2.0 * logits,
        window_pair=window_pair,
        window=tokens,
    )


@lru_cache(maxsize=64)
def mtp_flops(geometry: ModelGeometry) -> ModelFlops:
    """Count the operations of MTP layers in an update: additional layers, each with a projection and the output layer."""
    count, weights = geometry.mtp_layers, _active(elements(geometry, geometry.mtp_numbers, 0.0, 1, 1, 1), geometry)
    attention = 2 * count * geometry.num_heads * (geometry.head_dim + geometry.value_dim)
    return ModelFlops(2.0 * weights, float(attention), 2.0 * count * geometry.vocab_size * geometry.hidden_size)
