"""Compare updates on pairs by every loss under several layouts with plain transformers and explicit losses."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import softplus

from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.schema import DpoConfig, OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.data.examples import TokenizedExample, example_batch
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Reference
from rlhf_mcore.roles.preference import PreferenceActor
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.trainer.example_learner import ExampleEvaluator, ExampleLearner, preference_metrics
from tests.covering import covering_rows
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import finish, gatherer, groups_of, load_hf, rows, splits_of, start
from tests.distributed.supervised_worker import CUTS
from tests.episodes import make_example

MODEL = "qwen3_tied"
LAYOUTS = ("dp4", "tp2_dp2_sp", "pp2_vpp2_dp2", "tp2_pp2", "cp2_dp2", "tp2_sp_cp2")
LOSSES = {
    "dpo": DpoConfig(loss="dpo", beta=0.3, label_smoothing=0.1),
    "ipo": DpoConfig(loss="ipo", beta=0.3),
    "simpo": DpoConfig(loss="simpo", beta=2.0, gamma=0.5),
    "orpo": DpoConfig(loss="orpo", beta=0.2),
    "kto": DpoConfig(loss="kto", beta=0.3, desirable_weight=1.5),
}
NUM_UPDATES = 2
OPTIMIZER = OptimizerConfig(lr=2e-3, eps=1e-3, clip_grad=0.5, weight_decay=0.0)


def ways() -> list[tuple[str, str, str]]:
    """Return loss, layout and cut of the batch. Each loss occurs with tensor, pipeline and context parallelism; cuts alternate."""

    def features(row: dict[str, str]) -> dict[str, Any]:
        splits = splits_of(row["layout"])
        return {"loss": row["loss"], **{name: splits[name] for name in ("tp", "pp", "cp")}}

    names, rows = list(CUTS), covering_rows({"loss": tuple(LOSSES), "layout": LAYOUTS}, features=features)
    return [(row["loss"], row["layout"], names[number % 3]) for number, row in enumerate(rows)]


def examples() -> list[TokenizedExample]:
    """Return ten pairs, a number that the ranks do not divide. The responses of the third pair are equal."""
    others = [row.response_ids for row in rows(seed=6, count=10)]
    pairs = [make_example(r.prompt_ids, r.response_ids, other) for r, other in zip(rows(count=10), others, strict=True)]
    pairs[2].response_ids[1] = pairs[2].response_ids[0]
    return pairs


def main(directory: Path) -> None:
    platform = start()
    policy, reference = directory / "policy", directory / "reference"
    findings: dict[str, Any] = {"oracle": {}, "updates": {}}
    if dist.get_rank() == 0:
        models.make(MODEL, policy)
        other = load_hf(policy)
        generator = torch.Generator().manual_seed(3)
        for parameter in other.parameters():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
        other.save_pretrained(reference)
        for loss in LOSSES:
            findings["oracle"][loss] = oracle(loss, policy, reference, directory / f"{loss}_after")
    dist.barrier()
    groups: dict[str, ModelGroups] = {}
    after = {loss: load_file(directory / f"{loss}_after" / "model.safetensors") for loss in LOSSES}
    for loss, layout, cut in ways():
        made = groups_of(layout, groups)
        findings["updates"][f"{loss}/{layout}"] = update(loss, policy, reference, made, platform, cut, after[loss])
    finish(findings, directory)


class Quiet:
    """A record that stores nothing."""

    def phase(self, name: str) -> Any:
        return nullcontext()


def update(
    loss: str, path: Path, frozen: Path, groups: ModelGroups, platform: Any, cut: str, after: dict[str, Tensor]
) -> dict[str, Any]:
    """Return the held-out metrics before, the metrics of each update, and the first weight that differs from the oracle."""
    spec, cfg = load_spec(path), LOSSES[loss]
    max_tokens, packing = CUTS[cut]
    trainer = TrainerConfig(max_tokens_per_microbatch=max_tokens, packing=packing)
    build = partial(build_model, spec, groups, platform)
    model = build(BuildOptions("fp32", "local", RecomputeConfig(), True, False, 0))
    load(model.local_parameters(), spec.geometry, HFReader(path))
    model.add_optimizer(OPTIMIZER)
    plan = MinibatchPlan(1000)
    trained = TrainedModel(groups.layout, model, spec, trainer, optimizer=OPTIMIZER, plan=plan, name="actor")
    reference = None
    if loss not in ("simpo", "orpo"):
        other = build(BuildOptions("fp32", "local", RecomputeConfig(), False, False, 0))
        load(other.local_parameters(), spec.geometry, HFReader(frozen))
        reference = Reference(RoleModel(groups.layout, other, spec, trainer), temperature=1.0)
    actor = PreferenceActor(trained, cfg, reference)
    batches = partial(example_batch, with_mismatched=loss == "kto")
    measured = ExampleEvaluator(examples(), 0, 10, actor.measure, preference_metrics, batches).run(0)
    recorder: Any = Quiet()
    learner = ExampleLearner(actor, recorder, None, actor.compute_reference if reference is not None else None)
    history = []
    for step in range(NUM_UPDATES):
        (result,), _ = learner.learn(step, batches(examples()))
        history.append(dict(result.metrics))
    # Each update rounds weights below 2 in magnitude to steps of 2**-23. Three kinds of kernels also differ by one step.
    difference = first_difference(gatherer(model), after, tolerance=2e-6)
    assert len({str(h) for h in all_gather_json(history)}) == 1, "all ranks know the same metrics"
    return {"before": measured, "history": history, "weights": any_rank(all_gather_json(difference))}


def oracle(loss: str, path: Path, frozen: Path, target: Path) -> list[dict[str, float]]:
    """Compute the same updates naively, row by row, and write the new weights to ``target``."""
    hf, reference = load_hf(path), load_hf(frozen)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=OPTIMIZER.lr, eps=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    history = []
    for _ in range(NUM_UPDATES):
        optimizer.zero_grad()
        found = written_out(loss, hf, reference)
        found["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(list(hf.parameters()), 0.5)
        optimizer.step()
        history.append({name: float(value) for name, value in {**found, "grad_norm": norm}.items()})
    hf.save_pretrained(target)
    return history


def response_logprob(hf: Any, prompt: Any, response: Any) -> Tensor:
    """Return the sum of the logprobs of a response's tokens."""
    tokens = torch.tensor([[*prompt, *response]])
    logprobs = hf(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor([*response])[:, None]).sum()


def written_out(loss: str, hf: Any, reference: Any) -> dict[str, Tensor]:
    """Return the explicit loss, with -log sigmoid(x) = softplus(-x)."""
    cfg, pairs = LOSSES[loss], examples()
    beta = cfg.beta
    ours = [[response_logprob(hf, one.prompt_ids, ids) for ids in one.response_ids] for one in pairs]
    with torch.no_grad():
        theirs = [[response_logprob(reference, one.prompt_ids, ids) for ids in one.response_ids] for one in pairs]
    losses, chosen, rejected = [], [], []
    if loss == "kto":
        with torch.no_grad():
            ratios = []
            for one, before in zip(pairs, [pairs[-1], *pairs[:-1]], strict=True):
                longest = max(len(p.prompt_ids) + max(map(len, p.response_ids)) for p in pairs)
                for ids in before.response_ids:
                    cut = ids[: longest - len(one.prompt_ids)]
                    ratios.append(
                        response_logprob(hf, one.prompt_ids, cut) - response_logprob(reference, one.prompt_ids, cut)
                    )
            z = torch.stack(ratios).mean().clamp(min=0)
    for one, (w, v), (ref_w, ref_v) in zip(pairs, ours, theirs, strict=True):
        n_w, n_v = map(len, one.response_ids)
        if loss == "dpo":
            good, bad = beta * (w - ref_w), beta * (v - ref_v)
            losses.append(0.9 * softplus(bad - good) + 0.1 * softplus(good - bad))
        elif loss == "ipo":
            good, bad = beta * (w - ref_w) / n_w, beta * (v - ref_v) / n_v
            losses.append(((good - bad) / beta - 1 / (2 * beta)) ** 2)
        elif loss == "simpo":
            good, bad = beta * w / n_w, beta * v / n_v
            losses.append(softplus(0.5 - (good - bad)))
        elif loss == "orpo":
            p_w, p_v = (w / n_w).exp(), (v / n_v).exp()
            odds = (p_w / (1 - p_w)).log() - (p_v / (1 - p_v)).log()
            good, bad = beta * w / n_w, beta * v / n_v
            losses.append(-w / n_w + beta * softplus(-odds))
        else:
            good, bad = beta * (w - ref_w), beta * (v - ref_v)
            losses.append((1.5 * (1 - (good - beta * z).sigmoid()) + 1 - (beta * z - bad).sigmoid()) / 2)
        chosen.append(good)
        rejected.append(bad)
    better, worse = torch.stack(chosen).detach(), torch.stack(rejected).detach()
    right = (better > worse).float() + 0.5 * (better == worse).float()
    found = {"loss": torch.stack(losses).mean(), "accuracy": right.mean(), "margin": (better - worse).mean()}
    found |= {"chosen_reward": better.mean(), "rejected_reward": worse.mean()}
    return found | ({"divergence": z} if loss == "kto" else {})
