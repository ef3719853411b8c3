"""Model families, one module each. A module of this package that has a ``FAMILY`` is one; nothing else names it.

Nothing here imports torch, so that configuration can ask for a family's sizes and refusals.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module

from rlhf_mcore.families.base import DECODER, EXPERT_BIAS, HIDDEN, ONE, VOCAB, Family, Rule
from rlhf_mcore.types import ModelGeometry

_SCORE = Rule("output_layer.weight", "replicated", {"score.weight": (ONE, HIDDEN)})


@dataclass(frozen=True, slots=True)
class Head:
    """What stands after the last layer: how architectures with it end, and its parameters."""

    suffix: str
    rules: tuple[Rule, ...]


HEADS = {
    "lm": Head("ForCausalLM", (Rule("output_layer.weight", "vocab_parallel", {"lm_head.weight": (VOCAB, HIDDEN)}),)),
    "token": Head("ForTokenClassification", (_SCORE, Rule("output_layer.bias", "replicated", {"score.bias": (ONE,)}))),
    "sequence": Head("ForSequenceClassification", (_SCORE,)),
}
FAMILIES: dict[str, Family] = {}
ARCHITECTURES: dict[str, tuple[Family, str]] = {}  # architecture of a Hugging Face config -> family and kind of head
# Stands for an architecture that is not supported, where only sizes under the usual keys are asked for.
UNSUPPORTED = Family("unsupported", "", DECODER)


def discover() -> None:
    """Make the families of this package known, by their names and by their architectures."""
    for module in pkgutil.iter_modules(__path__):
        family: Family | None = getattr(import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if family is not None:
            FAMILIES[family.name] = family
            ARCHITECTURES.update({family.architecture + head.suffix: (family, kind) for kind, head in HEADS.items()})


discover()


def outer_rules(geometry: ModelGeometry, *, tied_head: bool = False) -> tuple[Rule, list[Rule]]:
    """The rule of what stands before the layers, and those of what follows; of a tied output layer only with ``tied_head``."""
    head = () if geometry.tied_embeddings and not tied_head else HEADS[geometry.head].rules
    first, *last = (rule for rule in FAMILIES[geometry.family].rules + head if "{i}" not in rule.mcore)
    return first, last


def has_expert_bias(geometry: ModelGeometry) -> bool:
    """Whether a model has mixtures whose router adds a bias to the scores of experts."""
    return geometry.num_experts > 0 and any(rule in FAMILIES[geometry.family].rules for rule in EXPERT_BIAS)


def architecture_name(architecture: str, head: str) -> str:
    """The architecture of the same model with another head."""
    return ARCHITECTURES[architecture][0].architecture + HEADS[head].suffix
