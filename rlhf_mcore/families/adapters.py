"""Map low-rank adapters (Hu et al. 2021, arXiv 2106.09685) from Megatron's matrices A and B to PEFT's coordinates.

The adapter of a matrix W [out, in] is A [r, in] and B [out, r]. Its layer computes with W + scale * B A. Megatron
joins several Hugging Face matrices in one weight, and each of them has its own A and B. All As of a weight are one
parameter, and all Bs are another parameter:

- If ranks split the outputs, every rank holds all As whole, stacked by rows, and the rows of B that match its
  weight rows.
- If ranks split the inputs, a rank holds the columns of A that match its weight columns, and B whole.
- If every rank holds the weight whole, it holds A and B whole.
- DoRA's magnitudes (``AdapterSizes.use_dora``), a vector [out] for each W, are split like B.
- For the embedding and the output layer, a rank holds A whole, and the rows of B for its part of the vocabulary.
  PEFT transposes and exchanges both for an embedding: its ``lora_embedding_A`` [r, vocabulary] is the transposed B
  here.

A geometry with ``adapter`` describes the adapters alone: its rules, names and shapes are for A and B, not for the
model. The head of a critic or a reward model is trained whole (PEFT's ``modules_to_save``), and is included in
that geometry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.families.base import Dim, Family, Kind, Rule
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry

T = TypeVar("T")  # a tensor

ALL_LINEAR = "all-linear"  # a target for every linear layer except the output layer, as in PEFT
A, B, M = ".lora_a", ".lora_b", ".lora_m"  # replace ``.weight`` in Megatron's names; M: magnitudes of DoRA
# Modules before and after the layers. ``all-linear`` does not include them.
EMBEDDING, OUTPUT = "model.embed_tokens", "lm_head"
_HF_PREFIX = "base_model.model."
_HF_NAMES = {A: ".lora_A.weight", B: ".lora_B.weight", M: ".lora_magnitude_vector"}
_HF_EMBEDDING_NAMES = {A: ".lora_embedding_B", B: ".lora_embedding_A"}
_LINEAR = re.compile(r".*\.(linear_\w+|in_proj|out_proj)\.weight(\{k\})?")
# Split of A and B, by the split of their weight.
_KINDS: dict[Kind, tuple[Kind, Kind]] = {
    "row_parallel": ("row_parallel", "replicated"),
    "replicated": ("replicated", "replicated"),
    "vocab_parallel": ("replicated", "vocab_parallel"),
    **{
        kind: ("replicated", kind)
        for kind in (
            "column_parallel",
            "halves",
            "qkv",
            "joined_qkv",
            "wide_qkv",
            "gated_qkv",
            "delta",
            "delta_by_head",
            "state_space",
        )
    },
}
_EMBEDDING_KINDS: tuple[Kind, Kind] = ("transposed", "vocab_columns")
# Parts of models with one block per layer.
_WITHOUT_ADAPTERS = {".mixer.out_proj": "outputs of state spaces", ".experts.": "experts without gates"}
_RANK = Dim("rank", lambda g: _sizes(g).rank)


def _sizes(geometry: ModelGeometry) -> AdapterSizes:
    assert geometry.adapter is not None
    return geometry.adapter


def base_name(name: str) -> tuple[str, str]:
    """Split the name of an adapter's Megatron parameter into its weight's name, and ``A``, ``B`` or ``M``.

    Raises:
        KeyError: the name does not belong to an adapter.
    """
    if match := re.fullmatch(r"(.*)(\.lora_[abm])(\d*|\{k\})", name):
        return f"{match.group(1)}.weight{match.group(3)}", match.group(2)
    raise KeyError(f"{name!r} is not a parameter of an adapter")


def hf_module(name: str) -> str:
    """Return the module of an adapter's tensor, as files name it, such as ``model.layers.0.self_attn.q_proj``."""
    module = name.removeprefix(_HF_PREFIX).partition(".lora_")[0]
    return re.sub(r"^model\.(?=layers\.[^.]+\.mixer\.)", "backbone.", module)


def name_in_memory(module: str) -> str:
    """Return transformers' name of a module in memory, which PEFT uses. In Nemotron's files it starts with ``backbone``."""
    return re.sub(r"^backbone\.(?=layers\.[^.]+\.mixer\.)", "model.", module)


def hf_names(module: str) -> tuple[str, str]:
    """Return PEFT's names of A and B of a Hugging Face module."""
    return hf_name(module, A), hf_name(module, B)


def hf_name(module: str, side: str) -> str:
    """Return PEFT's name of ``A``, ``B`` or ``M`` of a Hugging Face module."""
    ends = _HF_EMBEDDING_NAMES if module == EMBEDDING else _HF_NAMES
    return f"{_HF_PREFIX}{name_in_memory(module)}{ends[side]}"


def pairs_of(tensors: Mapping[str, T]) -> dict[str, tuple[T, T]]:
    """Return A and B by Hugging Face module. ``tensors`` is keyed by PEFT's names."""
    modules = dict.fromkeys(map(hf_module, tensors))
    return {module: (tensors[a], tensors[b]) for module in modules for a, b in [hf_names(module)]}


def base_copies() -> dict[str, str]:
    """Map PEFT's names of embedding and output weights, which it saves with their adapters, to the weights' names."""
    return {f"{_HF_PREFIX}{module}.base_layer.weight": f"{module}.weight" for module in (EMBEDDING, OUTPUT)}


def adapter_rules(rule: Rule, geometry: ModelGeometry, layer: int) -> list[Rule]:
    """Derive the rules of A, B and magnitudes from a weight's rule in one layer.

    Return [] if no part of the weight is adapted.
    """
    is_end = rule.kind == "vocab_parallel"
    if (
        rule.kind not in _KINDS
        or not (is_end or _LINEAR.fullmatch(rule.mcore))
        or (is_end and geometry.tied_embeddings)
    ):
        return []
    tensors = {name: dims for name, dims in rule.tensors.items() if is_target(_module(name, layer), geometry)}
    if not tensors or (is_end and not tensors.keys() & {f"{EMBEDDING}.weight", f"{OUTPUT}.weight"}):
        return []
    is_embedding = f"{EMBEDDING}.weight" in tensors

    def dims_of(side: str, rows: Dim, columns: Dim) -> tuple[Dim, ...]:
        if side == M:
            return (rows,)
        if is_embedding:
            return (columns, _RANK) if side == A else (_RANK, rows)
        return (_RANK, columns) if side == A else (rows, _RANK)

    kind_a, kind_b = _EMBEDDING_KINDS if is_embedding else _KINDS[rule.kind]
    sides = {A: kind_a, B: kind_b, **({M: kind_b} if _sizes(geometry).use_dora and not is_end else {})}
    return [
        replace(
            rule,
            mcore=re.sub(r"\.weight(\{k\})?$", rf"{side}\1", rule.mcore),
            kind=kind,
            tensors={
                hf_name(name.removesuffix(".weight"), side): dims_of(side, *dims) for name, dims in tensors.items()
            },
            in_memory="",
        )
        for side, kind in sides.items()
    ]


def is_trained_whole(name: str, geometry: ModelGeometry) -> bool:
    """Return whether a Megatron parameter is trained directly, in addition to adapters: a scalar head."""
    return geometry.head != "lm" and name in ("output_layer.weight", "output_layer.bias")


def whole_rules(rule: Rule, geometry: ModelGeometry) -> list[Rule]:
    """Derive the rule, in PEFT's names, of a weight that is trained whole. Return [] for other weights."""
    if not is_trained_whole(rule.mcore, geometry):
        return []
    return [replace(rule, tensors={_HF_PREFIX + name: dims for name, dims in rule.tensors.items()})]


def whole_tensors(geometry: ModelGeometry) -> dict[str, str]:
    """Map PEFT's names of a scalar head's tensors to the model's names."""
    names = {"lm": (), "sequence": ("score.weight",), "token": ("score.weight", "score.bias")}[geometry.head]
    return {_HF_PREFIX + name: name for name in names}


def is_target(module: str, geometry: ModelGeometry) -> bool:
    """Return whether a linear layer, given by its Hugging Face name, is adapted.

    A target is the last part of a name (or several parts with dots), as in PEFT's ``target_modules``, or a pattern
    of whole names.
    """
    return any(_matches(target, module) for target in _sizes(geometry).targets)


def _matches(target: str, module: str) -> bool:
    if target == ALL_LINEAR:
        return module not in (EMBEDDING, OUTPUT)
    return target == module or module.endswith(f".{target}") or fnmatchcase(module, target)


def _module(tensor: str, layer: int) -> str:
    """Return the module of a rule's tensor.

    A layer's experts are all adapted or none, so the first expert represents them.
    """
    return tensor.format(i=layer, e=0).removesuffix(".weight")


def without_dora(modules: Iterable[str]) -> str | None:
    """Return the first module for which DoRA is not supported: an expert, the embedding or the output layer."""
    return next((module for module in modules if module in (EMBEDDING, OUTPUT) or "expert" in module), None)


def check_targets(family: Family, geometry: ModelGeometry, field: str) -> None:
    """Reject targets that adapters do not support. ``field`` is the key, such as ``actor.lora.targets``.

    Raises:
        ConfigError: a target is not a linear layer of the model, or does not support adapters.
    """
    has_embedding = any(f"{EMBEDDING}.weight" in rule.tensors for rule in family.rules)
    linear, stacked = [*([EMBEDDING] * has_embedding), *([OUTPUT] if geometry.head == "lm" else [])], list[str]()
    for layer in range(geometry.num_layers):
        for rule in family.layer_rules(geometry, layer):
            if not _LINEAR.fullmatch(rule.mcore):
                continue
            modules = [_module(name, layer) for name in rule.tensors]
            linear += modules
            if rule.is_stacked:
                stacked += [module for module in modules if is_target(module, geometry)]
    for target in _sizes(geometry).targets:
        if not any(_matches(target, module) for module in linear):
            known = sorted({module.rpartition(".")[2] for module in linear})
            raise ConfigError(
                f"{field}: {target!r} is not a linear layer of the model; use names from {join_first(known, 20, ', ')}, "
                f"a pattern such as *.layers.0.*, or {ALL_LINEAR}"
            )
    tied = next((module for module in (EMBEDDING, OUTPUT) if is_target(module, geometry)), None)
    if tied is not None and geometry.tied_embeddings:
        raise ConfigError(
            f"{field}: {tied} is both embedding and output layer (tie_word_embeddings=true), which does not support adapters; "
            "remove it, or use a model with a separate output layer"
        )
    if _sizes(geometry).use_dora and (
        module := without_dora(module for module in linear if is_target(module, geometry))
    ):
        raise ConfigError(
            f"{field}: {module} does not support DoRA, because experts, the embedding and the output layer do not; choose other "
            f"targets (with experts: attention layers), or set {field.rpartition('.')[0]}.use_dora=false"
        )
    for part, name in _WITHOUT_ADAPTERS.items() if family.one_block is not None else ():
        if module := next((module for module in linear if part in module and is_target(module, geometry)), None):
            raise ConfigError(
                f"{field}: PEFT does not support {name} ({module}); name other layers, such as in_proj and q_proj"
            )
    if stacked:
        raise ConfigError(
            f"{field}: {stacked[0]} holds all experts of a layer in one tensor, which does not support adapters; "
            "choose attention layers"
        )
