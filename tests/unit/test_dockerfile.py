"""Check that the image installs only with launch/setup.sh, runs without root, and uses the doctor as its health check."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.version import Version

from rlhf_mcore.commands.doctor import command as doctor

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "launch" / "setup.sh").read_text(encoding="utf-8")


@dataclass
class Stage:
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction, arguments

    def of(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.steps if name == instruction]

    def position(self, instruction: str, part: str) -> int:
        return next(i for i, (name, text) in enumerate(self.steps) if name == instruction and part in text)


def stages() -> dict[str, Stage]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    found: dict[str, Stage] = {}
    defaults: dict[str, str] = {}
    current: Stage | None = None
    for line in filter(None, lines):
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            base, _, stage = arguments.partition(" AS ")
            current = found[stage] = Stage(defaults[base.strip("${}")])
        elif current is None:
            key, _, value = arguments.partition("=")
            defaults[key] = value
        else:
            current.steps.append((name, " ".join(arguments.split())))
    return found


STAGES = stages()


def test_there_is_an_image_for_each_stack_and_the_last_one_is_for_gpus() -> None:
    assert list(STAGES) == ["cpu", "gpu"]
    for name, stage in STAGES.items():
        assert any(f"RLHF_MCORE_STACK={name}" in text for text in stage.of("ENV"))
        assert re.search(rf"^    {name}\) version=", SETUP, re.MULTILINE), "setup.sh knows this stack"
        assert re.fullmatch(r"[a-z./]+:\d[\w.-]+", stage.base), "a base image has a fixed version"


@pytest.mark.parametrize("name", STAGES)
def test_setup_sh_alone_installs(name: str) -> None:
    stage = STAGES[name]
    installing = [text for text in stage.of("RUN") if re.search(r"pip|uv |conda|setup\.sh|setup\.py", text)]
    assert installing == ["./launch/setup.sh"]
    assert not stage.of("ADD")


@pytest.mark.parametrize("name", STAGES)
def test_what_setup_sh_reads_is_there_before_it_runs(name: str) -> None:
    stage = STAGES[name]
    run = stage.position("RUN", "./launch/setup.sh")
    copied = {word for instruction, text in stage.steps[:run] if instruction == "COPY" for word in text.split()[:-1]}
    read = set(re.findall(r"requirements/[\w.]+|setup\.py|launch/\w+\.sh", SETUP))
    assert {"setup.py", "requirements/gpu.lock", "launch/common.sh"} <= read
    assert {path.partition("/")[0] for path in read} <= copied
    assert {"README.md", "rlhf_mcore/__init__.py"} <= copied, "setup.py reads them"
    assert all((ROOT / path).exists() for path in copied)
    assert run < stage.position("COPY", ". ."), "a change of the code does not install everything again"


def test_the_gpu_container_gets_what_its_python_lacks_before_setup_runs() -> None:
    """Ubuntu's Python contains venv and ensurepip only with an extra package."""
    gpu = STAGES["gpu"]
    assert gpu.position("RUN", "python3-venv") < gpu.position("RUN", "./launch/setup.sh")
    # An ARG of this name would be ignored, because the container has an environment variable of the same name.
    assert any('TORCH_CUDA_ARCH_LIST="${CUDA_ARCHITECTURES}"' in text for text in gpu.of("ENV"))
    assert not [text for text in gpu.of("ARG") if text.startswith("TORCH_CUDA_ARCH_LIST")]


# Requirements for building vLLM 0.32. Its Rust program is optional: setuptools-rust skips it without a compiler.
OF_APT = {
    "git": "CMake fetches CUTLASS, FlashAttention, FlashMLA and others (GIT_REPOSITORY)",
    "g++": "compiles the host code of the kernels",
    "python3-dev": "find_package(Python COMPONENTS Development.Module Development.SABIModule)",
}
OF_PIP = ["cmake", "jinja2", "ninja", "packaging", "setuptools", "setuptools-rust", "setuptools-scm", "wheel"]


def test_a_vllm_can_be_built_from_source_in_the_gpu_image() -> None:
    """The stage contains the requirements of ``--no-binary vllm --no-build-isolation``.

    CUDA and torch come from the container.
    """
    assert "--no-build-isolation --no-binary vllm" in SETUP
    gpu = STAGES["gpu"]
    before = gpu.steps[: gpu.position("RUN", "./launch/setup.sh")]
    (install,) = [text for name, text in before if name == "RUN" and "apt-get install" in text]
    assert OF_APT.keys() <= set(install.split())
    locked = (ROOT / "requirements" / "gpu.lock").read_text(encoding="utf-8")
    assert set(OF_PIP) <= set(re.findall(r"^([\w-]+)==", locked, re.MULTILINE))


def test_compiled_kernels_of_the_gpu_image_are_on_a_volume() -> None:
    """vLLM stores DeepGEMM's kernels under VLLM_CACHE_ROOT, and FlashInfer its own under .cache of FLASHINFER_WORKSPACE_BASE."""
    gpu = STAGES["gpu"]
    places = dict(
        word.split("=") for text in gpu.of("ENV") for word in text.split() if "CACHE" in word or "WORKSPACE" in word
    )
    kept = {name: Path(places[name]) for name in ("VLLM_CACHE_ROOT", "FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR")}
    assert "/cache" in gpu.of("VOLUME")
    assert all(place.is_relative_to("/cache") for place in kept.values())
    assert gpu.position("RUN", "--owner rlhf /workspace /cache") < gpu.position("VOLUME", "/cache")


def test_gated_delta_nets_have_kernels_in_the_gpu_image() -> None:
    """flash-linear-attention provides the kernels. From release 0.6 on, tilelang computes the backward pass on Hopper."""
    locked = (ROOT / "requirements" / "gpu.lock").read_text(encoding="utf-8")
    versions = dict(re.findall(r"^([\w-]+)==([\d.]+)", locked, re.MULTILINE))
    assert Version(versions["fla-core"]) >= Version("0.6") and "tilelang" in versions
    assert "transformers" in versions and "triton" not in versions  # the container provides triton


def test_nothing_that_setup_needs_is_left_out_of_the_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {"setup.py", "requirements", "launch", "rlhf_mcore", "README.md", "pyproject.toml"}.intersection(ignored)
    assert {".git", ".venv"} <= set(ignored)


def test_the_bases_have_the_python_of_the_locks() -> None:
    versions = dict(re.findall(r"^    (cpu|gpu)\) version=([\d.]+)", SETUP, re.MULTILINE))
    assert STAGES["cpu"].base.startswith(f"python:{versions['cpu']}-")
    assert f"--python-version {versions['gpu']} " in (ROOT / "launch" / "lock.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", STAGES)
def test_it_runs_as_a_user_and_asks_the_doctor(name: str) -> None:
    stage = STAGES[name]
    (user,) = stage.of("USER")
    assert int(user) > 0
    (check,) = stage.of("HEALTHCHECK")
    assert stage.position("USER", user) < stage.position("HEALTHCHECK", "CMD")
    command = json.loads(check.partition("CMD ")[2])
    assert command[:2] == ["rlhf-mcore", "doctor"]
    args = doctor._parser().parse_args(command[2:])
    assert args.quick and args.run_dir == stage.of("VOLUME")[0]


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([program, "--no-color", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
