"""Compare actor, critic, reference and reward model under separate layouts with one process and with plain transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig, OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.residency.ledger import KINDS, WEIGHTS
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Actor, Reference
from rlhf_mcore.roles.scalar_models import Critic, RewardModel
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.divergence import share_results
from rlhf_mcore.types import TrainBatch
from tests.difference import first_difference
from tests.distributed import models
from tests.distributed.setting import (
    POOL,
    TEMPERATURE,
    VOCAB,
    Row,
    batch_for,
    batch_of_learner,
    finish,
    rows,
    start,
    write_together,
)
from tests.rows import rows_of_padded

NUM_STEPS = 3
# name -> layout of the actor (and reference), layout of the critic: (ranks, tp, pp, vpp, sequence parallel), first rank, cp
SETUPS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "one_process": ((1, 1, 1, None, False, 0), (1, 1, 1, None, False, 0)),
    "tp2_dp2_beside_pp2_dp2": ((4, 2, 1, None, False, 0), (4, 1, 2, None, False, 0)),
    "pp2_vpp2_dp2_beside_tp4_sp": ((4, 1, 2, 2, False, 0), (4, 4, 1, None, True, 0)),
    "cp4_beside_tp2_sp_cp2": ((4, 1, 1, None, False, 0, 4), (4, 2, 1, None, True, 0, 2)),
    "disjoint_tp2_and_pp2": ((2, 2, 1, None, False, 0), (2, 1, 2, None, False, 2)),
    "disjoint_dp3_and_one": ((3, 1, 1, None, False, 1), (1, 1, 1, None, False, 0)),
}
MODEL = "qwen3_tied"


@dataclass(slots=True)
class Team:
    actor: Actor
    critic: Critic
    reference: Reference


def main(directory: Path) -> None:
    platform = start()
    path = directory / MODEL
    if dist.get_rank() == 0:
        models.make(MODEL, path)
        make_classifier(AutoModelForTokenClassification, path, directory / "token")
        make_classifier(AutoModelForSequenceClassification, path, directory / "sequence")
    dist.barrier()
    findings: dict[str, Any] = {"runs": {}, "values": {}, "scores": {}, "refresh": {}, "by_layer": {}}
    findings["oracle"] = {"values": hf_values(directory / "token"), "scores": hf_scores(directory / "sequence")}
    for name, (actor, critic) in SETUPS.items():
        roles = team(path, actor, critic, platform)
        findings["runs"][name] = run(roles)
        findings["refresh"][name] = refresh(roles)
        findings["values"][name] = values(directory / "token", critic, platform, directory / f"{name}_saved")
        findings["scores"][name] = scores(directory / "sequence", critic, platform)
        findings["by_layer"][name] = by_layer(path, actor, platform)
    finish(findings, directory)


def make_classifier(kind: Any, path: Path, target: Path) -> None:
    torch.manual_seed(3)
    model = kind.from_pretrained(path, num_labels=1, pad_token_id=0, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.3)
        if model.score.bias is not None:
            model.score.bias.fill_(0.7)
    model.save_pretrained(target)


def built(path: Path, head: str, cut: tuple[Any, ...], platform: Any, trainable: bool) -> tuple[Any, Any, Any]:
    """Return layout, model (None outside the layout) and spec."""
    size, tp, pp, vpp, sp, first, *cp = cut
    spec = load_spec(path, head)
    layout = ParallelLayout(size, tp, pp, vpp, *cp, sequence_parallel=sp, first_rank=first)
    groups = build_groups(layout, POOL)
    model: MegatronModel | None = None
    if groups is not None:
        options = BuildOptions("fp32", "local", RecomputeConfig(), trainable, False, 0)
        model = build_model(spec, groups, platform, options)
        load(model.local_parameters(), spec.geometry, HFReader(path), fresh_head=spec.has_fresh_head)
    return layout, model, spec


def algorithm() -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage="gae",
        gamma=0.98,
        lam=0.9,
        bootstrap_truncated=True,
        loss_aggregation="token",
        kl=KLConfig(coef=0.05),
    )


def team(path: Path, actor: tuple[Any, ...], critic: tuple[Any, ...], platform: Any) -> Team:
    trainer = TrainerConfig(max_tokens_per_microbatch=64)
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-3, clip_grad=0.5, weight_decay=0.1)
    plan, sharing = MinibatchPlan(prompts_per_minibatch=2, epochs=2), DeviceSharing(platform)

    def build_trained(head: str, cut: tuple[Any, ...], name: str) -> TrainedModel:
        layout, model, spec = built(path, head, cut, platform, trainable=True)
        if model is not None:
            model.add_optimizer(optimizer)
            if actor[0] > 1:  # with several processes, models are offloaded between their uses
                model.share(sharing, name, KINDS)
        return TrainedModel(layout, model, spec, trainer, optimizer=optimizer, plan=plan, name=name)

    layout, frozen, spec = built(path, "lm", actor, platform, trainable=False)
    if frozen is not None:
        frozen.share(sharing, "reference", (WEIGHTS,))
    return Team(
        Actor(build_trained("lm", actor, "actor"), TEMPERATURE, algorithm()),
        Critic(build_trained("token", critic, "critic"), 0.2, bootstrap=True),
        Reference(RoleModel(layout, frozen, spec, trainer), TEMPERATURE),
    )


def scored_batch(learner: TrainedModel | None = None) -> TrainBatch:
    batch = batch_for(rows()) if learner is None else batch_of_learner(learner)
    batch.truncated = torch.arange(len(batch.lengths)) % 3 == 1
    return batch


def run(which: Team) -> list[dict[str, float]]:
    """Run PPO steps on the same rows. Returns the metrics of the first rank, which all ranks share."""
    history, estimation = [], AdvantageComputer(algorithm())
    for _ in range(NUM_STEPS):
        batch = scored_batch(which.actor.model)
        batch.ref_logprobs = which.reference.compute_logprobs(batch)
        batch.old_values, batch.bootstrap_values = which.critic.compute_values(batch)
        batch.old_logprobs = which.actor.compute_logprobs(batch)
        metrics = estimation(batch)
        updates = [role.deliver_update(batch) for role in (which.critic, which.actor)]
        for result in share_results([update() for update in updates]):
            metrics |= result.metrics
        history.append(metrics)
    assert len({str(h) for h in all_gather_json(history)}) == 1
    return history


def values(path: Path, cut: tuple[Any, ...], platform: Any, target: Path) -> dict[str, Any]:
    """Return the values of a critic that is loaded with its head, and of the critic reloaded from its saved files."""
    layout, model, spec = built(path, "token", cut, platform, trainable=False)
    trainer, batch = TrainerConfig(max_tokens_per_microbatch=64), scored_batch()
    plan = MinibatchPlan(1)
    untrained = TrainedModel(layout, model, spec, trainer, optimizer=OptimizerConfig(), plan=plan, name="critic")
    role = Critic(untrained, None, bootstrap=True)
    exporter = Exporter(
        untrained.local_parameters(),
        spec.geometry,
        [str(path)],
        world_group(),
        bucket_bytes=10_000,
        config_updates=spec.config_updates,
    )
    write_together(exporter, target)
    before, last = role.compute_values(batch)
    return {
        "before": rows_of_padded(batch, before),
        "last": last.tolist(),
        "saved": hf_values(target),
        "weights": first_difference(weights_of(target), weights_of(path)),
    }


def scores(path: Path, cut: tuple[Any, ...], platform: Any) -> list[float]:
    layout, model, spec = built(path, "sequence", cut, platform, trainable=False)
    placed = RoleModel(layout, model, spec, TrainerConfig(max_tokens_per_microbatch=64))
    return RewardModel(placed).compute_scores(scored_batch()).tolist()


def refresh(which: Team) -> dict[str, float]:
    """Return the logprobs of an offloaded reference before and after it copies the weights of a trained actor."""
    batch = scored_batch()

    def distance() -> float:
        gaps = (which.reference.compute_logprobs(batch) - which.actor.compute_logprobs(batch)).abs()
        return max(all_gather_json(float(gaps.max()) if gaps.numel() else 0.0))

    before = distance()
    which.reference.refresh(which.actor)
    frozen = which.reference.model.model
    tensors = [p for chunk in frozen.chunks for p in chunk.parameters()] if frozen is not None else []
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return {"before": before, "after": distance(), "held_between_uses": float(max(all_gather_json(held)))}


def by_layer(path: Path, cut: tuple[Any, ...], platform: Any) -> dict[str, Any]:
    """Compare a reference on the device with a reference whose layers are loaded one by one."""
    layout, model, spec = built(path, "lm", cut, platform, trainable=False)
    batch, sharing = scored_batch(), DeviceSharing(platform)
    reference = Reference(RoleModel(layout, model, spec, TrainerConfig(max_tokens_per_microbatch=64)), TEMPERATURE)
    whole, held = reference.compute_logprobs(batch), {}
    if model is not None:
        model.share(sharing, "reference", (WEIGHTS,), by_layer=True)
        parts = {part.name: part.num_bytes for part in sharing.parts}
        sharing.pop()
        with sharing.phase("reference"):
            again = reference.compute_logprobs(batch)
        layers = [part.num_bytes for part in model.movable.layers]
        held = {"peak": sharing.pop()["memory/reference_bytes"], "rest": parts["reference weights"], "layers": layers}
        held["left"] = sharing.ledger.total
    else:
        again = reference.compute_logprobs(batch)
    return {
        "equal": all_gather_json(torch.equal(again, whole) and bool((whole != 0).any())),
        "held": all_gather_json(held),
    }


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a saved model."""
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def hf_values(path: Path) -> dict[str, Any]:
    """Return, row by row, the values before each response token and after the last token."""
    hf = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32).eval()
    before, last = [], []
    for row in rows():
        with torch.no_grad():
            found = hf(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, :, 0]
        before.append(found[len(row.prompt_ids) - 1 : -1].tolist())
        last.append(float(found[-1]))
    return {"before": before, "last": last}


def hf_scores(path: Path) -> list[float]:
    hf = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()

    def score(row: Row) -> float:
        ids = row.prompt_ids + row.response_ids
        with torch.no_grad():  # transformers would take a pad token at the end for padding
            return float(hf(torch.tensor([[*ids[:-1], ids[-1] or VOCAB - 1]])).logits[0, 0])

    return [score(row) for row in rows()]
