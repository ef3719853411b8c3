"""Train a small model as a user does: with GRPO, PPO, and vLLM features that use other kernels or code paths on CUDA."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

from tools.certify import Table, row
from tools.certify.families import make_run
from tools.certify.processes import last_line, run_python

PPO = ("algorithm.preset=ppo", "rollout.sampling.n=1", "critic.optimizer.lr=1e-4")
HF = ("rollout.engine=hf",)
QUANTISED = "int8"  # another policy than the trainer's, so its logprobs differ
ENGINES: dict[str, tuple[str, ...]] = {
    "vllm": (),
    QUANTISED: ("rollout.quantization=int8",),
    "drafts": ("rollout.speculative.method=ngram", "rollout.speculative.num_tokens=2"),
    "adapters": ("actor.lora.rank=8",),
    "top_p": ("rollout.sampling.top_p=0.9",),
    "sleep level 1": ("rollout.sleep_level=1",),
    "no sleep": ("rollout.sleep_level=0",),
}
_LIMIT_S = 600


def train(device: str, folder: Path, ranks: int, *, variants: dict[str, tuple[str, ...]]) -> Table:
    """Train each variant on one rank. Returns its rows."""
    rows: Table = []
    for name, settings in variants.items():
        (own := folder / name.replace(" ", "_")).mkdir()
        rows += _train(device, own, name, settings)
    return rows


grpo_and_ppo = partial(train, variants={"grpo": (*HF, "algorithm.kl.coef=0.01"), "ppo": (*HF, *PPO)})
engines = partial(train, variants=ENGINES)


def _train(device: str, folder: Path, name: str, settings: tuple[str, ...]) -> Table:
    config, steps = make_run("qwen3", folder, on_cuda=device == "cuda"), 4 if device == "cuda" else 2
    begun = time.perf_counter()
    command = ["-m", "rlhf_mcore.cli.main", "train", str(config), f"trainer.num_steps={steps}", "trainer.world_size=1"]
    if code := run_python([*command, *settings], log := folder / "train.log", _LIMIT_S):
        raise RuntimeError(f"{name} ended with code {code}, see {log}: {last_line(log)}")
    seconds = time.perf_counter() - begun
    lines = (folder / "certificate" / "run" / "metrics.jsonl").read_text().splitlines()
    made = [line for line in map(json.loads, lines) if line["step"] > 0]
    skipped = sum(line["actor/skipped_updates"] for line in made)
    worst = max(line["rollout/logprob_diff_max"] for line in made)
    limit = 0.5 if name == QUANTISED else 0.1 if device == "cuda" else 1e-3
    step_s, sync_s = made[-1]["timing/step_s"], made[-1]["timing/sync_s"]
    return [
        row(
            f"{name}: steps, and skipped updates",
            f"{len(made)}, {skipped:.0f}",
            f"{steps}, 0",
            len(made) == steps and not skipped,
        ),
        row(f"{name}: largest logprob difference to the engine", f"{worst:.1e}", f"< {limit:g}", worst < limit),
        row(f"{name}: whole run, last step, its sync", f"{seconds:.0f} s, {step_s:.2f} s, {sync_s:.3f} s"),
    ]
