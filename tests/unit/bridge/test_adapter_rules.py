"""Test the rules of adapter matrices: names and shapes as in PEFT, and the same rows and columns per rank as the weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_mcore.bridge.files.state_files import regions
from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import Block, adapter_names, blocks, hf_shapes, layer_names, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.adapters import base_name, check_targets, hf_module, hf_names
from rlhf_mcore.geometry import AdapterSizes, ExpertSizes, GroupedSizes, ModelGeometry, Shard

MODEL = ModelGeometry("qwen3", 2, 64, GroupedSizes(4, 2, 16), 128, 100, True)
MIXTURE = replace(MODEL, family="qwen3_moe", experts=ExpertSizes(4, 32, 2))
LAYER = "base_model.model.model.layers.1."
QKV = "decoder.layers.1.self_attention.linear_qkv"


def adapters(*targets: str, model: ModelGeometry = MODEL) -> ModelGeometry:
    return replace(model, adapter=AdapterSizes(4, 8.0, targets))


def test_names_and_shapes_are_those_of_peft() -> None:
    assert hf_shapes(adapters("v_proj", "model.layers.1.mlp.down_proj")) == {
        "base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight": (4, 64),
        "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight": (32, 4),
        LAYER + "self_attn.v_proj.lora_A.weight": (4, 64),
        LAYER + "self_attn.v_proj.lora_B.weight": (32, 4),
        LAYER + "mlp.down_proj.lora_A.weight": (4, 128),
        LAYER + "mlp.down_proj.lora_B.weight": (64, 4),
    }
    assert len(hf_shapes(adapters("all-linear"))) == 2 * 2 * 7
    assert len(hf_shapes(adapters("all-linear", model=MIXTURE))) == 2 * 2 * (4 + 3 * 4)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("targets", [("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj"), ("k_proj",)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_has_the_rows_of_b_that_it_has_of_the_weight(kv_heads: int, targets: tuple[str, ...], size: int) -> None:
    """This also holds for fewer groups than ranks, for which Megatron splits the rows of a group."""
    geometry = replace(MODEL, attention=GroupedSizes(4, kv_heads, 16))
    for rank in range(size):
        rows = {"weight": [], "lora_b": []}
        for end, of in (("weight", geometry), ("lora_b", adapters(*targets, model=geometry))):
            for piece in sorted(pieces(f"{QKV}.{end}", of, Shard(rank, size)), key=lambda piece: piece.offset):
                projection = piece.hf_name.split(".self_attn.")[1].split(".")[0]
                if projection in targets:
                    rows[end] += [(projection, piece.start[0] + row) for row in range(piece.shape[0])]
        assert rows["lora_b"] == rows["weight"]


def test_what_ranks_split_by_inputs_has_a_split() -> None:
    geometry, name = adapters("o_proj"), "decoder.layers.1.self_attention.linear_proj."
    [a], [b] = (pieces(name + end, geometry, Shard(1, 2)) for end in ("lora_a", "lora_b"))
    assert (a.hf_name, a.start, a.shape) == (LAYER + "self_attn.o_proj.lora_A.weight", (0, 32), (4, 32))
    assert (b.hf_name, b.start, b.shape) == (LAYER + "self_attn.o_proj.lora_B.weight", (0, 0), (64, 4))
    with pytest.raises(KeyError, match="linear_qkv"):
        pieces(f"{QKV}.lora_a", geometry, Shard(0, 1))


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_numbered_over_the_layer(fused: bool) -> None:
    geometry = adapters("gate_proj", model=MIXTURE)
    names = [name for name in layer_names(geometry, 1, 2, fused) if ".lora_a" in name]
    held = [pieces(name, geometry, Shard(0, 1, expert_rank=1, expert_size=2)) for name in names]
    assert [piece.hf_name for [piece] in held] == [f"{LAYER}mlp.experts.{e}.gate_proj.lora_A.weight" for e in (2, 3)]
    assert {base_name(name)[0] for name in names} <= set(layer_names(MIXTURE, 1, 2, fused))


UNTIED = replace(MODEL, tied_embeddings=False, vocab_size=101)


def test_both_ends_have_adapters_where_they_are_named() -> None:
    """PEFT transposes the adapters of an embedding. A has a column per token, and B a row per element of a state."""
    ends = adapters("embed_tokens", "lm_head", model=UNTIED)
    assert hf_shapes(ends) == {
        "base_model.model.model.embed_tokens.lora_embedding_B": (64, 4),
        "base_model.model.model.embed_tokens.lora_embedding_A": (4, 101),
        "base_model.model.lm_head.lora_A.weight": (4, 64),
        "base_model.model.lm_head.lora_B.weight": (101, 4),
    }
    assert not any("lm_head" in name or "embed" in name for name in hf_shapes(adapters("all-linear", model=UNTIED)))
    assert [hf_module(name) for name in hf_shapes(ends)] == 2 * ["model.embed_tokens"] + 2 * ["lm_head"]


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_a_rank_has_adapters_of_its_part_of_the_vocabulary(module: str, rank: int) -> None:
    """Two ranks share 101 tokens, padded to 51 each. Rows of B have the order of the weight's rows, then padding."""
    geometry = replace(UNTIED, adapter=AdapterSizes(rank, 8.0, ("embed_tokens", "lm_head")))
    layer = {"model.embed_tokens": "embedding.word_embeddings", "lm_head": "output_layer"}[module]
    a, b = (torch.randn(shape) for shape in ((rank, 64), (101, rank)))
    of_peft = dict(zip(hf_names(module), (a, b) if module == "lm_head" else (a.t(), b.t()), strict=True))
    for number, words in enumerate((slice(0, 51), slice(51, 101))):
        shard = Shard(number, 2)
        for name, whole, shape in (("lora_a", a, (rank, 64)), ("lora_b", b[words], (51, rank))):
            local = torch.zeros(shape)
            for piece in pieces(f"{layer}.{name}", geometry, shard):
                view(local, piece).copy_(of_peft[piece.hf_name][piece.slices])
                assert regions([piece], 0, local.numel())
            assert torch.equal(local[: len(whole)], whole) and not local[len(whole) :].any()
        assert blocks(f"{layer}.weight", geometry, shard) == [Block(0, words.stop - words.start, 0, 0)]


@pytest.mark.parametrize("module", ["model.embed_tokens", "lm_head"])
def test_a_tied_weight_takes_no_adapter(module: str) -> None:
    with pytest.raises(ConfigError, match=rf"actor\.lora\.targets: {module} .*tie_word_embeddings.*remove it"):
        check_targets(FAMILIES["qwen3"], adapters("all-linear", module), "actor.lora.targets")
    check_targets(FAMILIES["qwen3"], adapters("all-linear", module, model=UNTIED), "actor.lora.targets")


@pytest.mark.parametrize(
    ("family", "targets", "named"),
    [("qwen3", ("q_proj", "qq_proj"), "qq_proj"), ("qwen3", ("norm",), "norm")],
)
def test_targets_that_cannot_be_are_refused(family: str, targets: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"actor\.lora\.targets.*{named}.*down_proj"):
        check_targets(FAMILIES[family], adapters(*targets), "actor.lora.targets")
    check_targets(FAMILIES[family], adapters("all-linear"), "actor.lora.targets")


def test_blocks_of_a_weight() -> None:
    """Worked by hand: queries of two groups, then a value after a key without an adapter."""
    assert adapter_names(f"{QKV}.weight") == (f"{QKV}.lora_a", f"{QKV}.lora_b")
    assert blocks(f"{QKV}.weight", adapters("q_proj", "v_proj"), Shard(0, 1)) == [
        Block(0, 32, 0, 0),
        Block(48, 16, 32, 4),
        Block(64, 32, 48, 0),
        Block(112, 16, 80, 4),
    ]
    assert blocks("decoder.layers.0.mlp.linear_fc2.weight", adapters("down_proj"), Shard(1, 2)) == [Block(0, 64, 0, 0)]
    assert blocks("decoder.layers.0.mlp.linear_fc2.weight", adapters("up_proj"), Shard(1, 2)) == []
    assert blocks("embedding.word_embeddings.weight", adapters("all-linear"), Shard(0, 1)) == []
    experts = adapters("gate_proj", model=MIXTURE)
    assert adapter_names("decoder.layers.0.mlp.experts.linear_fc1.weight1")[0].endswith("linear_fc1.lora_a1")
    assert blocks("decoder.layers.0.mlp.experts.linear_fc1.weight1", experts, Shard(0, 1)) == [Block(0, 32, 0, 0)]
