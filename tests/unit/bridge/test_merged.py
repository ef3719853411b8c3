"""Test the merged weights that a trainer with adapters sends, bucket by bucket, against merged whole Hugging Face matrices."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import adapter_names, blocks, hf_shapes, layer_names, pieces
from rlhf_mcore.bridge.run.merged import MergedSources, SeparateAdapterSources, adapted_weights
from rlhf_mcore.geometry import AdapterSizes, ExpertSizes, GroupedSizes, LocalParameter, ModelGeometry, Shard
from tests.unit.pairs import pairwise

MODEL = ModelGeometry("qwen3", 1, 8, GroupedSizes(4, 2, 2), 16, 13, True)
MIXTURE = replace(MODEL, family="qwen3_moe", experts=ExpertSizes(4, 6, 2))
RANK, SCALE = 2, 1.5


def with_adapters(model: ModelGeometry, *targets: str) -> ModelGeometry:
    return replace(model, adapter=AdapterSizes(RANK, SCALE * RANK, targets))


def bucket(*names: str) -> Any:
    return SimpleNamespace(source_buffers=set(names))


def random_tensors(geometry: ModelGeometry, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return whole random tensors in Hugging Face coordinates."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in hf_shapes(geometry).items()}


ENDS = ["embedding.word_embeddings.weight", "output_layer.weight"]


def cut_parameter(name: str, geometry: ModelGeometry, shard: Shard, full: dict[str, Tensor]) -> LocalParameter:
    """Cut a rank's tensor out of whole tensors."""
    parts = pieces(name, geometry, shard)
    flat = torch.full((sum(part.numel for part in parts),), torch.nan, dtype=full[parts[0].hf_name].dtype)
    for part in parts:
        view(flat, part).copy_(full[part.hf_name][part.slices])
    two = len(parts[0].shape) == 2
    return LocalParameter(name, flat.view(-1, max(parts[0].strides)) if two else flat, shard)


def merged_by_hand(full: dict[str, Tensor], adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Apply PEFT's formula to whole matrices: compute the product in fp32, round, add."""
    whole = dict(full)
    for name in full:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in adapters:
            a, b = (adapters[f"{module}.lora_{side}.weight"].float() for side in "AB")
            whole[name] = full[name] + (SCALE * (b @ a)).to(full[name].dtype)
        elif f"{module}.lora_embedding_A" in adapters:
            a, b = (adapters[f"{module}.lora_embedding_{side}"].float() for side in "AB")
            whole[name] = full[name] + (SCALE * (b @ a).t()).to(full[name].dtype)
    return whole


@pairwise(
    ("dtype", [torch.float32, torch.bfloat16]),
    ("targets", [("all-linear",), ("q_proj", "v_proj", "down_proj"), ("up_proj",)]),
    (
        "model, shards",
        [
            (MODEL, [Shard(0, 1)]),
            (MODEL, [Shard(0, 2), Shard(1, 2)]),
            (MIXTURE, [Shard(0, 1, 0, 1)]),
            (MIXTURE, [Shard(tp, 2, ep, 2) for tp in (0, 1) for ep in (0, 1)]),
        ],
    ),
)
def test_a_rank_sends_its_part_of_merged_matrices(
    model: ModelGeometry, shards: list[Shard], targets: tuple[str, ...], dtype: torch.dtype
) -> None:
    geometry = with_adapters(model, *targets)
    full, adapters = random_tensors(model, dtype), random_tensors(geometry, dtype)
    whole, covered = merged_by_hand(full, adapters), set[str]()
    for shard in shards:
        names = list(layer_names(model, 0, model.num_experts // shard.expert_size)) + (
            ENDS if "lm_head" in targets else []
        )
        parameters = [cut_parameter(name, model, shard, full) for name in names]
        pairs = [adapter_names(name) for name in names if blocks(name, geometry, shard)]
        sources = MergedSources(
            parameters, [cut_parameter(name, geometry, shard, adapters) for pair in pairs for name in pair], geometry
        )
        opened = sources.open(bucket(*names))
        for name in names:
            for part in pieces(name, model, shard):
                sent, expected = view(opened[name], part), whole[part.hf_name][part.slices]
                torch.testing.assert_close(sent, expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 0)
                if not torch.equal(full[part.hf_name], whole[part.hf_name]):
                    covered.add(part.hf_name)
    assert covered == set(adapted_weights(geometry))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_an_embedding_and_an_output_layer_are_merged(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks hold parts of the vocabulary."""
    monkeypatch.setattr("rlhf_mcore.bridge.run.merged.ROWS", 3)
    test_a_rank_sends_its_part_of_merged_matrices(
        replace(MODEL, tied_embeddings=False),
        [Shard(rank, size) for rank in range(size)],
        ("embed_tokens", "lm_head"),
        dtype,
    )


def test_weights_are_merged_while_a_bucket_reads_them() -> None:
    """A weight in two open buckets is merged once. After both are closed, it is merged again, with the same bits."""
    geometry, shard, name = (
        with_adapters(MODEL, "q_proj"),
        Shard(0, 1),
        "decoder.layers.0.self_attention.linear_qkv.weight",
    )
    adapters = random_tensors(geometry, torch.float32)
    parameter = cut_parameter(name, MODEL, shard, random_tensors(MODEL, torch.float32))
    factors = [cut_parameter(adapter, geometry, shard, adapters) for adapter in adapter_names(name)]
    sources = MergedSources([parameter], factors, geometry)
    one, other = bucket(name), bucket(name)
    first = sources.open(one)[name]
    assert sources.open(other)[name] is first
    sources.close(one)
    assert sources.open(one)[name] is first
    sources.close(one), sources.close(other)
    again = sources.open(one)[name]
    assert again is not first and torch.equal(again, first)
    assert not torch.equal(parameter.tensor.view(-1), first), "the base stays as it is"


def test_copies_are_of_the_adapters_alone() -> None:
    """Kept copies contain only the adapters. They are merged with the base when they are sent again."""
    geometry, shard, name = (
        with_adapters(MODEL, "o_proj"),
        Shard(0, 1),
        "decoder.layers.0.self_attention.linear_proj.weight",
    )
    parameter = cut_parameter(name, MODEL, shard, random_tensors(MODEL, torch.float32))
    factors = [cut_parameter(n, geometry, shard, random_tensors(geometry, torch.float32)) for n in adapter_names(name)]
    live, kept = (MergedSources([parameter], factors, geometry, keep=keep) for keep in (False, True))
    kept.take()
    before = live.open(bucket(name))[name]
    live.close(bucket(name))
    factors[1].tensor += 1
    assert torch.equal(kept.open(bucket(name))[name], before)
    assert not torch.equal(live.open(bucket(name))[name], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_magnitudes_are_those_of_when_a_sync_began_or_of_when_copies_were_made(dtype: torch.dtype) -> None:
    """Query rows get twice the sum and key rows half of it, rounded once. Values have no adapter."""
    geometry, shard, name = (
        with_adapters(MODEL, "q_proj", "k_proj"),
        Shard(0, 1),
        "decoder.layers.0.self_attention.linear_qkv.weight",
    )
    geometry = replace(geometry, adapter=replace(geometry.adapter, use_dora=True))
    full, adapters = random_tensors(MODEL, dtype), random_tensors(geometry, dtype)
    parameter = cut_parameter(name, MODEL, shard, full)
    factors = [cut_parameter(n, geometry, shard, adapters) for n in adapter_names(name)]
    gain = torch.ones(parameter.tensor.size(0))
    for part in pieces(name, MODEL, shard):
        factor = {"q": 2.0, "k": 0.5, "v": 1.0}[part.hf_name.partition("_proj")[0][-1]]
        gain[part.offset // part.strides[0] :][: part.shape[0]] = factor
    live, kept = (
        MergedSources([parameter], factors, geometry, keep=keep, gains=lambda: {name: gain.clone()})
        for keep in (False, True)
    )
    live.prepare(), kept.take()
    gain[:] = torch.nan  # as after an update
    kept.prepare()
    for sources in (live, kept):
        opened = sources.open(bucket(name))
        for part in pieces(name, MODEL, shard):
            module = f"base_model.model.{part.hf_name.removesuffix('.weight')}"
            expected = full[part.hf_name].float()
            if "v_proj" not in module:
                product = (
                    SCALE * adapters[f"{module}.lora_B.weight"].float() @ adapters[f"{module}.lora_A.weight"].float()
                )
                expected = (expected + product) * (2.0 if "q_proj" in module else 0.5)
            sent = view(opened[name], part)
            torch.testing.assert_close(
                sent, expected.to(dtype)[part.slices], rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6
            )


def test_adapters_travel_beside_the_weights_with_the_scale_in_b() -> None:
    geometry, shard, name = (
        with_adapters(MODEL, "o_proj"),
        Shard(0, 1),
        "decoder.layers.0.self_attention.linear_proj.weight",
    )
    parameter = cut_parameter(name, MODEL, shard, random_tensors(MODEL, torch.float32))
    a, b = (cut_parameter(n, geometry, shard, random_tensors(geometry, torch.float32)) for n in adapter_names(name))
    opened = SeparateAdapterSources([parameter], [a, b], geometry).open(bucket(name, a.name, b.name))
    assert torch.equal(opened[name], parameter.tensor.view(-1))
    assert torch.equal(opened[a.name], a.tensor.view(-1))
    assert torch.equal(opened[b.name], 1.5 * b.tensor.view(-1))
