"""Reject a model that vLLM does not support on a CPU, and a cache too small for a response, before a process starts."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli import preflight
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.rollout.vllm import limits

SIZES = ["data.max_prompt_tokens=64", "rollout.sampling.max_new_tokens=192"]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (preflight, limits):
        monkeypatch.setattr(module, "has_gpu", lambda: False)


def problem(*overrides: str) -> str | None:
    try:
        preflight.check_engine(resolve(load_config("run.yaml", [*SIZES, *overrides])))
    except ConfigError as error:
        return str(error)
    return None


def heads(workspace: Any, size: int, **changes: Any) -> None:
    workspace.write_hf_config(
        head_dim=size, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, **changes
    )


@pytest.mark.parametrize("size", [16, 48, 100])
def test_heads_that_vllm_has_no_kernel_for_are_named(workspace: Any, size: int) -> None:
    heads(workspace, size)
    assert f"model.path=model has head_dim={size}; set rollout.engine=hf" in str(problem())
    assert problem("rollout.engine=hf") is None


@pytest.mark.parametrize("size", [32, 64, 128])
def test_usual_heads_pass(workspace: Any, size: int) -> None:
    heads(workspace, size)
    assert problem() is None


def test_the_sizes_are_those_of_the_installed_vllm() -> None:
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(vllm.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py").read_text()
    [sizes] = re.findall(r"def get_supported_head_sizes\(cls\) -> list\[int\]:\s+return \[([\d, ]+)\]", source)
    assert tuple(map(int, sizes.split(","))) == limits.CPU_HEAD_SIZES


def test_a_cache_that_holds_no_response_is_refused(workspace: Any) -> None:
    """A token takes 2 x 4 layers x 2 heads x 64 numbers of 4 bytes, 4,096 bytes. 256 tokens take 1 MiB."""
    heads(workspace, 64)
    assert problem(f"rollout.kv_cache_gib={1.01 / 1024}") is None
    assert "does not hold one prompt and response of rollout.max_model_len=256 tokens, which take 0.000977 GiB" in str(
        problem(f"rollout.kv_cache_gib={0.99 / 1024}")
    )
    assert problem(f"rollout.kv_cache_gib={0.51 / 1024}", "model.dtype=bf16") is None
    assert problem(f"rollout.kv_cache_gib={0.51 / 1024}", "rollout.layout.tp=2") is None
    assert "rollout.max_model_len=1024" in str(
        problem(f"rollout.kv_cache_gib={1.01 / 1024}", "rollout.max_model_len=1024")
    )


@pytest.mark.parametrize("key", ["pp", "dp"])
def test_what_engines_of_stages_or_groups_do_not_record_is_named(workspace: Any, key: str) -> None:
    heads(
        workspace,
        64,
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    layout = f"rollout.layout.{key}=2"
    assert problem(layout) is None
    for other, named in (
        ("rollout.sampling.top_k=5", "rollout.sampling.top_p below 1 or top_k"),
        ("actor.router_replay=rollout", "actor.router_replay=rollout"),
    ):
        assert f"{layout} is not supported with {named}; set it to 1" in str(problem(layout, other))
    for quantization in ("fp8", "int8"):
        assert problem(layout, f"rollout.quantization={quantization}") is None


def test_layers_with_windows_need_less(workspace: Any) -> None:
    heads(workspace, 64, sliding_window=8)
    assert problem(f"rollout.kv_cache_gib={0.1 / 1024}") is None
    heads(workspace, 64, sliding_window=8, use_sliding_window=False)
    assert problem(f"rollout.kv_cache_gib={0.1 / 1024}") is not None
