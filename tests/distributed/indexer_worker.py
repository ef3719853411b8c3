"""Train indexers on four ranks, and compare an update with transformers' layers, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.families.indexed import is_of_indexer
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.roles.role_files import RoleFiles
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.mtp_worker import step
from tests.distributed.setting import Settings, build, finish, gatherer, load_hf, moe_groups_of, rows, start
from tests.distributed.state_worker import assemble, save, train
from tests.distributed.update_worker import oracle, update
from tests.slow_indexers import attend_to_all, indexer_divergence

LAYERS = 4
CASES = {
    "sparse": ("tp2_sp_cp2_ep2_etp1", "tp2_sp_pp2_ep2_etp1", "cp4_ep2"),
    "warm_up": ("tp2_sp_cp2_ep2_etp1", "pp2_cp2_ep2"),
}


def main(directory: Path) -> None:
    platform, path = start(), directory / "model"
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {"oracle": {}}
    if dist.get_rank() == 0:
        models.make("deepseek_v32", path)
        reference = models.make("deepseek_v32", directory / "reference", seed=7)
        of_model = oracle(path, reference, directory / "after")
        for stage in CASES:
            findings["oracle"][stage] = {**of_model, **indexer_oracle(path, directory, stage)}
    dist.barrier()
    reference = load_hf(directory / "reference")
    for stage, layouts in CASES.items():
        expected = load_file(directory / stage)
        for number, layout in enumerate(layouts):
            recompute = RecomputeConfig(granularity="full") if number == 1 else None
            settings = Settings(max_tokens=48, indexer=stage, recompute=recompute)
            made = moe_groups_of(layout, groups)
            findings[f"{stage}/{layout}"] = update(path, made, platform, settings, reference, expected)
    findings["resumed"] = resume(path, directory, groups, platform, reference)
    finish(findings, directory)


def resume(
    path: Path, directory: Path, groups: dict[str, ModelGroups], platform: Platform, reference: torch.nn.Module
) -> dict[str, Any]:
    """Train two steps, save after the first, and repeat the second from the files on another layout."""

    def files_of(model: MegatronModel, actor: Actor) -> RoleFiles:
        sizes = {"bucket_bytes": 4096, "shard_bytes": 150_000}
        exporter = Exporter(model.local_parameters(), model.spec.geometry, [str(path)], world_group(), **sizes)
        return RoleFiles("actor", actor.model, exporter)

    settings, saved = Settings(max_tokens=48, indexer="sparse"), directory / "saved"
    first, second = (moe_groups_of(layout, groups) for layout in CASES["sparse"][:2])
    model, actor = build(path, first, platform, settings)
    train(actor, reference)
    save(files_of(model, actor), saved)
    expected, after = train(actor, reference), dict(gatherer(model))
    model, actor = build(saved / "actor", second, platform, settings)
    files_of(model, actor).load_state(saved)
    found = train(actor, reference)
    difference = first_difference(gatherer(model), after, tolerance=1e-5)
    state = assemble(saved / "actor" / "training")
    moments = [name for name in state if name.startswith("exp_avg/") and ".indexer." in name]
    return {
        "expected": expected,
        "found": found,
        "weights": any_rank(all_gather_json(difference)),
        "moments": len(moments),
    }


def indexer_oracle(path: Path, directory: Path, stage: str) -> dict[str, float]:
    """Step the indexers alone. Write all weights after the update."""
    hf: Any = load_hf(path)
    if stage == "warm_up":
        attend_to_all(hf)
    tokens = [torch.tensor(row.prompt_ids + row.response_ids) for row in rows()]
    loss = torch.stack([indexer_divergence(hf, ids, stage) for ids in tokens]).sum() / sum(map(len, tokens))
    loss.backward()
    indexers = {name: p for name, p in hf.named_parameters() if is_of_indexer(name)}
    norm = step(list(indexers.values()))
    others = load_file((path if stage == "warm_up" else directory / "after") / "model.safetensors")
    save_file(others | {name: p.detach().contiguous() for name, p in indexers.items()}, directory / stage)
    return {"indexer_loss": float(loss) / LAYERS, "indexer_grad_norm": norm}
