"""Models and settings that vLLM does not compute on this processor are rejected before processes start."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore.cli import main as main_module


@pytest.mark.parametrize(
    ("instructions", "quantization", "missing"),
    [
        ("avx2 avx512f avx512_bf16 amx_tile", "fp8", ""),
        ("avx2 avx512f avx512_bf16", "fp8", "amx_tile"),
        ("avx2 avx512f amx_tile", "fp8", "avx512_bf16"),
        ("avx2", "fp8", "amx_tile and avx512_bf16"),
        ("avx2", "int8", ""),
        ("avx2", "null", ""),
    ],
)
def test_fp8_is_rejected_on_a_processor_without_its_instructions(
    workspace: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    instructions: str,
    quantization: str,
    missing: str,
) -> None:
    launches: list[Any] = []
    monkeypatch.setattr("rlhf_mcore.cli.launch.launch", lambda *given, **more: launches.append(given) or 0)
    monkeypatch.setattr("rlhf_mcore.rollout.vllm.limits.has_gpu", lambda: False)
    monkeypatch.setattr("rlhf_mcore.cli.preflight.has_gpu", lambda: False)
    monkeypatch.setattr("rlhf_mcore.rollout.vllm.limits.processor", lambda: f"Maker model {instructions}")
    overrides = ["trainer.prompts_per_step=1", f"rollout.quantization={quantization}"]
    code = main_module.main(["train", "run.yaml", *overrides])
    error = capsys.readouterr().err
    assert (code, len(launches)) == ((2, 0) if missing else (0, 1)), error
    assert [word in error for word in ("rollout.quantization=fp8", f"lacks {missing};", "int8")] == [bool(missing)] * 3
