"""Compare samples per second of asynchronous and synchronous training, for lengths with a long tail and one core per side.

One trainer rank runs on one core, and one engine under Ray on another. A small model with random weights ends a response at each token
with a probability of about 1 / vocabulary size. Lengths are therefore nearly geometric (mean 100 tokens, at most 512). All schedules
run on the same two cores:

- ``synchronous``: ``trainer.max_staleness=0``, one side waits for the other.
- ``colocated``: two ranks with an engine each, which sample and learn in turn.
- ``one_step_off``: ``max_staleness=1``, all started responses end before new weights are loaded.
- ``partial``: ``max_staleness=4``, responses continue with new weights.

The ratio is the samples per second of ``partial`` over ``synchronous``, as the median over rounds. The result also contains the ratio
over ``colocated``, whose two ranks both learn. The first steps do not count, because responses of ``partial`` are first short and then
long. The plug-in ``simulate`` predicts such runs (its benchmark ``simulated``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import report

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 10  # the simulator skips the same number of steps at a staleness of 4
SCHEDULES = {
    "synchronous": ["trainer.max_staleness=0"],
    "colocated": [
        "rollout.placement=colocated",
        "trainer.max_staleness=0",
        "trainer.world_size=2",
    ],
    "one_step_off": ["trainer.max_staleness=1", "rollout.at_publish=drain"],
    "partial": ["trainer.max_staleness=4"],
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts per step, responses per prompt, and the limit of tokens per response."""

    name: str
    prompts: int
    samples: int
    max_new_tokens: int


LONG_TAIL = Workload("long tail", 16, 4, 512)
REWARD = "def score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 7 / 6\n"


def main() -> None:
    """Run all schedules in turn and write the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of two schedules with short responses")
    quick = parser.parse_args().quick
    rounds, steps = (1, 12) if quick else (2, 40)
    workload = replace(LONG_TAIL, prompts=4, max_new_tokens=64) if quick else LONG_TAIL
    schedules = ("synchronous", "partial") if quick else tuple(SCHEDULES)
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        make_model(directory)
        rates: dict[str, list[dict[str, float]]] = {name: [] for name in schedules}
        for number in range(rounds):
            for name in schedules:
                rates[name].append(measure(directory, workload, f"{name}-{number}", SCHEDULES[name], steps))
                print(name, rates[name][-1], flush=True)
    to: dict[str, list[float]] = {}
    for name, measured_rates in rates.items():
        pairs = zip(rates["partial"], measured_rates, strict=True)
        to[name] = [partial["samples_per_s"] / other["samples_per_s"] for partial, other in pairs]
    values = {"rounds": rates, "ratios": to, "steps": steps, "rows_per_step": workload.prompts * workload.samples}
    report("asynchronous", values, ratio=statistics.median(to["synchronous"]), goal=1.3, quick=quick)


def make_model(directory: Path) -> None:
    """Write the quickstart's model and data, with random weights and a context of 640 tokens."""
    tool = [
        sys.executable,
        str(ROOT / "tools" / "make_quickstart.py"),
        "--out",
        "made",
        "--fit-steps",
        "1",
        "--num-eval",
        "4",
    ]
    subprocess.run(tool, cwd=directory, env=environment(), check=True, capture_output=True)
    path = directory / "made" / "model" / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": 640}
    path.write_text(json.dumps(config))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent)).save_pretrained(path.parent)
    (directory / "reward.py").write_text(REWARD)


def measure(
    directory: Path, workload: Workload, experiment: str, schedule: Sequence[str], steps: int
) -> dict[str, float]:
    """Measure one run. Returns samples per second without the first steps, and the seconds of the phases of a step."""
    arguments = [
        f"experiment={experiment}",
        "model.path=made/model",
        "data.train=[made/train.parquet]",
        "data.eval=[]",
        "evaluate.every=0",
        f"trainer.prompts_per_step={workload.prompts}",
        f"trainer.minibatch_size={workload.prompts}",
        f"trainer.num_steps={steps + WARM_UP}",
        "trainer.max_tokens_per_microbatch=4096",
        f"rollout.sampling.n={workload.samples}",
        f"rollout.sampling.max_new_tokens={workload.max_new_tokens}",
        "rollout.kv_cache_gib=0.5",
        "reward.function=reward.py:score",
        "reward.workers=1",
        "actor.optimizer.lr=1e-7",
        "checkpoint.save_steps=0",
        "logging.trackers=[]",
        "logging.rollouts_every=1",
        "logging.console=plain",
        *schedule,
    ]
    config = str(ROOT / "configs" / "quickstart" / "async.yaml")
    ended = threading.Event()
    threading.Thread(target=pin_engines, args=(directory, ended), daemon=True).start()
    cores = "0,1" if "rollout.placement=colocated" in schedule else "0"
    try:
        subprocess.run(
            ["taskset", "-c", cores, sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, *arguments],
            cwd=directory,
            env={**environment(), "BENCHMARK_FOLDER": str(directory)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
    finally:
        ended.set()
    run = run_directory(directory, experiment)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    seconds = [record["timing/step_s"] for record in records]
    names = [key for key in records[-1] if key.startswith("timing/") and key.endswith("_s") and "tokens" not in key]
    kept = {key.removeprefix("timing/"): round(statistics.mean(r.get(key, 0.0) for r in records), 4) for key in names}
    staleness = statistics.mean(record.get("rollout/staleness_mean", 0.0) for record in records)
    lengths = statistics.mean(record["rollout/response_length_mean"] for record in records)
    rate = workload.prompts * workload.samples * len(records) / sum(seconds)
    return {"samples_per_s": round(rate, 2), "length": round(lengths, 1), "staleness": round(staleness, 2), **kept}


def run_directory(directory: Path, experiment: str) -> Path:
    return directory / "outputs" / "quickstart" / experiment


def pin_engines(directory: Path, ended: threading.Event) -> None:
    """Pin the engine processes to the second core."""
    mark = f"BENCHMARK_FOLDER={directory}".encode()
    while not ended.wait(0.2):
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if b"EngineHost" in (path / "cmdline").read_bytes() and mark in (path / "environ").read_bytes():
                    for thread in (path / "task").iterdir():
                        os.sched_setaffinity(int(thread.name), {1})
            except OSError:  # the process has ended
                continue


def environment() -> dict[str, str]:
    """Return the environment of a run, with one compute thread per process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
