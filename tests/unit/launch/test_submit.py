"""The scripts for SLURM as far as they go without it: what they would submit, and what they refuse."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "launch" / "slurm"
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), *sorted(SLURM.iterdir()), ROOT / ".ci" / "run"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a b.yaml").write_text("")
    return tmp_path


def dry_run(folder: Path, *arguments: str, script: str = "submit.sh") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SLURM / script), *arguments, "--dry-run"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def submitted(folder: Path, *arguments: str) -> list[str]:
    done = dry_run(folder, "a b.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_the_command_of_a_job(folder: Path) -> None:
    options = [
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--time",
        "1-00:00:00",
        "--signal-before",
        "600",
        "--partition=big",
    ]
    words = submitted(folder, *options, "data.train=[x y.jsonl]", "experiment=$(echo no)")
    script = words.index(str(SLURM / "train.sbatch"))
    assert words[0] == "sbatch"
    assert {"--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=1", "--time=1-00:00:00"} <= set(words[:script])
    assert {"--signal=B:USR1@600", "--partition=big", "--job-name=a b"} <= set(words[:script])
    # ROOT RANKS_PER_NODE MAX_REQUEUES CONTAINER CONFIG OVERRIDES, and nothing was split or evaluated on the way
    assert words[script + 1 :] == [
        str(ROOT),
        "8",
        "20",
        "",
        "a b.yaml",
        "data.train=[x y.jsonl]",
        "experiment=$(echo no)",
    ]


def test_a_container_and_an_array(folder: Path) -> None:
    words = submitted(
        folder,
        *[
            "--ranks-per-node",
            "2",
            "--time",
            "5",
            "--container",
            "my.sif",
            "--array",
            "0-3%2",
            "seed=%a",
            "experiment=s%a",
        ],
    )
    assert {"--array=0-3%2", "--cpus-per-task=2", "--output=outputs/slurm/%x-%A_%a.out"} <= set(words)
    assert words[words.index("my.sif") :] == ["my.sif", "a b.yaml", "seed=%a", "experiment=s%a"]


def test_a_sweep_is_an_array_with_a_job_per_line(folder: Path) -> None:
    (folder / "sweep").write_text("experiment=x actor.optimizer.lr=1e-6\n\nexperiment=y actor.optimizer.lr=1e-5\n")
    words = submitted(folder, *["--ranks-per-node", "2", "--time", "5", "--sweep", "sweep"])
    assert "--array=1-2" in words
    assert words[-1] == f"@sweep:{folder / 'sweep'}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "a configuration is needed"),
        ("no.yaml --ranks-per-node 1 --time 5", "no file no.yaml"),
        ("a.yaml --ranks-per-node 1", "--time is needed"),
        ("a.yaml --time 5", "--gpus-per-node (or --ranks-per-node) '' is not a number"),
        ("a.yaml --time 5 --ranks-per-node 2 --nodes two", "--nodes 'two' is not a number"),
        ("a.yaml --time 5 --ranks-per-node 2 --nodes 0", "both must be at least 1"),
        ("a.yaml --time 5 --ranks-per-node 2 --partition big", "options of sbatch are written --name=value"),
        ("a.yaml --time 5 --ranks-per-node", "--ranks-per-node needs a value"),
        ("a.yaml --time 5 --ranks-per-node 2 --array 0-3 seed=%s", "would share a run directory"),
        ("a.yaml --time 5 --ranks-per-node 2 --sweep same", "would share a run directory"),
    ],
)
def test_what_is_refused(folder: Path, arguments: str, message: str) -> None:
    (folder / "a.yaml").write_text("")
    (folder / "same").write_text("seed=1\nseed=2\n")
    done = subprocess.run(
        [str(SLURM / "submit.sh"), *arguments.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr


def test_a_mistake_in_a_later_stage_submits_nothing(folder: Path) -> None:
    sbatch = folder / "sbatch"
    sbatch.write_text("#!/bin/sh\ntouch submitted\necho 7\n")
    sbatch.chmod(0o755)
    (folder / "a.yaml").write_text("")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "RLHF_MCORE_PLAN": "0"}
    chain = [str(SLURM / "chain.sh"), *["--ranks-per-node", "1", "--time", "5", "--", "a.yaml", "--", "missing.yaml"]]
    done = subprocess.run(chain, cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, (folder / "submitted").exists()) == (2, False)
    done = subprocess.run(
        [*chain[:-1], "a.yaml"], cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "7\n7\n"), done.stderr


def documented() -> list[list[str]]:
    """Commands of docs/cluster.md that call a script for jobs, in words."""
    text = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ./launch/slurm/")]
    return [shlex.split(line) for line in lines]


def test_there_are_documented_commands_of_both_scripts() -> None:
    assert {Path(words[0]).name for words in documented()} == {"submit.sh", "chain.sh"}


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_documented_commands_would_submit_jobs(folder: Path, words: list[str]) -> None:
    for name in ("CONFIG", "sft.yaml", "rm.yaml", "ppo.yaml"):
        (folder / name).write_text("")
    (folder / "sweep.txt").write_text("experiment=low actor.optimizer.lr=5e-7\nexperiment=high\n")
    done = subprocess.run(
        [str(ROOT / words[0]), "--dry-run", *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    jobs = [shlex.split(line) for line in done.stdout.splitlines()]
    assert len(jobs) == max(words.count("--"), 1)
    assert all(job[0] == "sbatch" and str(SLURM / "train.sbatch") in job for job in jobs)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    command = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
