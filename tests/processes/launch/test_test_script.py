"""The last line of launch/test.sh, which is what continuous integration shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
UNIT = """
import pytest, os

def test_passes(): pass
def test_passes_too(): pass
def test_fails(): assert False
@pytest.fixture
def broken(): raise ValueError
def test_is_an_error(broken): pass
@pytest.mark.skip
def test_is_skipped(): pass
"""
SKIPPED = "import pytest\n@pytest.mark.skip(reason='needs a GPU')\ndef test_needs_a_gpu(): pass\n"
KILLED = "import os\ndef test_ends_pytest(): os._exit(9)\ndef test_comes_after(): pass\n"


def run(folder: Path, lint: str, tiers: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The script in a checkout of its own, whose tools and tests are these."""
    (folder / "launch").mkdir()
    for name in ("test.sh", "common.sh", "env.sh"):
        shutil.copy(ROOT / "launch" / name, folder / "launch" / name)
    shutil.copytree(ROOT / "tools", folder / "tools")
    bin_folder = folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    python = f'PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=xdist.plugin exec {sys.executable} "$@"'
    programs = {"ruff": lint, "mypy": "true", "lint-imports": "true", "python": python, "nproc": "echo 0"}
    for name, script in programs.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (bin_folder / name).chmod(0o755)
    (folder / "launch" / "setup.sh").write_text("#!/bin/sh\n")
    (folder / "launch" / "setup.sh").chmod(0o755)
    for tier in ("unit", "distributed", "e2e", "slurm", "gpu"):
        (folder / "tests" / tier).mkdir(parents=True)
        if tier in tiers:
            (folder / "tests" / tier / f"test_{tier}.py").write_text(tiers[tier])
    script = str(folder / "launch" / "test.sh")
    return subprocess.run([script], cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("lint", "tiers", "last", "code"),
    [
        (
            "true",
            {"unit": UNIT, "gpu": SKIPPED},
            [
                "FAILED tests/unit/test_unit.py::test_fails: assert False",
                'FAILED tests/unit/test_unit.py::test_is_an_error: failed on setup with "ValueError"',
                "SKIPPED 1: needs a GPU",
                "SKIPPED 1: unconditional skip",
                "2 passed, 2 failed, 2 skipped",
            ],
            1,
        ),
        (
            "true",
            {"unit": "def test_passes(): pass", "gpu": SKIPPED},
            ["SKIPPED 1: needs a GPU", "1 passed, 0 failed, 1 skipped"],
            0,
        ),
        (
            "false",
            {"unit": "def test_passes(): pass", "e2e": KILLED},
            [
                "FAILED tests/e2e/test_e2e.py::test_ends_pytest: failed on setup with \"worker 'gw0' crashed while running "
                "'tests/e2e/test_e2e.py::test_ends_pytest'\"",
                "2 passed, 2 failed",
            ],
            1,
        ),
        (
            "true",
            {"unit": KILLED},
            ["    collected 2 items", "    ", "    tests/unit/test_unit.py ", "0 passed, 1 failed"],
            1,
        ),
    ],
)
def test_the_last_lines_name_every_failure_and_add_up_all_tiers(
    tmp_path: Path, lint: str, tiers: dict[str, str], last: list[str], code: int
) -> None:
    done = run(tmp_path, lint, tiers)
    assert done.stdout.splitlines()[-len(last) :] == last, done.stdout + done.stderr
    assert done.returncode == code
    summaries = [line for line in done.stdout.splitlines() if line.startswith("=") and " in " in line]
    assert (
        not summaries or "skipped" not in summaries[-1] or "passed" in summaries[-1]
    )  # the last one is not of a tier that was skipped
