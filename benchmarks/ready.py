"""Compare the start time of a run with the slower of a trainer alone and an engine alone.

Three processes run in turn on the quickstart's model: a GRPO run with vLLM until its first step starts, a supervised run until
its first step starts, and vLLM alone until its first answer. The benchmark also measures `rlhf-mcore --help` and a rejected
configuration, because a user waits for these at every mistake.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import report

GOAL, HELP_GOAL_S, CHECK_GOAL_S = 1.1, 0.5, 1.0
ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs" / "quickstart"
SMALL = (
    "trainer.num_steps=1",
    "trainer.world_size=1",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=4",
    "actor.layout.tp=1",
    "data.eval=[]",
    "evaluate.every=0",
    "logging.trackers=[]",
)
ENGINE = """
import sys
from vllm import LLM, SamplingParams
llm = LLM("quickstart/model", dtype="float32", max_model_len=80, enforce_eager=True, seed=0)
llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(max_tokens=1), use_tqdm=False)
"""
VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def seconds(command: Sequence[str], folder: Path, code: int = 0, **environment: str) -> float:
    """Return the seconds of a process from its start to its end."""
    begun = time.perf_counter()
    merged = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, cwd=folder, env=merged, capture_output=True, text=True)
    if done.returncode != code:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - begun


def until_first_step(folder: Path, name: str, config: str, *settings: str) -> float:
    """Return the seconds from the start of a training run to its first step."""
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", str(CONFIGS / config), *SMALL, *settings]
    begun = time.time()
    seconds([*command, f"experiment={name}"], folder)
    lines = (folder / "outputs" / "quickstart" / name / "metrics.jsonl").read_text().splitlines()
    first = next(made for made in map(json.loads, lines) if made["step"] == 1)
    return float(first["timing/unix_time"] - first["timing/step_s"] - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    args = parser.parse_args()
    rows = []
    with TemporaryDirectory() as made:
        folder = Path(made)
        make = [sys.executable, str(ROOT / "tools" / "make_quickstart.py"), "--out", "quickstart", "--fit-steps", "3"]
        seconds([*make, "--num-layers", "2", "--num-eval", "4"], folder)
        command = [sys.executable, "-m", "rlhf_mcore.cli.main"]
        for number in range(1 if args.quick else 3):
            whole = until_first_step(folder, f"rl{number}", "grpo.yaml", "rollout.layout.tp=1", "rollout.sampling.n=2")
            trainer = until_first_step(folder, f"sft{number}", "sft.yaml")
            engine = seconds([sys.executable, "-c", ENGINE], folder, **VLLM)
            rows.append({"run_s": whole, "trainer_s": trainer, "engine_s": engine})
        help_s = min(seconds([*command, "--help"], folder) for _ in range(3))
        wrong = [*command, "train", str(CONFIGS / "grpo.yaml"), "trainer.nume_steps=1"]
        check_s = min(seconds(wrong, folder, code=2) for _ in range(3))
    ratio = statistics.median(row["run_s"] / max(row["trainer_s"], row["engine_s"]) for row in rows)
    first_step_s = statistics.median(row["run_s"] for row in rows)
    details = {
        "rows": rows,
        "first_step_s": first_step_s,
        "help_s": help_s,
        "help_goal_s": HELP_GOAL_S,
        "check_s": check_s,
        "check_goal_s": CHECK_GOAL_S,
    }
    print(f"first step of the quickstart begins after {first_step_s:.1f} s (median of {len(rows)})")
    print(f"help {help_s:.3f} s (goal {HELP_GOAL_S}), a refused configuration {check_s:.3f} s (goal {CHECK_GOAL_S})")
    report("ready", details, ratio=ratio, goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
