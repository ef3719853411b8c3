"""Test ``rollout.vllm``: arguments of the installed vLLM's engine are checked before a start.

Arguments set by other keys are rejected.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore.config.schema import RolloutConfig, SamplingConfig
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.vllm.arguments import OWNED, vllm_arguments
from rlhf_mcore.rollout.vllm.limits import problem_of
from tests.unit.config.checking import check, only
from tests.unit.rollout.test_vllm_states import LLM, engine

# Our defaults that a user may replace.
REPLACED = {"block_size", "enable_prefix_caching", "mamba_ssm_cache_dtype"}


def test_every_argument_that_is_rejected_exists() -> None:
    """If the table kept an argument's old name, it would accept the new name of a renamed argument."""
    assert set(OWNED) <= set(vllm_arguments() or ())


@pytest.mark.parametrize("on_cuda", [False, True])
def test_no_argument_replaces_one_that_another_key_sets(on_cuda: bool) -> None:
    made = engine(LLM())
    made._on_cuda = on_cuda
    cfg = RolloutConfig(sampling=SamplingConfig(top_p=0.9), max_num_batched_tokens=64, quantization="fp8")
    model = EngineModel(
        "model", "model", "bf16", 128, 0, adapters={"q.lora_A.weight": (8, 64)}, images="images", max_images=1
    )
    assert set(made._options(cfg, model)) - REPLACED <= set(OWNED)


@pytest.mark.parametrize(
    "settings",
    [
        "{moe_backend: triton, all2all_backend: deepep_low_latency, enable_dbo: true}",
        "{kv_cache_dtype: fp8_e4m3, cudagraph_capture_sizes: [1, 2, 8], block_size: null, watermark: 0}",
        "{attention_backend: FLASHINFER, compilation_config: {mode: 3}, optimization_level: 2, additional_config: {a: [1]}}",
    ],
)
def test_arguments_reach_the_engine(workspace: Any, settings: str) -> None:
    assert check(f"rollout.vllm={settings}") == []
    made = engine(LLM())
    made._on_cuda = True
    given: dict[str, Any] = {"moe_backend": "triton", "block_size": 64}
    options = made._options(RolloutConfig(vllm=given), EngineModel("model", "model", "bf16", 128, seed=0))
    assert {name: options[name] for name in given} == given


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rollout.vllm.moe_bakend=triton", ["moe_bakend='triton'", "no such engine argument", "moe_backend?"]),
        ("rollout.vllm.zzz=1", ["rollout.vllm.zzz=1", "EngineArgs"]),
        ("rollout.vllm.moe_backend=tritn", ["moe_backend='tritn'", "'triton'", "'deep_gemm'"]),
        ("rollout.vllm={cudagraph_capture_sizes: [1, a]}", ["cudagraph_capture_sizes", "list[int]"]),
        ("rollout.vllm.enable_dbo=1", ["enable_dbo=1", "bool"]),
        ("rollout.vllm.tensor_parallel_size=2", ["tensor_parallel_size=2", "rollout.layout.tp", "remove"]),
        ("rollout.vllm.logprobs_mode=raw_logprobs", ["logprobs_mode", "rollout.sampling", "remove"]),
        ("rollout={engine: hf, vllm: {enable_dbo: true}, max_num_seqs: 8}", ["rollout.vllm", "rollout.engine"]),
    ],
)
def test_mistakes_are_named(workspace: Any, setting: str, words: list[str]) -> None:
    message = only(check(setting))
    assert all(word in message for word in words), message


def test_arguments_that_vllm_rejects_at_the_start_are_named() -> None:
    problem = problem_of("backend X\nneeds Y", {}, RolloutConfig(vllm={"moe_backend": "marlin"}), on_cuda=True)
    assert problem is not None and all(word in problem for word in ("rollout.vllm", "marlin", "X needs Y", "remove"))
