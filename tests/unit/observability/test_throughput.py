"""Check operations against published counts, and rates by hand."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry, WindowSizes
from rlhf_mcore.observability.throughput import ModelFlops, Throughput, peak_tflops
from rlhf_mcore.planning.counts import active_parameters, model_flops, mtp_flops
from rlhf_mcore.readers.model_files import read_geometry
from rlhf_mcore.trainer.work import StepWork, TrainedWork, counts
from tests.unit.parallel.world import world
from tests.unit.roles import lookup

__all__ = ["world"]
CONFIGS = Path(__file__).parents[3] / "configs" / "models"
pytestmark = pytest.mark.usefixtures("world")


def test_operations_of_a_dense_model_are_those_of_its_matrices() -> None:
    # Llama-3-8B: 32 layers of 4096 with 32 query and 8 key heads of 128 and an MLP of 14336, 128256 tokens, untied.
    found = model_flops(ModelGeometry("llama", 32, 4096, GroupedSizes(32, 8, 128), 14336, 128256, False))
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    norms = 65 * 4096  # one multiplication per weight too
    assert found == ModelFlops(2.0 * (32 * layer + norms), 4.0 * 32 * 4096, 2.0 * 4096 * 128256)


def test_of_a_mixture_only_the_experts_count_that_a_token_goes_to() -> None:
    # Qwen3-30B-A3B: 128 experts of 768, 8 per token. Its card counts 3.3B active parameters, including embedding and
    # output layer.
    geometry = ModelGeometry(
        "qwen3_moe", 48, 2048, GroupedSizes(32, 4, 128), 6144, 151936, False, experts=ExpertSizes(128, 768, 8)
    )
    found = model_flops(geometry)
    assert (found.token + 2 * found.logits) / 2 == pytest.approx(3.35e9, rel=0.01)


def test_layers_with_a_window_count_the_pairs_within_it() -> None:
    # gpt-oss-120b: 36 layers with 64 heads of 64. Every other layer has a window of 128.
    geometry = read_geometry(CONFIGS / "gpt-oss-120b")
    assert geometry.window == WindowSizes(128, tuple(range(0, 36, 2)))
    found, length = model_flops(geometry), 1000
    assert found.pair == found.window_pair == 18 * 4.0 * 64 * 64
    by_token = [(min(place + 1, 128), place + 1) for place in range(length)]  # pairs with and without a window
    pairs = sum(within + whole for within, whole in by_token)
    assert found.attention(np.array([float(length)])).tolist() == [18 * 4.0 * 64 * 64 * pairs]
    assert found.attention(np.array([100.0])).tolist() == [36 * 4.0 * 64 * 64 * 5050]


def test_of_a_gated_delta_net_the_state_counts_as_three_matrices() -> None:
    # Qwen3-Next-80B-A3B: 36 of 48 layers with a delta net of 32 value heads, with keys and values of 128.
    geometry = read_geometry(CONFIGS / "Qwen3-Next-80B-A3B")
    weights = 2.0 * (active_parameters(geometry) - 151936 * 2048)
    key, product, query = (2.0 * 128 * 128 for _ in range(3))  # a token reads the state, updates it, and reads it again
    assert len(geometry.delta_layers) == 36 and geometry.num_attention_layers == 12
    assert model_flops(geometry).token - weights == 36 * 32 * (key + product + query)


def test_of_a_state_space_the_state_counts_as_two_matrices() -> None:
    # Nemotron 3 Nano: 23 of 52 layers with a state space of 64 heads, with states of 64 x 128.
    geometry = read_geometry(CONFIGS / "Nemotron-3-Nano-30B-A3B")
    weights = 2.0 * (active_parameters(geometry) - 131072 * 2688)
    product, read = (2.0 * 64 * 128 for _ in range(2))  # a token is added to the state, and reads it
    assert geometry.num_attention_layers == 6
    assert model_flops(geometry).token - weights == 23 * 64 * (product + read)


def test_mtp_layers_that_learn_count_in_updates_alone() -> None:
    # 3 layers of 8 with 2 heads of 4 that share keys, 4 experts of 5 (2 per token) and a shared one, 11 tokens; 2 MTP layers.
    attention = GroupedSizes(2, 1, 4, has_qkv_bias=True)
    experts = ExpertSizes(4, 5, per_token=2, shared_ffn_size=5, dense_layers=(0,))
    geometry = ModelGeometry("glm4_moe", 3, 8, attention, 20, 11, False, experts=experts, mtp_layers=2)
    queries_keys_values, output = (8 * 8 + 8) + 2 * (8 * 4 + 4), 8 * 8
    layer = 2 * 8 + queries_keys_values + output + (4 * 8 + 4) + 3 * (3 * 8 * 5)  # norms, attention, router, experts
    projection = 8 + 8 + 16 * 8 + 8  # norms of both halves, 2h -> h, and the norm after the layer
    assert layer + projection == 772
    mtp = mtp_flops(geometry)
    assert mtp == ModelFlops(token=2.0 * 2 * 772, pair=2 * 4.0 * 2 * 4, logits=2 * 2.0 * 11 * 8)
    assert model_flops(geometry) == model_flops(geometry.trunk) and not any(astuple(mtp_flops(geometry.trunk)))
    trunk, throughput = ModelFlops(100.0, 10.0, 1.0), Throughput(num_devices=1)
    batch = lookup.batch(2)
    batch.lengths, batch.num_sampled = torch.tensor([3, 4]), torch.tensor([1, 2])
    StepWork(throughput, TrainedWork(trunk, 1, mtp)).count(batch, has_old_pass=True)
    found = throughput.pop({"timing/old_logprobs_s": 1.0, "timing/update_s": 1.0, "timing/step_s": 2.0})
    forward = 7 * 100 + 16 * 10 + 3 * 1  # 7 tokens, 16 pairs, 3 tokens sampled
    assert found["throughput/old_logprobs_tflops"] == pytest.approx(forward / 1e12)
    assert found["throughput/update_tflops"] == pytest.approx(3 * (forward + 7 * 3088 + 16 * 64 + 3 * 352) / 1e12)


def test_a_step_by_hand() -> None:
    """Rows of 3 and 4 tokens share a prompt of 2. Their tokens attend to 6 + 10 pairs, and generation computes the prompt once."""
    model = ModelFlops(token=100.0, pair=10.0, logits=1.0)
    throughput = Throughput(num_devices=2, peak_tflops=1e-9)  # a thousand operations per second
    work = StepWork(throughput, TrainedWork(model), reference=model, generates=True)
    batch = lookup.batch(2)
    batch.lengths, batch.num_sampled = torch.tensor([3, 4]), torch.tensor([1, 2])
    batch.group_ids = torch.zeros(2, dtype=torch.int64)
    assert model.attention(counts(batch.lengths, batch.num_sampled).lengths).tolist() == [60.0, 100.0]
    work.count(batch)
    forward = 7 * 100 + 16 * 10 + 3 * 1
    drawn = (7 - 2) * 100 + (16 - 3) * 10 + 3 * 1
    timing = {"timing/generate_s": 2.0, "timing/reference_s": 0.5, "timing/update_s": 1.5, "timing/evaluate_s": 9.0}
    found = throughput.pop(timing | {"timing/step_s": 13.0})
    assert found["throughput/generate_tokens_per_s"] == 1.5 and found["throughput/update_tokens_per_s"] == 7 / 1.5
    assert found["throughput/generate_tflops"] == pytest.approx(drawn / 2.0 / 1e12)
    assert found["throughput/reference_mfu"] == pytest.approx(forward / 0.5 / 2000)
    assert found["throughput/update_mfu"] == pytest.approx(3 * forward / 1.5 / 2000)
    assert found["throughput/mfu"] == pytest.approx((drawn + 4 * forward) / 4.0 / 2000)
    assert throughput.pop({"timing/step_s": 1.0}) == {}, "a step counts once"


def test_epochs_a_warm_up_and_a_pass_for_old_logprobs_count() -> None:
    model, critic = ModelFlops(100.0, 0.0, 0.0), ModelFlops(10.0, 0.0, 0.0)
    throughput = Throughput(num_devices=1)
    work = StepWork(throughput, TrainedWork(model, epochs=2), TrainedWork(critic, epochs=4))
    batch, timing = lookup.batch(2), {"timing/old_logprobs_s": 1.0, "timing/values_s": 1.0, "timing/update_s": 1.0}
    tokens = float(batch.lengths.sum())
    timing["timing/step_s"] = 3.0
    work.count(batch, has_old_pass=True)
    found = throughput.pop(timing)
    assert found["throughput/old_logprobs_tflops"] == pytest.approx(100 * tokens / 1e12)
    assert found["throughput/update_tflops"] == pytest.approx(3 * (2 * 100 + 4 * 10) * tokens / 1e12)
    assert not any(name.endswith("mfu") for name in found), "the peak of a CPU is not known"
    work.count(batch, learns=False)
    assert throughput.pop(timing)["throughput/update_tflops"] == pytest.approx(3 * 4 * 10 * tokens / 1e12)


def test_peaks_by_the_names_that_torch_has() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA H200", "")
    assert [peak_tflops(name) for name in names] == [989.0, 312.0, 756.0, 148.0, 989.0, None]
