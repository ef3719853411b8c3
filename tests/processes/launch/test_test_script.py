"""launch/test.sh and the plug-ins of conftest.py in a small checkout: tiers, shards, results."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine_speed import scale_seconds
from tests.tiers import assign_shards

ROOT = Path(__file__).resolve().parents[3]
UNIT = """
import pytest

def test_passes(): pass
@pytest.mark.full
def test_fails(): assert False
@pytest.fixture(scope="module")
def world(): raise ValueError("rank 2 ran out of memory")
@pytest.mark.ci
@pytest.mark.parametrize("cell", range(3))
def test_needs_the_world(world, cell): pass
@pytest.mark.skip(reason="needs a GPU")
def test_is_skipped(): pass
"""
E2E = """
import os, pytest

@pytest.mark.ci
def test_ends_pytest(): os._exit(9)
@pytest.mark.ci
def test_comes_after(): pass
"""
SLURM = "def test_has_the_directorys_tier(): pass"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script with stand-ins for lint, and these tests."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "launch").mkdir()
    for name in ("test.sh", "common.sh", "env.sh"):
        shutil.copy(ROOT / "launch" / name, folder / "launch" / name)
    shutil.copytree(ROOT / "tools", folder / "tools")
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    python = f'PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTEST_PLUGINS=xdist.plugin,pytest_timeout exec {sys.executable} "$@"'
    for name, script in {
        "ruff": "true",
        "mypy": "false",
        "lint-imports": "true",
        "python": python,
        "nproc": "echo 1",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (folder / "launch" / "setup.sh").write_text("#!/bin/sh\n")
    (folder / "launch" / "setup.sh").chmod(0o755)
    shutil.copy(ROOT / "conftest.py", folder / "conftest.py")
    for name in ("tiers", "costs", "one_failure", "machine_speed", "commands"):
        (folder / "tests").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / f"{name}.py", folder / "tests" / f"{name}.py")
    for tier in ("gpu", "unit", "oracles", "processes", "distributed", "e2e", "slurm"):
        (folder / "tests" / tier).mkdir()
    (folder / "contrib").mkdir()
    for tier, text in {"unit": UNIT, "e2e": E2E, "slurm": SLURM}.items():
        (folder / "tests" / tier / f"test_{tier}.py").write_text(text)
    return folder


def run(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    """Returns the exit code and the lines of the result."""
    command = [
        "env",
        "-u",
        "RLHF_MCORE_TEST_REPORTS",
        "RLHF_MCORE_TEST_SLOWNESS=1",
        str(checkout / "launch" / "test.sh"),
        *arguments,
    ]
    done = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=scale_seconds(300), check=False
    )
    lines = done.stdout.splitlines()
    assert "== result ==" in lines, done.stdout + done.stderr
    return done.returncode, lines[lines.index("== result ==") + 1 :]


def test_the_default_tier_runs_lint_and_counts_it(checkout: Path) -> None:
    code, lines = run(checkout)
    assert lines == ["FAILED: mypy", "SKIPPED 1: needs a GPU", "1 passed, 1 failed, 1 skipped"] and code == 1


def test_a_broken_fixture_and_a_dead_worker_are_one_failure_each(checkout: Path) -> None:
    code, lines = run(checkout, "--tiers", "ci")
    assert code == 1 and lines[-1] == "2 passed, 2 failed, 2 skipped"
    first, second = sorted(line for line in lines if line.startswith("FAILED tests"))
    assert "test_ends_pytest" in first and "crashed" in first
    assert "test_needs_the_world[0]" in second and "rank 2 ran out of memory" in second
    (skipped,) = [line for line in lines if line.startswith("SKIPPED")]
    assert "world failed" in skipped and "test_needs_the_world[0]" in skipped


def test_every_test_of_tier_full_is_in_one_shard(checkout: Path) -> None:
    outcomes = [run(checkout, "--full", "--shard", f"{shard}/2") for shard in (1, 2)]
    assert sorted((code, lines[-1]) for code, lines in outcomes) == [
        (0, "0 passed, 0 failed"),
        (1, "0 passed, 1 failed"),
    ]


def test_shards_are_balanced_by_durations() -> None:
    assert assign_shards({"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0, "e": 1.0}, 2) == {
        "a": 1,
        "b": 2,
        "c": 2,
        "d": 1,
        "e": 1,
    }


@pytest.mark.parametrize("wrong", [("--tier", "fast"), ("--shard", "0/4"), ("--shard", "5/4"), ("--shard", "2")])
def test_a_wrong_choice_is_named(checkout: Path, wrong: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "tests/slurm", *wrong]
    done = subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=scale_seconds(120), check=False
    )
    assert done.returncode == 4 and f"{wrong[0]}={wrong[1]}" in done.stderr + done.stdout
