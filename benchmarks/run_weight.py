"""What a GRPO rank loads of this package: files and lines, and the seconds that importing them takes.

One step of the quickstart's GRPO on one rank, started by ``rlhf-mcore train``, with rules, one file of data and a local engine. Every
module of rlhf_mcore counts that the rank's process has imported when the run has ended. The time is that of importing these modules
in a process that has imported torch, Megatron-core, transformers and vLLM before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import report
from benchmarks.ready import CONFIGS, ROOT, SMALL

FILES, LINES = 200, 30_000  # goals
PACKAGE = "rlhf_mcore"
START = """
import sys
from functools import partial
from rlhf_mcore.cli import launch, train
launch.launch = partial(launch.launch, module="weighed")
sys.exit(train.main(sys.argv[1:]))
"""
RANK = """
import json, sys
from rlhf_mcore.cli import rank, train
code = rank.run(train.main)
loaded = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "rlhf_mcore"}
with open("loaded.json", "w") as file:
    json.dump(loaded, file)
sys.exit(code)
"""
IMPORTS = """
import json, sys, time
from importlib import import_module
names = json.load(open("loaded.json"))
import torch, transformers, megatron.core, vllm, omegaconf
for name in names:  # once to load what they are built on
    import_module(name)
for name in [name for name in sys.modules if name.partition(".")[0] == "rlhf_mcore"]:
    del sys.modules[name]
begun = time.perf_counter()
for name in names:
    import_module(name)
print(time.perf_counter() - begun)
"""


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a process to its end and return what it printed."""
    merged = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=folder, env=merged, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[:4]} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def loaded_modules(folder: Path) -> dict[str, Path]:
    """The modules that a GRPO rank has imported by the end of its run, in the order in which it imported them."""
    make = [sys.executable, str(ROOT / "tools" / "make_quickstart.py"), "--out", "quickstart", "--fit-steps", "1"]
    run([*make, "--num-layers", "2", "--num-eval", "4"], folder)
    settings = [*SMALL, "trainer.world_size=1", "rollout.layout.tp=1", "rollout.sampling.n=2"]
    (folder / "weighed.py").write_text(
        RANK
    )  # without a preload: a fork would also count what torchrun's process has imported
    run([sys.executable, "-c", START, str(CONFIGS / "grpo.yaml"), *settings], folder)
    return {name: Path(file) for name, file in json.loads((folder / "loaded.json").read_text()).items()}


def weigh(modules: dict[str, Path]) -> dict[str, Any]:
    """Count files and lines, in all and by room."""
    lines = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in modules.items()}
    rooms: Counter[str] = Counter()
    for name, count in lines.items():
        rooms[".".join(name.split(".")[1:2]) or PACKAGE] += count
    whole = list((ROOT / PACKAGE).rglob("*.py"))
    return {
        "files": len(lines),
        "lines": sum(lines.values()),
        "lines_by_room": dict(rooms.most_common()),
        "files_of_the_package": len(whole),
        "lines_of_the_package": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in whole),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="do not time the imports; the result file is not replaced")
    args = parser.parse_args()
    with TemporaryDirectory() as made:
        folder = Path(made)
        modules = loaded_modules(folder)
        weight = weigh(modules)
        if not args.quick:
            weight["import_s"] = float(run([sys.executable, "-W", "ignore", "-c", IMPORTS], folder))
    for room, lines in weight["lines_by_room"].items():
        print(f"{room:14} {lines:6} lines")
    took = f", imported in {weight['import_s']:.2f} s" if "import_s" in weight else ""
    print(f"a GRPO rank loads {weight['files']} files and {weight['lines']} lines (goals {FILES} and {LINES}){took}")
    ratio = max(weight["files"] / FILES, weight["lines"] / LINES)
    report("run_weight", {**weight, "modules": sorted(modules)}, ratio=ratio, goal=1, quick=args.quick)


if __name__ == "__main__":
    main()
