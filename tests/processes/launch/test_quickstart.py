"""Run launch/quickstart.sh with stand-ins for Python, setup.sh and nvidia-smi.

Check the Python, the number of processes and the place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Called by name, it reports $DEVICES GPUs. It creates requested files, and prints how it trains.
PYTHON = """#!/bin/sh
case "$1" in
    -c) echo "${DEVICES:-0}" ;;
    */make_quickstart.py | tools/make_quickstart.py) mkdir -p "$3" ;;
    *) echo "$0 $*" ;;
esac
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with the CPU's .venv, which setup.sh would create."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", folder / "launch")
    program(folder / "launch" / "setup.sh", '#!/bin/sh\necho "setup of ${RLHF_MCORE_STACK:-nothing}"\n')
    program(folder / ".venv" / "bin" / "python", PYTHON.replace("${DEVICES:-0}", "0"))
    program(folder / ".venv" / "bin" / "rlhf-mcore", '#!/bin/sh\necho "rlhf-mcore $*"\n')
    return folder


def run(checkout: Path, folder: Path, *arguments: str, gpu: bool, **variables: str) -> subprocess.CompletedProcess[str]:
    tools = checkout.parent / "tools"
    program(tools / "nvidia-smi", f"#!/bin/sh\nexit {0 if gpu else 9}\n")
    known = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_MCORE_")}
    environment = known | {"PATH": f"{tools}:{os.environ['PATH']}"} | variables
    command = [str(checkout / "launch" / "quickstart.sh"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_without_a_gpu_it_installs_and_trains_as_configured(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout, tmp_path, "trainer.num_steps=5", gpu=False)
    assert done.returncode == 0, done.stderr
    assert "setup of cpu" in done.stdout and "has a GPU" not in done.stdout
    assert "\nrlhf-mcore train configs/quickstart/grpo.yaml trainer.num_steps=5\n" in done.stdout
    assert (checkout / "quickstart").is_dir()


def test_help_is_the_comment_of_the_script_and_installs_nothing(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout, tmp_path, "--help", gpu=False)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Installs what is missing") and done.stdout.endswith("configs/quickstart/grpo.yaml\n")


@pytest.mark.parametrize(("devices", "fits"), [("1", "actor.layout.tp=1 trainer.world_size=1 "), ("8", "")])
def test_where_there_is_a_stack_for_cuda_it_trains_with_that(
    checkout: Path, tmp_path: Path, devices: str, fits: str
) -> None:
    python = program(tmp_path / "cuda" / "python", PYTHON)
    done = run(checkout, tmp_path, "a=b", gpu=True, RLHF_MCORE_PYTHON=str(python), DEVICES=devices)
    assert done.returncode == 0, done.stderr
    assert "setup of" not in done.stdout
    assert f"\n{python} -m rlhf_mcore.cli.main train configs/quickstart/grpo.yaml {fits}a=b\n" in done.stdout


def test_a_gpu_without_such_a_stack_is_told_with_what_to_do(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout, tmp_path, gpu=True)
    assert done.returncode == 0, done.stderr
    assert "this machine has a GPU, but no Python with torch for CUDA" in done.stdout
    assert "docs/get-started/install.md#images" in done.stdout and "RLHF_MCORE_PYTHON=" in done.stdout
    assert "setup of cpu" in done.stdout and "\nrlhf-mcore train configs/quickstart/grpo.yaml\n" in done.stdout


def test_code_that_cannot_be_written_trains_where_the_caller_is(checkout: Path, tmp_path: Path) -> None:
    """The caller is user 10001 in the image. Root may write anywhere, so this test replaces the script's check for writing."""
    script = checkout / "launch" / "quickstart.sh"
    script.write_text(script.read_text().replace('[[ -w "$root" ]]', "[[ $root == . ]]"))
    (work := tmp_path / "workspace").mkdir()
    done = run(checkout, work, gpu=False)
    assert done.returncode == 0, done.stderr
    assert f"\nrlhf-mcore train {checkout}/configs/quickstart/grpo.yaml\n" in done.stdout
    assert (work / "quickstart").is_dir() and not (checkout / "quickstart").exists()
    script.write_text(script.read_text().replace("[[ -w . ]]", "false"))
    done = run(checkout, work, gpu=False)
    assert done.returncode == 1 and f"neither {checkout} nor {work} can be written" in done.stderr
