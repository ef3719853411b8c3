"""Mixtures of experts (MoE): their tensors, and their sizes, router settings and unsupported values from config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rlhf_mcore.families.base import HF_LAYER, HIDDEN, MEGATRON_LAYER, ONE, Dim, Rule, Spec, gated_mlp
from rlhf_mcore.families.mtp import MTP
from rlhf_mcore.families.sizes import dense_layers, num_experts, size
from rlhf_mcore.foreign import Fields, shorten
from rlhf_mcore.geometry import ExpertSizes, ModelGeometry


def _sizes(g: ModelGeometry) -> ExpertSizes:
    assert g.experts is not None
    return g.experts


EXPERTS = Dim("experts", lambda g: g.num_experts)
EXPERT_FFN = Dim("expert_ffn", lambda g: _sizes(g).ffn_size)
EXPERT_GATE_UP = Dim("expert_gate_up", lambda g: 2 * _sizes(g).ffn_size)
SHARED_FFN = Dim("shared_ffn", lambda g: _sizes(g).shared_ffn_size)


def experts(block: str, *names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Return the rules of an MoE block: its router, and its experts as separate modules or as one grouped matrix product.

    ``names``: the names of the gate, up and down matrices in files, if they differ from the usual names.
    """
    hf, router = block + ".experts.{e}", {f"{HF_LAYER}{block}.gate.weight": (EXPERTS, HIDDEN)}
    local = gated_mlp("mlp.experts.local_experts.{k}.linear_fc{n}.weight", hf, EXPERT_FFN, "moe", "local", *names)
    first, second = gated_mlp("mlp.experts.linear_fc{n}.weight{k}", hf, EXPERT_FFN, "moe", "te", *names)
    return (
        Rule(MEGATRON_LAYER + "mlp.router.weight", "replicated", router, "moe", in_memory="mlp.gate.weight"),
        *local,
        replace(first, in_memory="mlp.experts.gate_up_proj"),
        replace(second, in_memory="mlp.experts.down_proj"),
    )


def stacked_experts(gate: str = "mlp.router", *, biased: bool = True) -> tuple[Rule, ...]:
    """Return the rules of an MoE block whose files stack a layer's experts in one tensor.

    ``gate`` is the router's name.

    ``biased``: router and experts also have biases.
    """
    router, block = MEGATRON_LAYER + "mlp.router.", HF_LAYER + "mlp.experts."
    parts = ("weight", "bias") if biased else ("weight",)
    layers = (("1", "gate_up_proj", HIDDEN, EXPERT_GATE_UP), ("2", "down_proj", EXPERT_FFN, HIDDEN))
    names: tuple[tuple[Spec, str], ...] = (
        ("local", "local_experts.{k}.linear_fc{n}.{part}"),
        ("te", "linear_fc{n}.{part}{k}"),
    )
    return (
        Rule(router + "weight", "replicated", {f"{HF_LAYER}{gate}.weight": (EXPERTS, HIDDEN)}, "moe"),
        *(Rule(router + part, "replicated", {f"{HF_LAYER}{gate}.bias": (EXPERTS,)}, "moe") for part in parts[1:]),
        *(
            Rule(
                MEGATRON_LAYER + "mlp.experts." + name.replace("{n}", n).replace("{part}", part),
                "stacked",
                {block + hf + suffix: (EXPERTS, *dims)},
                "moe",
                spec,
            )
            for spec, name in names
            for n, hf, inputs, outputs in layers
            for part, suffix, dims in (("weight", "", (inputs, outputs)), ("bias", "_bias", (outputs,)))
            if part in parts
        ),
    )


def expert_bias(block: str, in_memory: str = "") -> tuple[Rule, ...]:
    """Return the rule of the bias that a router adds to the experts' scores to choose them."""
    names = {f"{HF_LAYER}{block}.e_score_correction_bias": (EXPERTS,)}
    return (Rule(EXPERT_BIAS, "replicated", names, "moe", in_memory=in_memory, trained=False),)


EXPERT_BIAS = MEGATRON_LAYER + "mlp.router.expert_bias"


def shared_expert(block: str, gate: str = "") -> tuple[Rule, ...]:
    """Return the rules of the shared expert, which processes every token, and of its output gate, if any."""
    shared = "mlp.shared_experts."
    mlp = gated_mlp(shared + "linear_fc{n}.weight", block, SHARED_FFN, "moe")
    names = {f"{HF_LAYER}{gate}.weight": (ONE, HIDDEN)}
    return (*mlp, Rule(MEGATRON_LAYER + shared + "gate_weight", "replicated", names, "moe")) if gate else mlp


# For DeepSeek-V3 and similar models.
SIGMOID_EXPERTS = experts("mlp") + expert_bias("mlp.gate") + shared_expert("mlp.shared_experts") + MTP


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts with softmax routing: keys of config.json, and transformers' defaults for missing keys."""

    ffn_key: str  # key of an expert's intermediate size
    top_k: int
    has_dense_layers: bool = False  # set by decoder_sparse_step and mlp_only_layers
    always_renormalises: bool = False  # otherwise norm_topk_prob decides
    renormalises: bool = False  # default without norm_topk_prob
    shared_ffn: int = 0  # default intermediate size of the shared expert; 0: the family has none

    @property
    def replaces_mlp(self) -> bool:
        """Return whether config.json has no size for another MLP."""
        return bool(self.shared_ffn) and not self.has_dense_layers

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry."""
        shared = size(hf_config, "shared_expert_intermediate_size", self.shared_ffn) if self.shared_ffn else 0
        experts = ExpertSizes(
            count=num_experts(hf_config),
            ffn_size=size(hf_config, self.ffn_key),
            per_token=size(hf_config, "num_experts_per_tok", self.top_k),
            shared_ffn_size=shared,
            dense_layers=dense_layers(hf_config) if self.has_dense_layers else (),
        )
        return {"experts": experts}

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return the settings of Megatron's router. Renormalised top-k weights equal a softmax over these k experts."""
        return {"moe_router_pre_softmax": not self._renormalises(hf_config)}

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        top_k, experts = size(hf_config, "num_experts_per_tok", self.top_k), num_experts(hf_config)
        renormalises = self._renormalises(hf_config)
        if top_k > experts:
            yield (f"num_experts_per_tok={top_k} is not between 1 and num_experts={experts}; export the model again")
        if top_k == 1 and renormalises:
            yield "num_experts_per_tok=1 with weights that add up to one cannot be learned; use another model"
        shared = hf_config.integer("shared_expert_intermediate_size", default=0)
        if shared and not self.shared_ffn:
            yield "shared experts (shared_expert_intermediate_size) are not supported; use another model"

    def _renormalises(self, hf_config: Fields) -> bool:
        """Return whether the weights of a token's experts add up to one. The softmax is then over these experts only."""
        return hf_config.flag("norm_topk_prob", default=self.renormalises) or self.always_renormalises


_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


class BiasedMixture(Mixture):
    """Experts in all layers, with sigmoid routing and a bias that only affects the choice of experts."""

    __slots__ = ()

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return the settings of Megatron's router."""
        return dict(_SIGMOID)


_GROUPS = ("n_group", "topk_group")


@dataclass(frozen=True, slots=True)
class SigmoidMixture:
    """Experts with sigmoid routing and a bias, from the best expert groups, with shared experts, after some dense layers.

    DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2. The bias only affects the choice of experts, not their
    weights.

    ``states_groups``: config.json must define the groups, because transformers and engines have different
    defaults.
    """

    states_groups: bool = False
    replaces_mlp: ClassVar[bool] = False

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry. Return {} if all layers are dense."""
        ffn, num_layers = size(hf_config, "moe_intermediate_size"), size(hf_config, "num_hidden_layers")
        num_dense = hf_config.integer("first_k_dense_replace", 0, num_layers)
        if num_dense == num_layers:
            return {}
        experts = ExpertSizes(
            count=num_experts(hf_config),
            ffn_size=ffn,
            per_token=size(hf_config, "num_experts_per_tok"),
            shared_ffn_size=ffn * hf_config.integer("n_shared_experts", 0, 64),
            dense_layers=tuple(range(num_dense)),
        )
        return {"experts": experts}

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return settings of Megatron's router."""
        groups, best = self._groups(hf_config)
        if not self.sizes(hf_config):
            return {}
        return {
            **self._scores(),
            "moe_router_topk_scaling_factor": hf_config.number("routed_scaling_factor", 1e-6, 1e6),
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": best if groups > 1 else None,
        }

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        top_k, experts, (groups, best) = (
            size(hf_config, "num_experts_per_tok"),
            num_experts(hf_config),
            self._groups(hf_config),
        )
        hf_config.number("routed_scaling_factor", 1e-6, 1e6)
        if self.states_groups and (absent := [key for key in _GROUPS if key not in hf_config]):
            yield f"config.json has no {absent[0]}, for which transformers and engines use different defaults; add it (1: no groups)"
        if not 2 <= top_k <= experts:
            yield f"num_experts_per_tok={top_k} is not between 2 and n_routed_experts={experts}; use another model"
        elif experts % groups or best > groups or experts // groups * best < top_k:
            yield (
                f"n_group={groups}, topk_group={best}: these groups cannot supply {top_k} of {experts} experts; export the model again"
            )
        elif groups > 1 and top_k // best != 2 and self._adds_two:
            # transformers adds the two best scores of a group. Megatron adds as many scores as experts are chosen
            # per group.
            yield f"topk_group={best} is supported with num_experts_per_tok={2 * best} only, not {top_k}; use another model"
        if (frequency := hf_config.integer("moe_layer_freq", default=1)) != 1:
            yield f"moe_layer_freq={frequency} is not supported, only 1; use another model"

    _adds_two: ClassVar[bool] = True  # sum two scores to choose the groups

    def _scores(self) -> dict[str, Any]:
        return dict(_SIGMOID)

    def _groups(self, hf_config: Fields) -> tuple[int, int]:
        """Return the number of expert groups, and the number of groups from which a token's experts are chosen."""
        return tuple(hf_config.integer(key, 1, 4096, default=1) for key in _GROUPS)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class ListedMixture(SigmoidMixture):
    """``SigmoidMixture``, if transformers reads the list ``mlp_layer_types``, and engines the number of dense layers.

    ``absent_dense``: transformers' number of dense layers without the list. None: the number that engines read.
    """

    absent_dense: int | None = 1

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        yield from SigmoidMixture.problems(self, hf_config)
        num_layers = size(hf_config, "num_hidden_layers")
        num_dense = hf_config.integer("first_k_dense_replace", 0, num_layers)
        absent = num_dense if self.absent_dense is None else self.absent_dense
        usual = _mlp_kinds(absent, num_layers)
        if hf_config.texts("mlp_layer_types", default=usual) != _mlp_kinds(num_dense, num_layers):
            yield (
                f"first_k_dense_replace={num_dense} differs from mlp_layer_types, which transformers reads "
                f"(dense layers without the key: {absent}); correct either of them"
            )


def _mlp_kinds(num_dense: int, num_layers: int) -> list[str]:
    return ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)


class SoftmaxMixture(SigmoidMixture):
    """Experts with softmax routing over all experts, without a bias.

    Choose from all experts, or from groups ranked by their best expert.

    DeepSeek-AI 2024, arXiv 2405.04434, section 2.2.2.
    """

    __slots__ = ()
    _adds_two = False

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        if (method := self._method(hf_config)) not in ("greedy", "group_limited_greedy"):
            yield f"topk_method {shorten(method)!r} is not supported, only 'greedy' and 'group_limited_greedy'; use another model"
        yield from SigmoidMixture.problems(self, hf_config)

    def _scores(self) -> dict[str, Any]:
        return {"moe_router_pre_softmax": True}

    def _groups(self, hf_config: Fields) -> tuple[int, int]:
        return (1, 1) if self._method(hf_config) == "greedy" else SigmoidMixture._groups(self, hf_config)

    @staticmethod
    def _method(hf_config: Fields) -> str:
        return hf_config.text("topk_method", default="greedy")
