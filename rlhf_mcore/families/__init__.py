"""Model families, one module each. A module of this package with a ``FAMILY`` is a family; no list names it.

The name of a module is transformers' ``model_type``, and the lowercase name of the architecture. Modules are
imported on first use. This package does not import torch, so configuration checks can read a family's sizes and
unsupported values.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from rlhf_mcore.families.adapters import adapter_rules, whole_rules
from rlhf_mcore.families.base import DECODER, HIDDEN, ONE, VOCAB, Family, Rule
from rlhf_mcore.families.mixture import EXPERT_BIAS
from rlhf_mcore.families.mtp import MTP_KEY
from rlhf_mcore.geometry import ModelGeometry

Shapes = dict[str, tuple[int, ...]]
_SCORE = Rule("output_layer.weight", "replicated", {"score.weight": (ONE, HIDDEN)})


@dataclass(frozen=True, slots=True)
class Head:
    """The layer after the decoder: the suffix of its architectures, and its parameters."""

    suffix: str
    rules: tuple[Rule, ...]


HEADS = {
    "lm": Head("ForCausalLM", (Rule("output_layer.weight", "vocab_parallel", {"lm_head.weight": (VOCAB, HIDDEN)}),)),
    "token": Head("ForTokenClassification", (_SCORE, Rule("output_layer.bias", "replicated", {"score.bias": (ONE,)}))),
    "sequence": Head("ForSequenceClassification", (_SCORE,)),
}
WITH_IMAGES = "ForConditionalGeneration"  # suffix of architectures of language models with a tower
# Comes before the suffix of a scalar head with a tower. The language model alone may have a scalar head, too.
_SEEING = "WithImages"
# Placeholder for unsupported architectures. It only gives the sizes under the usual keys.
UNSUPPORTED = Family("unsupported", "", DECODER)


@cache
def _modules(*paths: str) -> tuple[str, ...]:
    return tuple(module.name for module in pkgutil.iter_modules(paths))


def _suffix(family: Family, kind: str) -> str:
    if family.vision is None:
        return HEADS[kind].suffix
    return WITH_IMAGES if kind == "lm" else _SEEING + HEADS[kind].suffix


class _Families(Mapping[str, Family]):
    """Families by name."""

    def __getitem__(self, name: str) -> Family:
        if name in _modules(*__path__):
            family: Family | None = getattr(import_module(f"{__name__}.{name}"), "FAMILY", None)
            if family is not None:
                return family
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in _modules(*__path__) if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Architectures(Mapping[str, tuple[Family, str]]):
    """Families and head kinds by Hugging Face architecture."""

    def __getitem__(self, architecture: str) -> tuple[Family, str]:
        plain = [(kind, head.suffix) for kind, head in HEADS.items()]
        for kind, suffix in (*plain, ("lm", WITH_IMAGES), *((kind, _SEEING + suffix) for kind, suffix in plain)):
            stem = architecture.removesuffix(suffix)
            for name in _modules(*__path__) if stem != architecture else ():
                if name.removesuffix("_text").replace("_", "") == stem.lower().replace("_", ""):
                    family = FAMILIES.get(name)
                    if family is not None and family.architecture == stem and _suffix(family, kind) == suffix:
                        return family, kind
        raise KeyError(architecture)

    def __iter__(self) -> Iterator[str]:
        return (family.architecture + _suffix(family, kind) for family in FAMILIES.values() for kind in HEADS)

    def __len__(self) -> int:
        return len(FAMILIES) * len(HEADS)


FAMILIES, ARCHITECTURES = _Families(), _Architectures()


def outer_rules(geometry: ModelGeometry, *, tied_head: bool = False) -> tuple[Rule, list[Rule]]:
    """Return the rule before the layers, and the rules after them.

    A tied output layer is included only with ``tied_head``.
    """
    head = () if geometry.tied_embeddings and not tied_head else HEADS[geometry.head].rules
    first, *last = (rule for rule in FAMILIES[geometry.family].rules + head if "{i}" not in rule.mcore)
    return first, last


def end_rules(geometry: ModelGeometry, *, tied_head: bool = False) -> tuple[list[Rule], list[Rule]]:
    """List the rules before and after the layers (see ``outer_rules``), or the rules of their adapters."""
    first, last = outer_rules(geometry, tied_head=tied_head)
    if geometry.adapter is None:
        return [first, *_tower_rules(geometry)], last
    derived = [adapter_rules(rule, geometry, 0) or whole_rules(rule, geometry) for rule in last]
    return adapter_rules(first, geometry, 0), [rule for rules in derived for rule in rules]


def _tower_rules(geometry: ModelGeometry) -> tuple[Rule, ...]:
    vision = FAMILIES[geometry.family].vision
    return () if vision is None else vision.rules(geometry)


def embedding_name(geometry: ModelGeometry) -> str:
    """Return the embedding's name in files."""
    return next(iter(outer_rules(geometry)[0].tensors))


def layer_rules(geometry: ModelGeometry, layer: int, *, fused: bool = False) -> list[Rule]:
    """List the rules of one layer of a model, or the rules of its adapters.

    ``fused`` selects Transformer Engine's names.
    """
    rules = FAMILIES[geometry.family].layer_rules(geometry, layer, fused=fused)
    if geometry.adapter is None:
        return rules
    return [derived for rule in rules for derived in adapter_rules(rule, geometry, layer)]


def hf_shapes(geometry: ModelGeometry, *, trained: bool = False) -> Shapes:
    """Return name and shape of every Hugging Face tensor of a model in network order.

    ``trained`` omits untrained tensors.
    """
    first, last = end_rules(geometry)
    shapes: Shapes = {}
    for rule in first:
        shapes |= rule.shapes(geometry)
    for layer in range(geometry.num_layers + geometry.mtp_layers):
        for rule in layer_rules(geometry, layer):
            if trained and not rule.is_trained(geometry):
                continue
            for expert in range(geometry.num_experts if "{k}" in rule.mcore else 1):
                shapes |= rule.shapes(geometry, layer, expert)
    for rule in last:
        shapes |= rule.shapes(geometry)
    return shapes


def has_expert_bias(geometry: ModelGeometry) -> bool:
    """Return whether a model has MoE layers whose router adds a bias to the experts' scores."""
    if geometry.experts is None:
        return False
    return any(rule.mcore == EXPERT_BIAS for rule in FAMILIES[geometry.family].rules)


def head_fields(architecture: str, head: str, *, has_mtp: bool) -> dict[str, Any]:
    """Return the keys of config.json for a scalar head instead of the model's own head. A language model gets none."""
    if head == "lm":
        return {}
    labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return {
        "architectures": [architecture_name(architecture, head)],
        # A scalar head does not use MTP layers, because these predict tokens.
        **({MTP_KEY: 0} if has_mtp else {}),
        **labels,
        **({"classifier_dropout": 0.0} if head == "token" else {}),
    }


def architecture_name(architecture: str, head: str) -> str:
    """Return the architecture's name for the same model with another head."""
    family, _ = ARCHITECTURES[architecture]
    return family.architecture + _suffix(family, head)
