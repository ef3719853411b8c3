"""transformers, Megatron and vLLM on the same tokens: rollouts of a live engine, scored by the trainer under many layouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.sync import GatherBridge
from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.trainer.exchange import Exchange
from rlhf_mcore.trainer.metrics import agreement_metrics
from rlhf_mcore.trainer.rollouts import generate
from rlhf_mcore.types import Prompt, Sampling, Score
from tests.distributed import models
from tests.distributed.setting import (
    LAYOUTS,
    TEMPERATURE,
    Settings,
    build,
    finish,
    gatherer,
    groups_of,
    hf_logprobs,
    load_hf,
    rows,
    start,
)
from tests.e2e.rollout.tiny import save_tokenizer

# Engines are started once per model and see every layout's weights.
ENGINE_TP = {"llama": 1, "llama_rope3": 2, "mistral": 2, "qwen2": 1, "qwen2_yarn": 2, "qwen3": 2, "qwen3_tied": 1}


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {}
    prompts = [Prompt(f"p{i}", i, row.prompt_ids, "") for i, row in enumerate(rows(count=6))]
    for name, tp in ENGINE_TP.items():
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
            save_tokenizer(path)
        dist.barrier()
        cfg = RolloutConfig(layout=RolloutLayoutConfig(tp=tp), kv_cache_gib=0.02, max_num_seqs=16)
        engine = build_engine(
            cfg, model_dir=str(path), tokenizer_dir=str(path), dtype="fp32", max_model_len=64, seed=0
        )
        for version, layout in enumerate(LAYOUTS):
            model, actor = build(path, groups_of(layout, groups), platform, Settings())
            GatherBridge(gatherer(model), engine).sync(version)
            findings[f"{name}/{layout}"] = compare(engine, actor, prompts, path, step=version)
        engine.close()
    finish(findings, directory)


def compare(engine: Any, actor: Any, prompts: list[Prompt], path: Path, step: int) -> dict[str, float]:
    """Largest differences of logprobs over all ranks: engine against trainer, engine against transformers."""
    sampling = Sampling(n=2, temperature=TEMPERATURE, max_new_tokens=12, seed=3)
    rollouts = generate(engine, prompts, sampling, step=step)
    pgs = actor.model.groups.collection
    exchange = Exchange(pgs.dp.rank(), pgs.dp.size(), sampling.n, len(prompts), pad_token_id=0)
    scores = [Score(0.0) for _ in rollouts.trajectories]
    batch = exchange(prompts, rollouts.positions, rollouts.trajectories, scores).batch
    batch.old_logprobs, _ = actor.compute_logprobs(batch)
    metrics = agreement_metrics(batch, pgs.dp)
    hf, worst = load_hf(path), 0.0
    for trajectory in rollouts.trajectories:
        row = type(rows(count=1)[0])(trajectory.prompt.prompt_ids, trajectory.response_ids, trajectory.rollout_logprobs, 0.0)
        with torch.no_grad():
            expected, _ = hf_logprobs(hf, row)
        worst = max(worst, float((expected - torch.tensor(trajectory.rollout_logprobs)).abs().max()))
    return {
        "trainer": metrics["rollout/logprob_diff_max"],
        "transformers": max(all_gather_json(worst)),
        "version": float(min(all_gather_json(engine.policy_version))),
        "num_trajectories": float(sum(all_gather_json(len(rollouts.trajectories)))),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
