"""Compare the recorded supports of engines with top_p and top_k with transformers' warpers, and train on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rlhf_mcore.algorithms.correction import rollout_correction
from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.schema import RolloutConfig, RolloutCorrectionConfig, RolloutLayoutConfig, SpeculativeConfig
from rlhf_mcore.config.schema.rollout import SamplingConfig, truncates
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.rows import merge_rows, split_tokens
from rlhf_mcore.roles.policy import Actor, logprobs_of
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.trainer.batches import SampledBatch
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.metrics import agreement_metrics
from rlhf_mcore.types import Prompt, Sampling, TrainBatch
from tests.distributed.setting import Settings, algorithm, build, finish, groups_of, load_hf, start
from tests.e2e.rollout.drawing import sampler_of
from tests.e2e.rollout.tiny import save_model
from tests.episodes import sample_rollouts

TEMPERATURE, NEW_TOKENS = 0.7, 300
# Engine, its layout, top_p, top_k, whether it drafts, and the layout of the trainer.
CASES: dict[str, tuple[str, int, float, int, bool, str]] = {
    "hf": ("hf", 1, 0.9, 512, False, "tp2_dp2"),
    "vllm": ("vllm", 1, 0.9, 512, False, "cp2_dp2"),
    "vllm_tp2_top_k": ("vllm", 2, 0.9, 20, True, "dp4"),
    "vllm_drafts": ("vllm", 1, 0.9, 5, True, "pp2_dp2"),
}


def main(directory: Path) -> None:
    platform, findings, path = start(), dict[str, Any](), directory / "model"
    if dist.get_rank() == 0:
        save_model(path, "qwen3", seed=3)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    dist.barrier()
    hf, shapes = load_hf(path), hf_shapes(load_spec(path).geometry)
    prompts = [Prompt(f"p{i}", i, [(7 * i + 5 * k) % 90 + 3 for k in range(3 + i)], "") for i in range(4)]
    for name, (kind, tp, top_p, top_k, drafts, layout) in CASES.items():
        drawn = SamplingConfig(n=2, temperature=TEMPERATURE, top_p=top_p, top_k=top_k, max_new_tokens=NEW_TOKENS)
        cfg = RolloutConfig(
            engine=kind, layout=RolloutLayoutConfig(tp=tp), kv_cache_gib=0.05, max_num_seqs=8, sampling=drawn
        )
        if drafts:
            cfg.speculative = SpeculativeConfig(method="ngram", num_tokens=2, ngram_tokens=1)
        engine = build_engine(cfg, EngineModel(str(path), str(path), "fp32", 400, seed=0, shapes=shapes))
        engine._stops = []  # vLLM's own stop token remains, but some responses reach their whole length
        engine.load_weights(iter(list(hf.named_parameters())), version=0)
        _, actor = build(path, groups_of(layout, {}), platform, Settings(max_tokens=2048))
        sampling = Sampling(**vars(drawn), seed=3, records_support=truncates(drawn))
        rollouts = sample_rollouts(sampler_of(engine), prompts, sampling, step=1)
        batch, _ = RowExchange(sampling.n)(SampledBatch(prompts, rollouts))
        actor = Actor(actor.model, TEMPERATURE, algorithm())
        findings[name] = compare(batch, actor) | against_warpers(batch, hf, top_p, top_k)
        greedy = sampler_of(engine).sample(prompts, Sampling(temperature=0.0, max_new_tokens=4), step=1)
        findings[name]["greedy_without"] = all(each.support is None for each in greedy)
        engine.close()
    finish(findings, directory)


def compare(batch: TrainBatch, actor: Actor) -> dict[str, Any]:
    """Compare the engine with the trainer's equal policy, with the recorded support and without it."""
    rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
    batch.old_logprobs = actor.compute_logprobs(batch)
    found: dict[str, Any] = dict(agreement_metrics(batch))
    plain = logprobs_of(actor.model, batch, TEMPERATURE)
    for kind, logprobs in (("", batch.old_logprobs), ("_without", plain)):
        for mode in ("token", "sequence"):
            cfg = RolloutCorrectionConfig(mode=mode, cap=2.0)
            _, statistics = rollout_correction(logprobs, batch.rollout_logprobs, batch.loss_mask, rows, cfg, None)
            found[f"{mode}{kind}"] = statistics["ratio_mean"], statistics["ratio_min"], statistics["ratio_max"]
    return {**found, "lengths": sorted(set(batch.num_sampled.tolist()))}


@torch.no_grad()
def against_warpers(batch: TrainBatch, hf: torch.nn.Module, top_p: float, top_k: int) -> dict[str, Any]:
    """Return the tokens whose support differs from the warpers, unless the mass is so close to the limit that rounding decides."""
    assert batch.support is not None
    warpers = LogitsProcessorList([TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(top_k)])
    nucleus, lengths = TopPLogitsWarper(top_p), batch.lengths[batch.rows].tolist()
    different, sizes = 0, list[int]()
    parts = zip(
        batch.token_ids.split(lengths),
        batch.loss_mask.split(lengths),
        split_tokens(batch.support, lengths),
        strict=True,
    )
    for ids, mask, support in parts:
        scores = warpers(torch.zeros(1, 1, dtype=torch.long), hf(ids[None].long()).logits[0, :-1])
        kept = nucleus(None, scores).isfinite()[mask[1:]]  # type: ignore[arg-type]
        above = scores[mask[1:]].softmax(-1).sort(-1).values.cumsum(-1)
        own = split_tokens(support, [1] * len(ids))
        assert all(not len(each.values) for each, is_own in zip(own, mask, strict=True) if not is_own)
        recorded = [each.values.tolist() for each, is_own in zip(own, mask, strict=True) if is_own]
        for expected, masses, found in zip(kept, above, recorded, strict=True):
            sizes.append(len(found))
            is_close = float((masses - (1 - top_p)).abs().min()) < 1e-5
            different += expected.nonzero().flatten().tolist() != found and not is_close
    return {"different": sum(all_gather_json(different)), "largest": max(all_gather_json(max(sizes, default=0)))}
