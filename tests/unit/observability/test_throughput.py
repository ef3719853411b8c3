"""Operations by the published counts, and rates by hand."""

from __future__ import annotations

import pytest
import torch

from rlhf_mcore.observability.throughput import ModelFlops, Throughput, peak_tflops
from rlhf_mcore.planning.weights import model_flops
from rlhf_mcore.trainer.work import StepWork, TrainedWork, counts
from rlhf_mcore.types import ModelGeometry
from tests.unit.parallel.world import world
from tests.unit.roles import lookup

__all__ = ["world"]
pytestmark = pytest.mark.usefixtures("world")


def test_operations_of_a_dense_model_are_those_of_its_matrices() -> None:
    # Llama-3-8B: 32 layers of 4096 with 32 and 8 heads of 128 and an MLP of 14336, 128256 words, not tied.
    found = model_flops(ModelGeometry("llama", 32, 4096, 32, 8, 128, 14336, 128256, False))
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    norms = 65 * 4096  # a multiplication a weight too
    assert found == ModelFlops(2.0 * (32 * layer + norms), 4.0 * 32 * 4096, 2.0 * 4096 * 128256)


def test_of_a_mixture_only_the_experts_count_that_a_token_goes_to() -> None:
    # Qwen3-30B-A3B: 128 experts of 768, 8 for a token. Its card has 3.3B active parameters, embedding and output layer among them.
    geometry = ModelGeometry("qwen3_moe", 48, 2048, 32, 4, 128, 6144, 151936, False, 128, 768, experts_per_token=8)
    found = model_flops(geometry)
    assert (found.token + 2 * found.logits) / 2 == pytest.approx(3.35e9, rel=0.01)


def test_a_step_by_hand() -> None:
    """Rows of 3 and 4 tokens of one prompt with 2: 10 tokens attend to 6 + 10 pairs, and the prompt is drawn from once."""
    model = ModelFlops(token=100.0, pair=10.0, logits=1.0)
    throughput = Throughput(num_devices=2, peak_tflops=1e-9)  # a thousand operations a second
    work = StepWork(throughput, TrainedWork(model), reference=model, generates=True)
    batch = lookup.batch(2)
    batch.lengths, batch.num_sampled = torch.tensor([3, 4]), torch.tensor([1, 2])
    batch.group_ids = torch.zeros(2, dtype=torch.int64)
    assert counts(batch.lengths, batch.num_sampled).pairs == 16.0
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
