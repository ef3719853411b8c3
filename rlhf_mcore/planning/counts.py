"""Count the parameters of a model and the operations of its passes, from its geometry alone."""

from __future__ import annotations

from functools import lru_cache

from rlhf_mcore.families import end_rules, layer_rules, outer_rules
from rlhf_mcore.families.base import Rule
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.observability.throughput import ModelFlops


@lru_cache(maxsize=64)
def num_parameters(geometry: ModelGeometry) -> int:
    """Count elements of the Hugging Face model, or of its adapters."""
    first, last = end_rules(geometry)
    return _count([*first, *last], geometry, geometry.num_experts)


@lru_cache(maxsize=64)
def active_parameters(geometry: ModelGeometry) -> int:
    """Count elements that a token is multiplied with: all but the embedding and the experts that it does not go to."""
    _, last = outer_rules(geometry, tied_head=True)
    return _count(last, geometry.trunk, _experts_per_token(geometry))


def _experts_per_token(geometry: ModelGeometry) -> int:
    return 0 if geometry.experts is None else geometry.experts.per_token


def model_flops(geometry: ModelGeometry) -> ModelFlops:
    """Count operations of a forward pass, see :mod:`rlhf_mcore.observability.throughput`."""
    logits = geometry.vocab_size * geometry.hidden_size if geometry.head == "lm" else 0
    layer = 2.0 * geometry.num_heads * (geometry.head_dim + geometry.value_dim)
    states = 0 if (delta := geometry.delta) is None else len(delta.layers) * delta.values * delta.key_dim
    windows, tokens = (0, 0) if (window := geometry.window) is None else (len(window.layers), window.tokens)
    return ModelFlops(
        token=2.0 * (active_parameters(geometry) - logits) + 6.0 * states,
        pair=(geometry.num_attention_layers - windows) * layer,
        logits=2.0 * logits,
        window_pair=windows * layer,
        window=tokens,
    )


@lru_cache(maxsize=64)
def mtp_flops(geometry: ModelGeometry) -> ModelFlops:
    """Count operations of MTP layers in an update: further layers, each with a projection and the output layer."""
    experts, count = _experts_per_token(geometry), geometry.mtp_layers
    weights = _count([], geometry, experts) - _count([], geometry.trunk, experts)
    attention = 2 * count * geometry.num_heads * (geometry.head_dim + geometry.value_dim)
    return ModelFlops(2.0 * weights, float(attention), 2.0 * count * geometry.vocab_size * geometry.hidden_size)


def _count(outer: list[Rule], geometry: ModelGeometry, num_experts: int) -> int:
    """Count elements of all layers, with so many experts in every mixture, and of ``outer`` rules."""
    layers = [
        rule for layer in range(geometry.num_layers + geometry.mtp_layers) for rule in layer_rules(geometry, layer)
    ]
    return sum((num_experts if "{k}" in rule.mcore else 1) * rule.numel(geometry) for rule in (*outer, *layers))
