"""Compare our weight map with mbridge's independent map: names, fusions and splits of random tensors, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from mbridge import AutoBridge
from mbridge.core.bridge import Bridge
from mbridge.core.parallel_states import ParallelStates
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry, Shard
from tests.distributed.models import MODELS, MOE_MODELS, SIZES

KNOWN = {**MODELS, **MOE_MODELS}
# mbridge does not support mistral, gives a tied Llama no second owner, and has experts in every layer of its MoE models.
NAMES = ("llama", "qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "qwen2_moe", "mixtral")
# Megatron splits column-parallel tensors by rows (0) and row-parallel tensors by columns (1).
CUT_BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(slots=True)
class Case:
    """A model under one tensor-parallel size, for both maps."""

    geometry: ModelGeometry
    theirs: Bridge
    tp: int
    hf: dict[str, Tensor]

    def expected_tensors(self, name: str) -> list[Tensor]:
        """Return mbridge's tensor of every rank, from full Hugging Face tensors."""
        full = self.theirs._weight_to_mcore_format(name, [self.hf[key] for key in self.hf_names(name)])
        return list(self.theirs._weight_split_across_tp(name, full, self.like(name, full), self.tp))

    def hf_names(self, name: str) -> list[str]:
        return self.theirs._weight_name_mapping_mcore_to_hf(name)

    def like(self, name: str, full: Tensor) -> Tensor:
        """Return an empty tensor with the properties of Megatron's local parameter that mbridge reads: its shape and split."""
        shape = list(full.shape)
        axis = int(name.endswith(CUT_BY_COLUMNS) or ".linear_fc2.weight" in name)
        if is_cut(name):
            shape[axis] //= self.tp
        local = torch.empty(shape)
        local.tensor_model_parallel, local.partition_dim = is_cut(name), axis  # type: ignore[attr-defined]
        return local


def is_cut(name: str) -> bool:
    return "norm" not in name and "router" not in name and "gate_weight" not in name


def make_case(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> Case:
    _, config_class, extra = KNOWN[name]
    config = config_class(**{key: value for key, value in {**SIZES, **extra}.items() if value is not None})
    # A tied model rewrites the table of its class for all later models. Here it gets a separate table.
    kind = type(AutoBridge.from_config(config_class(**SIZES), parallel_states=ParallelStates()))
    monkeypatch.setattr(kind, "_DIRECT_MAPPING", dict(kind._DIRECT_MAPPING))
    states = ParallelStates(tp_size=tp, etp_size=tp)
    theirs = AutoBridge.from_config(
        config, dtype=torch.float32, parallel_states=states, make_vocab_size_divisible_by=tp
    )
    geometry = make_geometry(config)
    # mbridge computes these values while it builds a model.
    theirs.vocab_size, theirs.padded_vocab_size = geometry.vocab_size, -(-geometry.vocab_size // tp) * tp
    generator = torch.Generator().manual_seed(0)
    hf = {key: torch.randn(shape, generator=generator) for key, shape in hf_shapes(geometry).items()}
    return Case(geometry, theirs, tp, hf)


def make_geometry(config: object) -> ModelGeometry:
    values = vars(config)
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    experts = values.get("num_experts", values.get("num_local_experts", 0))
    return ModelGeometry(
        family=config.model_type,  # type: ignore[attr-defined]
        num_layers=values["num_hidden_layers"],
        hidden_size=hidden,
        attention=GroupedSizes(heads, values["num_key_value_heads"], values.get("head_dim") or hidden // heads),
        ffn_size=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        tied_embeddings=bool(values["tie_word_embeddings"]),
        experts=None
        if not experts
        else ExpertSizes(
            count=experts,
            ffn_size=values.get("moe_intermediate_size", values["intermediate_size"]),
            per_token=2,
            shared_ffn_size=values.get("shared_expert_intermediate_size", 0),
        ),
    )


def megatron_names(geometry: ModelGeometry) -> Iterator[str]:
    """Yield the parameter names of a model with Transformer Engine. mbridge knows only this naming."""
    yield from ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
    attention = ["linear_qkv.weight", "linear_qkv.layer_norm_weight", "linear_proj.weight"]
    if geometry.family.startswith("qwen2"):
        attention.append("linear_qkv.bias")
    if geometry.family.startswith("qwen3"):
        attention += ["q_layernorm.weight", "k_layernorm.weight"]
    dense = ("mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc2.weight")
    moe = ["pre_mlp_layernorm.weight", "mlp.router.weight"]
    moe += [f"mlp.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(geometry.num_experts)]
    if geometry.experts is not None and geometry.experts.shared_ffn_size:
        moe += [f"mlp.shared_experts.{name}" for name in ("linear_fc1.weight", "linear_fc2.weight", "gate_weight")]
    for layer in range(geometry.num_layers):
        prefix = f"decoder.layers.{layer}."
        yield from (f"{prefix}self_attention.{name}" for name in attention)
        yield from (prefix + name for name in (moe if geometry.num_experts else dense))


def ours(case: Case, name: str, shard: Shard, like: Tensor) -> Tensor:
    """Return our tensor of one rank, filled piece by piece from full Hugging Face tensors. Padding is zero."""
    local = torch.zeros(like.shape)
    for piece in pieces(name, case.geometry, shard):
        view(local, piece).copy_(case.hf[piece.hf_name][piece.slices])
    return local


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_holds_what_mbridge_would_give_it(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name, tp, monkeypatch)
    used = set()
    for parameter in megatron_names(case.geometry):
        used.update(case.hf_names(parameter))
        expected = case.expected_tensors(parameter)
        assert len(expected) == tp
        for rank, tensor in enumerate(expected):
            assert torch.equal(ours(case, parameter, Shard(rank, tp), tensor), tensor), (parameter, rank)
    assert used == set(case.hf)  # mbridge's checkpoint contains exactly our tensors


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_mbridge_exports_the_full_tensors_from_ours(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(name, tp, monkeypatch)
    exported: dict[str, Tensor] = {}
    for parameter in megatron_names(case.geometry):
        parts = [
            ours(case, parameter, Shard(rank, tp), part) for rank, part in enumerate(case.expected_tensors(parameter))
        ]
        like = case.like(parameter, parts[0])
        whole = case.theirs._weight_merge_across_tp(parameter, parts, like) if is_cut(parameter) else parts[0]
        exported.update(zip(*case.theirs._weight_to_hf_format(parameter, whole), strict=True))
    assert exported.keys() == case.hf.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in case.hf.items())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_expert_parallel_ranks_hold_the_experts_that_mbridge_deals_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, ep = make_case(name, 2, monkeypatch), 2
    for expert_rank in range(ep):
        case.theirs.mpu.ep_size, case.theirs.mpu.ep_rank = ep, expert_rank
        local = {
            f"decoder.layers.1.mlp.experts.linear_fc{n}.weight{k}": torch.empty(0)
            for n in (1, 2)
            for k in range(case.geometry.num_experts // ep)
        }
        for parameter, numbered in case.theirs._weight_name_mapping_mcore_local_to_global(Holder(local)).items():
            for rank, tensor in enumerate(case.expected_tensors(numbered)):
                mine = ours(case, parameter, Shard(rank, 2, expert_rank, ep), tensor)
                assert torch.equal(mine, tensor), (parameter, rank)


class Holder:
    """The part of a model that mbridge asks for names."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors
        layer = type("Layer", (), {})
        self.decoder = type("Decoder", (), {"layers": []})()
        for number in (1, 2):
            self.decoder.layers.append(layer())
            self.decoder.layers[-1].layer_number = number

    def state_dict(self) -> dict[str, Tensor]:
        return self._tensors
