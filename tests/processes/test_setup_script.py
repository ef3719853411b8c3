"""Run launch/setup.sh with a stand-in for Python, pip and uv that records its calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Answers `-c`, `--version`, `-m venv [--clear] DIR` and `-m pip ...`; as bin/uv it fails while the file $FAIL exists.
STAND_IN = r"""#!/usr/bin/env bash
case "$*" in
    *torch.__version__*) echo "${TORCH:-2.13.0a0+1f2e.nv26.07}" ;;
    *ctypes.CDLL*) exit "${LOADS:-0}" ;;
    -c*) exit 0 ;;
    --version) echo "Python 3.11.0" ;;
    "-m pip config"*) exit 1 ;;
    "-m venv"*)
        echo "venv $*" >>"$CALLS"
        venv="${@: -1}"
        if [[ "$*" == *--clear* ]]; then rm -rf "$venv"; fi
        mkdir -p "$venv/bin"
        cp "$0" "$venv/bin/python"
        cp "$0" "$venv/bin/uv"
        ;;
    *)
        echo "$*" >>"$CALLS"
        if [[ "$0" == */uv && -e "$FAIL" ]]; then echo "no such package" >&2; exit 3; fi
        if [[ "$*" =~ --target\ (.*)\ -r ]]; then mkdir -p "${BASH_REMATCH[1]}"; fi
        ;;
esac
"""


class Checkout:
    """A copy of the files that setup.sh reads, in a folder with a space in its name, with the stand-in as PYTHON."""

    def __init__(self, base: Path) -> None:
        self.root = base / "a checkout"
        for name in ("launch", "requirements"):
            shutil.copytree(ROOT / name, self.root / name)
        shutil.copy(ROOT / "setup.py", self.root)
        self.calls_file, self.fail_file = base / "calls", base / "fail"
        self.python = base / "python3.11"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)
        self.stamp = self.root / ".venv" / ".rlhf_mcore.stamp"

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        own = {"PYTHON": str(self.python), "CALLS": str(self.calls_file), "FAIL": str(self.fail_file)}
        command = [str(self.root / "launch" / "setup.sh"), *arguments]
        variables = clean | own | environment
        return subprocess.run(command, env=variables, capture_output=True, text=True, cwd="/", timeout=60)

    def calls(self) -> list[str]:
        """Return the calls since the previous read."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_installs_torch_then_the_lock_then_the_package(checkout: Checkout) -> None:
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    venv, bootstrap, torch, lock, oracles, package = checkout.calls()
    assert venv.startswith("venv ") and "--clear" not in venv
    assert "--require-hashes" in bootstrap and bootstrap.endswith("requirements/bootstrap.lock")
    assert torch.endswith("--no-deps torch==2.13.0+cpu")
    assert "--no-deps" in lock and "--require-hashes" in lock and lock.endswith("requirements/cpu.lock")
    assert "--no-deps" in oracles and "--require-hashes" in oracles and oracles.endswith("requirements/oracles.lock")
    assert f"--target {checkout.root}/.venv/oracles" in oracles
    assert "--no-deps" in package and "--no-build-isolation" in package
    assert package.endswith(f"--editable {checkout.root}")
    assert checkout.stamp.is_file()


def test_second_run_does_nothing(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    done = checkout.setup()
    assert (done.returncode, done.stdout, done.stderr, checkout.calls()) == (0, "", "", [])


@pytest.mark.parametrize("name", ["requirements/cpu.lock", "requirements/oracles.lock", "setup.py"])
def test_a_changed_lock_or_setup_installs_again(checkout: Checkout, name: str) -> None:
    checkout.setup()
    checkout.calls()
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.setup().returncode == 0
    assert len(checkout.calls()) == 6


def test_a_failure_exits_with_its_cause_and_leaves_no_stamp(checkout: Checkout) -> None:
    checkout.fail_file.touch()
    done = checkout.setup()
    assert done.returncode == 3
    assert "no such package" in done.stderr and "setup: failed" in done.stderr
    assert not checkout.stamp.exists()


def test_after_a_failure_the_environment_is_made_anew(checkout: Checkout) -> None:
    checkout.fail_file.touch()
    checkout.setup()
    checkout.calls()
    checkout.fail_file.unlink()
    assert checkout.setup().returncode == 0
    assert "--clear" in checkout.calls()[0]
    assert checkout.stamp.is_file()


def test_a_failed_update_takes_the_old_stamp_away(checkout: Checkout) -> None:
    checkout.setup()
    (checkout.root / "setup.py").write_text("# changed\n")
    checkout.fail_file.touch()
    assert checkout.setup().returncode == 3
    assert not checkout.stamp.exists()


def test_trl_is_installed_into_a_folder_of_its_own(checkout: Checkout) -> None:
    """The folder contains neither PEFT nor torchvision, because transformers would import them."""
    assert checkout.setup("--with", "bench").returncode == 0
    *stack, bench = checkout.calls()
    assert len(stack) == 6 and f"--target {checkout.root}/.venv/bench" in bench and "--require-hashes" in bench
    assert checkout.setup("--with", "bench").returncode == 0
    assert checkout.calls() == []
    locked = {line.partition("==")[0] for line in (ROOT / "requirements" / "bench.lock").read_text().splitlines()}
    assert "trl" in locked and not locked & {"peft", "torchvision"}
    refused = checkout.setup("--with", "trl")
    assert refused.returncode == 1 and "--with bench" in refused.stderr


def test_settings_of_pip_are_handed_to_uv(checkout: Checkout) -> None:
    spy = 'echo "links=$UV_FIND_LINKS index=$UV_DEFAULT_INDEX extra=$UV_INDEX" >>"$CALLS"\n'
    checkout.python.write_text(STAND_IN.replace("case", f'if [[ "$0" == */uv ]]; then {spy}fi\ncase', 1))
    done = checkout.setup(PIP_FIND_LINKS="/a /b", PIP_INDEX_URL="http://index", PIP_EXTRA_INDEX_URL="http://x http://y")
    assert done.returncode == 0, done.stderr
    assert "links=/a,/b index=http://index extra=http://x http://y" in checkout.calls()


def test_missing_python_is_said_with_the_remedy(checkout: Checkout, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "uname", "cat", "sha256sum", "cut", "flock"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    done = checkout.setup(PATH=str(tools), PYTHON="python3.11")
    assert done.returncode == 1
    assert "error: no usable Python 3.11" in done.stderr and "PYTHON=/path/to/python3.11" in done.stderr
    assert not (checkout.root / ".venv").exists()


def test_the_gpu_stack_goes_on_the_containers_torch(checkout: Checkout) -> None:
    done = checkout.setup(RLHF_MCORE_STACK="gpu", PIP_CONSTRAINT="/etc/pip/constraint.txt")
    assert done.returncode == 0, done.stderr
    venv, bootstrap, lock, vllm, package = checkout.calls()
    assert "--system-site-packages" in venv
    assert bootstrap.endswith("requirements/bootstrap.lock")
    assert "--require-hashes" in lock and lock.endswith("requirements/gpu.lock")
    assert "--require-hashes" in vllm and vllm.endswith("requirements/vllm.lock") and "--only-binary vllm" in vllm
    assert package.endswith(f"--editable {checkout.root}")
    assert checkout.setup(RLHF_MCORE_STACK="gpu").stdout == ""


def test_a_vllm_whose_wheel_does_not_load_is_built(checkout: Checkout) -> None:
    done = checkout.setup(RLHF_MCORE_STACK="gpu", LOADS="1")
    assert done.returncode == 0, done.stderr
    *_, wheel, source, _ = checkout.calls()
    assert "--only-binary vllm" in wheel
    assert "--no-build-isolation --no-binary vllm --reinstall-package vllm" in source and "--require-hashes" in source


@pytest.mark.parametrize("torch", ["2.12.1+cu130", "2.13.1+cpu is a build without CUDA"])
def test_another_torch_than_that_of_the_container_is_refused(checkout: Checkout, torch: str) -> None:
    done = checkout.setup(RLHF_MCORE_STACK="gpu", TORCH=torch.partition(" is ")[2] or torch)
    assert done.returncode == 1
    assert "vLLM of requirements/gpu.in is for torch 2.13 with CUDA" in done.stderr and "container" in done.stderr
    assert not checkout.stamp.exists()


def test_libraries_that_lack_something_do_not_load(tmp_path: Path) -> None:
    """setup.sh's check rejects a vLLM with an unusable library. The installed vLLM loads."""
    setup = (ROOT / "launch" / "setup.sh").read_text(encoding="utf-8")
    check = re.search(r"vllm_loads\(\) \{\n *\S+ -c '(.*?)'\n\}", setup, re.DOTALL)
    assert check is not None

    def loads(folder: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": folder}
        return subprocess.run(
            [sys.executable, "-c", check[1]], env=environment, capture_output=True, text=True, timeout=120
        )

    assert (done := loads("")).returncode == 0, done.stderr
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_C.abi3.so").write_text("no library")
    done = loads(str(tmp_path))
    assert (
        done.returncode == 1
        and done.stderr.startswith("_C.abi3.so: ")
        and done.stderr.endswith("_C.abi3.so does not load\n")
    )
    # The library was built for another torch and lacks a symbol. Only a third-party library has a replacement in vLLM.
    needy = tmp_path / "needy.c"
    needy.write_text("extern int of_another_torch(void); int call(void) { return of_another_torch(); }")
    place = tmp_path / "vllm" / "third_party" / "deep_gemm"
    place.mkdir(parents=True)
    library = place / "_C_extension.abi3.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(needy)], check=True)
    shutil.copy(library, tmp_path / "vllm" / "_C.abi3.so")
    assert loads(str(tmp_path)).returncode == 1 and library.exists()
    (tmp_path / "vllm" / "_C.abi3.so").unlink()
    done = loads(str(tmp_path))
    assert done.returncode == 0 and "third_party/deep_gemm/_C_extension.abi3.so is set aside" in done.stdout
    assert "of_another_torch" in done.stderr and [path.name for path in place.iterdir()] == [f"{library.name}.aside"]
    assert (done := loads(str(tmp_path))).returncode == 0 and not done.stdout


@pytest.mark.parametrize("stack", ["", "cpu"])
def test_a_machine_with_a_gpu_is_told_that_the_cpu_stack_does_not_use_it(
    checkout: Checkout, tmp_path: Path, stack: str
) -> None:
    (tmp_path / "tools").mkdir()
    (smi := tmp_path / "tools" / "nvidia-smi").write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    done = checkout.setup(PATH=f"{smi.parent}:{os.environ['PATH']}", RLHF_MCORE_STACK=stack)
    assert done.returncode == 0, done.stderr
    assert ("this machine has a GPU" in done.stdout and "RLHF_MCORE_STACK=gpu" in done.stdout) == (stack == "")


def test_changing_the_stack_installs_again(checkout: Checkout) -> None:
    checkout.setup()
    assert "setup: done" in checkout.setup(RLHF_MCORE_STACK="gpu").stdout


def test_an_unknown_stack_is_refused(checkout: Checkout) -> None:
    done = checkout.setup(RLHF_MCORE_STACK="tpu")
    assert (done.returncode, done.stderr) == (
        1,
        "error: RLHF_MCORE_STACK=tpu is not a choice; it is cpu or gpu\n",
    )
