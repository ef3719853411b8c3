from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, settings

from rlhf_mcore.bridge.map.pieces import Piece, view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces, row_runs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import FAMILIES, HEADS, architecture_name, embedding_name
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import GroupedSizes, LatentSizes, ModelGeometry, Shard
from tests.distributed.models import FURTHER_MODELS, MODELS, SIZES
from tests.messages import expect_error
from tests.unit.bridge.geometry import GEOMETRY, geometries, hf_tensors, mcore_tensors

QKV = "decoder.layers.3.self_attention.linear_qkv.weight"
EXAMPLES = settings(max_examples=20, deadline=None)


def brief(name: str, geometry: ModelGeometry, rank: int, tp: int) -> list[tuple[str, int, int, int]]:
    """(projection, first HF row, number of rows, local row) of whole-row pieces."""
    width = geometry.hidden_size
    found = []
    for piece in pieces(name, geometry, Shard(rank, tp)):
        assert piece.start[1] == 0 and piece.shape[1] == width and piece.strides == (width, 1)
        assert piece.offset % width == 0
        found.append((piece.hf_name.split(".")[-2], piece.start[0], piece.shape[0], piece.offset // width))
    return found


def test_query_groups_by_hand() -> None:
    # 4 heads of size 1 in 2 groups: rows q0 q1 k0 v0 | q2 q3 k1 v1. Four ranks get two rows each, whatever these are.
    geometry = replace(GEOMETRY, attention=GroupedSizes(4, 2, 1))
    assert brief(QKV, geometry, 0, 4) == [("q_proj", 0, 2, 0)]
    assert brief(QKV, geometry, 1, 4) == [("k_proj", 0, 1, 0), ("v_proj", 0, 1, 1)]
    assert brief(QKV, geometry, 2, 4) == [("q_proj", 2, 2, 0)]
    assert brief(QKV, geometry, 3, 4) == [("k_proj", 1, 1, 0), ("v_proj", 1, 1, 1)]
    assert brief(QKV, geometry, 1, 2) == [("q_proj", 2, 2, 0), ("k_proj", 1, 1, 2), ("v_proj", 1, 1, 3)]


def test_tensors_that_files_stack_by_hand() -> None:
    # The same rows in one tensor: q0 q1 q2 q3 k0 k1 v0 v1, and 16 rows of gate before 16 rows of up.
    geometry = replace(GEOMETRY, family="phi3", attention=GroupedSizes(4, 2, 1))
    joined = "qkv_proj"
    assert brief(QKV, geometry, 1, 4) == [(joined, 4, 1, 0), (joined, 6, 1, 1)]
    assert brief(QKV, geometry, 1, 2) == [(joined, 2, 2, 0), (joined, 5, 1, 2), (joined, 7, 1, 3)]
    mlp = "decoder.layers.3.mlp.linear_fc1.weight"
    assert brief(mlp, geometry, 1, 2) == [("gate_up_proj", 8, 8, 0), ("gate_up_proj", 24, 8, 8)]


def test_a_cut_through_the_middle_of_a_head_by_hand() -> None:
    # One group, 4 heads of size 2: rows q0..q7 k0 k1 v0 v1. Four ranks get three rows each.
    geometry = replace(GEOMETRY, attention=GroupedSizes(4, 1, 2))
    assert brief(QKV, geometry, 0, 4) == [("q_proj", 0, 3, 0)]
    assert brief(QKV, geometry, 1, 4) == [("q_proj", 3, 3, 0)]
    assert brief(QKV, geometry, 2, 4) == [("q_proj", 6, 2, 0), ("k_proj", 0, 1, 2)]
    assert brief(QKV, geometry, 3, 4) == [("k_proj", 1, 1, 0), ("v_proj", 0, 2, 1)]


def test_the_other_cuts_by_hand() -> None:
    shard = Shard(1, 2)
    layer = "decoder.layers.3."
    assert brief(layer + "mlp.linear_fc1.weight", GEOMETRY, 1, 2) == [("gate_proj", 8, 8, 0), ("up_proj", 8, 8, 8)]
    assert pieces(layer + "mlp.linear_fc2.weight", GEOMETRY, shard) == [
        Piece("model.layers.3.mlp.down_proj.weight", (0, 8), (8, 8), 0, (8, 1))
    ]
    # 13 tokens on two ranks are padded to 14: the second holds rows 7 to 12 and one of padding.
    assert brief("embedding.word_embeddings.weight", GEOMETRY, 1, 2) == [("embed_tokens", 7, 6, 0)]
    assert pieces("decoder.layers.3.self_attention.linear_qkv.bias", GEOMETRY, shard) == [
        Piece("model.layers.3.self_attn.q_proj.bias", (4,), (4,), 0, (1,)),
        Piece("model.layers.3.self_attn.k_proj.bias", (2,), (2,), 4, (1,)),
        Piece("model.layers.3.self_attn.v_proj.bias", (2,), (2,), 6, (1,)),
    ]
    # A scalar head is whole on every rank.
    for rank in range(2):
        for head in ("token", "sequence"):
            scored = pieces("output_layer.weight", replace(GEOMETRY, head=head), Shard(rank, 2))
            assert scored == [Piece("score.weight", (0, 0), (1, 8), 0, (8, 1))]
        bias = pieces("output_layer.bias", replace(GEOMETRY, head="token"), Shard(rank, 2))
        assert bias == [Piece("score.bias", (0,), (1,), 0, (1,))]
    # 5 tokens on four ranks are padded to 8: the last holds padding only.
    assert pieces("output_layer.weight", replace(GEOMETRY, vocab_size=5), Shard(3, 4)) == []


@EXAMPLES
@given(geometries())
def test_views_equal_tensors_fused_by_reshaping(case: tuple[ModelGeometry, int]) -> None:
    geometry, tp = case
    hf = hf_tensors(geometry)
    for rank in range(tp):
        for name, expected in mcore_tensors(geometry, hf, rank, tp).items():
            filled = torch.zeros_like(expected)
            for piece in pieces(name, geometry, Shard(rank, tp)):
                assert torch.equal(view(expected, piece), hf[piece.hf_name][piece.slices])
                view(filled, piece).copy_(hf[piece.hf_name][piece.slices])
            assert torch.equal(filled, expected), name


@EXAMPLES
@given(geometries())
def test_ranks_tile_every_tensor_once_and_pieces_tile_the_local_one(case: tuple[ModelGeometry, int]) -> None:
    geometry, tp = case
    hf = hf_tensors(geometry)
    covered = {name: torch.zeros(tensor.shape) for name, tensor in hf.items()}
    for rank in range(tp):
        for name, local in mcore_tensors(geometry, hf, rank, tp).items():
            if name == "output_layer.weight" and geometry.tied_embeddings:
                continue  # the second owner of the embedding
            held = torch.zeros_like(local)
            for piece in pieces(name, geometry, Shard(rank, tp)):
                assert piece.numel == covered[piece.hf_name][piece.slices].numel() > 0
                covered[piece.hf_name][piece.slices] += 1
                view(held, piece).add_(1)
            assert torch.equal(held, (local != 0).double()), name  # zeros are vocabulary padding
    for name, count in covered.items():
        replicated = name.endswith("norm.weight") or name.startswith("score.")
        assert torch.equal(count, torch.full_like(count, tp if replicated else 1)), name


@given(geometries())
def test_shapes_are_those_of_the_whole_tensors(case: tuple[ModelGeometry, int]) -> None:
    geometry, _ = case
    assert hf_shapes(geometry) == {name: tuple(tensor.shape) for name, tensor in hf_tensors(geometry).items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("head", HEADS)
def test_shapes_are_those_of_transformers_models(name: str, head: str) -> None:
    model_class, config_class, extra = MODELS[name]
    settings = {key: value for key, value in {**SIZES, **extra}.items() if value is not None}
    config = config_class(**settings, num_labels=1)
    kind = getattr(transformers, architecture_name(model_class.__name__, head))
    with torch.device("meta"):
        state = kind(config).state_dict()
    tied = bool(config.tie_word_embeddings) and head == "lm"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    geometry = ModelGeometry(
        family=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        attention=GroupedSizes(config.num_attention_heads, config.num_key_value_heads, head_dim),
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=tied,
        head=head,
    )
    expected = {key: tuple(value.shape) for key, value in state.items() if not (tied and key == "lm_head.weight")}
    assert hf_shapes(geometry) == expected


def test_shapes_come_in_the_order_of_the_network() -> None:
    names = list(hf_shapes(replace(GEOMETRY, num_layers=12)))
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    scored = list(hf_shapes(replace(GEOMETRY, head="token")))
    assert scored[-3:] == ["model.norm.weight", "score.weight", "score.bias"]
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert layers == sorted(layers)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.norms != "outputs"])
def test_norms_fused_into_transformer_engines_linears_have_the_same_place(family: str) -> None:
    latent = FAMILIES[family].latent is not None
    sizes = LatentSizes(4, head_dim=2, rope_dim=1, value_dim=2, kv_rank=8, q_rank=8) if latent else GEOMETRY.attention
    geometry = replace(GEOMETRY, family=family, attention=sizes)
    up = "self_attention.linear_{}_up_proj.layer_norm_weight"
    attention = [
        (up.format("q"), "self_attention.q_layernorm.weight", "self_attn.q_a_layernorm"),
        (up.format("kv"), "self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm"),
    ]
    usual = [("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", "input_layernorm")]
    mlp = "pre_feedforward_layernorm" if family.startswith("gemma") else "post_attention_layernorm"
    for fused, alone, hf in (
        *(attention if latent else usual),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight", mlp),
    ):
        decoder = embedding_name(geometry).rpartition("emb")[0]
        norm = "norm" if FAMILIES[family].one_block is not None else hf
        expected = [Piece(f"{decoder}layers.5.{norm}.weight", (0,), (8,), 0, (1,))]
        for name in (fused, alone):
            assert pieces(f"decoder.layers.5.{name}", geometry, Shard(1, 2)) == expected


def test_a_head_has_the_parameters_of_its_kind_only() -> None:
    for head in ("lm", "sequence"):
        with expect_error(KeyError, field="qwen2"):
            pieces("output_layer.bias", replace(GEOMETRY, head=head), Shard(0, 1))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "decoder.layers.0.self_attention.linear_qkv.bias"),
        ("qwen2", "decoder.layers.0.self_attention.q_layernorm.weight"),
        ("qwen3", "decoder.layers.0.mlp.router.weight"),
        ("llama", "decoder.layers.0.mlp.linear_fc1.weight_extra"),
        ("llama", "module.embedding.word_embeddings.weight"),
        ("llama", "embedding.position_embeddings.weight"),
    ],
)
def test_a_parameter_without_a_rule_is_an_error(family: str, name: str) -> None:
    with expect_error(KeyError, field=family, value=name):
        pieces(name, replace(GEOMETRY, family=family), Shard(0, 1))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("deepseek_v32", "indexers"),
        ("gemma4_text", "two kinds of attention heads"),
        ("nemotron_h", "state spaces"),
        ("qwen3_next", "gated delta nets"),
    ],
)
def test_parts_that_megatrons_formats_cannot_describe(name: str, part: str) -> None:
    _, config_class, extra = FURTHER_MODELS[name]
    sizes = {key: value for key, value in {**SIZES, **extra}.items() if value is not None}
    fields = Fields(config_class(**sizes).to_dict(), "config.json", "correct it")
    with expect_error(ConfigError, field=name, value=f"formats of its {part}", remedy="from or to hf only"):
        row_runs("embedding.word_embeddings.weight", FAMILIES[name].geometry(fields))


def test_a_tied_embedding_has_two_owners_and_one_name() -> None:
    tied = replace(GEOMETRY, tied_embeddings=True)
    for rank in range(2):
        both = [
            pieces(name, tied, Shard(rank, 2)) for name in ("embedding.word_embeddings.weight", "output_layer.weight")
        ]
        assert both[0] == both[1] and both[0][0].hf_name == "model.embed_tokens.weight"


@pytest.mark.parametrize(("vocab", "tp", "padded"), [(13, 1, 13), (13, 2, 14), (13, 4, 16), (16, 8, 16), (1, 8, 8)])
def test_padded_vocabulary(vocab: int, tp: int, padded: int) -> None:
    assert replace(GEOMETRY, vocab_size=vocab).padded_vocab(tp) == padded


def test_a_view_writes_through_and_starts_where_its_tensor_does() -> None:
    storage = torch.zeros(20)
    local = storage[4:16].view(3, 4)
    piece = Piece("x", (5, 0), (2, 2), 5, (4, 1))
    view(local, piece).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert storage.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 3, 4, 0, 0, 0, 0, 0]
    assert piece.slices == (slice(5, 7), slice(0, 2)) and piece.numel == 4
    with pytest.raises(AssertionError, match="x"):
        view(local.t(), piece)
