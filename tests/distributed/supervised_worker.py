"""Compare updates on given responses and on pairs under several layouts with plain transformers and torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, softplus
from transformers import AutoModelForSequenceClassification

from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.schema import OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.data.examples import TokenizedExample, example_batch
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.roles.policy import SupervisedActor
from rlhf_mcore.roles.scalar_models import RewardModelTrainer
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.trainer.example_learner import (
    ExampleEvaluator,
    likelihood,
    likelihood_metrics,
    preference,
    preference_metrics,
)
from tests.covering import covering_rows
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.roles_worker import make_classifier
from tests.distributed.setting import finish, gatherer, groups_of, load_hf, rows, splits_of, start
from tests.episodes import make_example

MODEL = "qwen3_tied"
LAYOUTS = ("dp4", "tp2_dp2", "tp2_dp2_sp", "pp2_dp2", "pp2_vpp2_dp2", "tp2_pp2", "cp4", "tp2_sp_cp2")
CUTS = {"one_packed": (10_000, True), "many_packed": (48, True), "many_padded": (64, False)}
NUM_UPDATES = 2
CENTERING = 0.05
OPTIMIZER = OptimizerConfig(lr=2e-3, eps=1e-3, clip_grad=0.5, weight_decay=0.1)


def cells() -> list[dict[str, str]]:
    """Return kind of model, layout and cut. Every layout occurs, and each kind of split with each kind of model and cut."""
    factors = {"kind": ("sft", "reward_model"), "layout": LAYOUTS, "cut": tuple(CUTS)}
    return covering_rows(factors, features=lambda row: {**row, **splits_of(row["layout"]), "layout": None})


def examples(kind: str) -> list[TokenizedExample]:
    """Return ten examples, a number that the ranks do not divide."""
    single = [make_example(row.prompt_ids, row.response_ids) for row in rows(count=10)]
    if kind == "sft":
        return single
    others = [row.response_ids for row in rows(seed=5, count=10)]
    return [make_example(r.prompt_ids, r.response_ids, other) for r, other in zip(rows(count=10), others, strict=True)]


def main(directory: Path) -> None:
    platform = start()
    paths = {"sft": directory / "policy", "reward_model": directory / "scorer"}
    findings: dict[str, Any] = {"oracle": {}, "updates": {}}
    if dist.get_rank() == 0:
        models.make(MODEL, paths["sft"])
        make_classifier(AutoModelForSequenceClassification, paths["sft"], paths["reward_model"])
        for kind, path in paths.items():
            findings["oracle"][kind] = oracle(kind, path, directory / f"{kind}_after")
    dist.barrier()
    groups: dict[str, ModelGroups] = {}
    for kind, path in paths.items():
        after = load_file(directory / f"{kind}_after" / "model.safetensors")
        for cell in cells():
            if cell["kind"] == kind:
                made = groups_of(cell["layout"], groups)
                found = update(kind, path, made, platform, cell["cut"], after)
                findings["updates"]["/".join(cell.values())] = found
    finish(findings, directory)


def role(kind: str, path: Path, groups: ModelGroups, platform: Any, cut: str) -> SupervisedActor | RewardModelTrainer:
    spec = load_spec(path, "lm" if kind == "sft" else "sequence")
    model = build_model(spec, groups, platform, BuildOptions("fp32", "local", RecomputeConfig(), True, False, 0))
    load(model.local_parameters(), spec.geometry, HFReader(path))
    max_tokens, packing = CUTS[cut]
    trainer = TrainerConfig(max_tokens_per_microbatch=max_tokens, packing=packing)
    model.add_optimizer(OPTIMIZER)
    name, plan = "actor" if kind == "sft" else "reward_model", MinibatchPlan(1000)
    placed = TrainedModel(groups.layout, model, spec, trainer, optimizer=OPTIMIZER, plan=plan, name=name)
    return SupervisedActor(placed) if kind == "sft" else RewardModelTrainer(placed, CENTERING)


def update(
    kind: str, path: Path, groups: ModelGroups, platform: Any, cut: str, after: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the held-out metrics before, the metrics of each update, and the first weight that differs from the oracle."""
    which = role(kind, path, groups, platform, cut)
    measured = held_out(kind, which).run(0)
    history = [which.deliver_update(example_batch(examples(kind)))().metrics for _ in range(NUM_UPDATES)]
    assert which.model.model is not None
    # Each update rounds weights below 2 in magnitude to steps of 2**-23. Three kinds of kernels also differ by one step.
    difference = first_difference(gatherer(which.model.model), after, tolerance=2e-6)
    assert len({str(h) for h in all_gather_json(history)}) == 1, "all ranks know the same metrics"
    return {"before": measured, "history": history, "weights": any_rank(all_gather_json(difference))}


def held_out(kind: str, which: Any) -> ExampleEvaluator:
    """Evaluate three examples per batch. The last batch is short, and some data-parallel ranks have no example."""
    build = partial(ExampleEvaluator, examples(kind), 0, 3)
    if kind == "sft":
        return build(partial(likelihood, which), likelihood_metrics)
    return build(partial(preference, which.compute_scores), preference_metrics)


def oracle(kind: str, path: Path, target: Path) -> dict[str, Any]:
    """Compute the same updates naively, row by row, and write the new weights to ``target``."""
    hf: Any
    if kind == "sft":
        hf, loss = load_hf(path), sft_oracle
    else:
        hf = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
        # Every token counts, including the pad token. It may be the last token, and its embedding is trained.
        hf.config.pad_token_id = hf.model.embed_tokens.padding_idx = None
        loss = pair_oracle
    parameters = list(hf.parameters())
    decayed = [
        {"params": [p for p in parameters if (p.dim() > 1) == many], "weight_decay": 0.1 * many} for many in (1, 0)
    ]
    optimizer = torch.optim.AdamW(decayed, lr=OPTIMIZER.lr, eps=1e-3, betas=(0.9, 0.999))
    history = []
    for _ in range(NUM_UPDATES):
        optimizer.zero_grad()
        found = loss(hf)
        found["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        history.append({name: float(value) for name, value in {**found, "grad_norm": norm}.items()})
    hf.config.pad_token_id = 0
    hf.save_pretrained(target)
    return {"history": history}


def sft_oracle(hf: Callable[..., Any]) -> dict[str, torch.Tensor]:
    total, count = torch.zeros(()), 0
    for example in examples("sft"):
        (response,) = example.response_ids
        logits = hf(torch.tensor([[*example.prompt_ids, *response]])).logits[0, len(example.prompt_ids) - 1 : -1]
        total = total + cross_entropy(logits, torch.from_numpy(response).long(), reduction="sum")
        count += len(response)
    return {"loss": total / count, "perplexity": torch.exp(total.detach() / count)}


def pair_oracle(hf: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return the loss of pairs, with -log sigmoid(d) = softplus(-d)."""
    scores = [
        [hf(torch.tensor([[*example.prompt_ids, *response]])).logits[0, 0] for response in example.response_ids]
        for example in examples("reward_model")
    ]
    chosen, rejected = torch.stack([torch.stack(pair) for pair in scores]).unbind(1)
    plain = softplus(rejected - chosen)
    return {
        "loss": (plain + CENTERING * (chosen + rejected) ** 2).mean(),
        "plain_loss": plain.mean(),
        "accuracy": (chosen > rejected).float().mean(),
        "margin": (chosen - rejected).mean(),
    }
