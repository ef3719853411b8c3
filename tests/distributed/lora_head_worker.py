"""Compare updates of a reward model and a critic with adapters and full heads with PEFT and torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlhf_mcore.bridge.files.gather import Gatherer
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.schema import OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.data.examples import example_batch
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.planning.inputs import PlannedRole
from rlhf_mcore.planning.memory import state_bytes
from rlhf_mcore.roles.adapters import add_adapters, load_adapters
from rlhf_mcore.roles.scalar_models import Critic, RewardModelTrainer
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from tests import beside
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.lora_worker import cases_of
from tests.distributed.roles_worker import make_classifier
from tests.distributed.setting import batch_for, finish, gatherer, groups_of, rows, start
from tests.distributed.supervised_worker import CENTERING, examples, pair_oracle

LAYOUTS = ("dp4", "tp2_dp2", "tp2_dp2_sp", "pp2_dp2", "tp2_pp2", "tp2_sp_cp2")
KINDS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
TASKS = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS"}
SIZES = AdapterSizes(3, 12.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, clip_grad=0.5, weight_decay=0.1, offload=0.5)


def main(directory: Path) -> None:
    platform, groups = start(), dict[str, ModelGroups]()
    findings: dict[str, Any] = {"oracle": {}, "updates": {}}
    if dist.get_rank() == 0:
        models.make("qwen3", directory / "policy")
        for head, kind in KINDS.items():
            make_classifier(kind, directory / "policy", directory / head)
            findings["oracle"][head] = oracle(head, directory / head)
    dist.barrier()
    for head, layouts in cases_of(dict.fromkeys(KINDS, LAYOUTS)).items():
        for layout in layouts:
            made = groups_of(layout, groups)
            findings["updates"][f"{head}/{layout}"] = update(head, directory / head, made, platform)
    finish(findings, directory)


def oracle(head: str, path: Path) -> dict[str, float]:
    """Update a PEFT model. Saves its adapters and head before and after, in PEFT's format, next to the model."""
    peft = beside.peft()
    hf: Any = KINDS[head].from_pretrained(path, dtype=torch.float32).eval()
    hf.config.pad_token_id = hf.model.embed_tokens.padding_idx = None  # every token counts
    torch.manual_seed(3)
    targets = list(SIZES.targets)  # PEFT's all-linear would also adapt a value head
    cfg = peft.LoraConfig(task_type=TASKS[head], r=SIZES.rank, lora_alpha=int(SIZES.alpha), target_modules=targets)
    model = peft.get_peft_model(hf, cfg)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(path / "before")
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [
        {"params": [p for p in learns if (p.dim() > 1) == many], "weight_decay": OPTIMIZER.weight_decay * many}
        for many in (True, False)
    ]
    optimizer = torch.optim.AdamW(decayed, OPTIMIZER.lr, (OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    loss = pair_oracle(model)["loss"] if head == "sequence" else value_oracle(model)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(learns, OPTIMIZER.clip_grad)
    optimizer.step()
    model.save_pretrained(path / "after")
    return {"loss": float(loss), "norm": float(norm)}


def value_oracle(model: Callable[..., Any]) -> Tensor:
    """Return half the mean squared error of values. The return of a state is a tenth of the following token id."""
    errors = []
    for row in rows():
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        first = len(row.prompt_ids) - 1
        errors.append(model(ids).logits[0, first:-1, 0] - ids[0, first + 1 :] / 10)
    return 0.5 * torch.cat(errors).square().mean()


def update(head: str, path: Path, groups: ModelGroups, platform: Any) -> dict[str, Any]:
    """Return the metrics of an update, and the first tensor that differs from PEFT, among trained and among frozen tensors."""
    spec = load_spec(path, head)
    adapters = replace(spec.geometry, adapter=SIZES)
    add = partial(add_adapters, geometry=adapters, layout=groups.layout, dropout=0.0)
    options = replace(BuildOptions("fp32", "local", RecomputeConfig(), True, False, 0), add_adapters=add)
    model = build_model(spec, groups, platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    load_adapters(model.adapter_parameters(), adapters, path / "before")
    model.add_optimizer(OPTIMIZER)
    trained = TrainedModel(
        groups.layout,
        model,
        spec,
        TrainerConfig(max_tokens_per_microbatch=64),
        optimizer=OPTIMIZER,
        plan=MinibatchPlan(1000),
        name=head,
        adapter=SIZES,
    )
    if head == "sequence":
        metrics = (
            RewardModelTrainer(trained, CENTERING).deliver_update(example_batch(examples("reward_model")))().metrics
        )
    else:
        batch = batch_for(rows())
        batch = replace(batch, old_values=torch.zeros(len(batch.token_ids)), returns=batch.token_ids / 10)
        metrics = Critic(trained, None).deliver_update(batch)().metrics
    learned = gather(trained, adapters)
    assert model.optimizer is not None
    after = load_file(path / "after" / "adapter_model.safetensors")
    heads = {name for name in learned if ".score." in name}
    base = {name: value for name, value in gatherer(model) if not name.startswith("score.")}
    weights = {
        name: value for name, value in load_file(path / "model.safetensors").items() if not name.startswith("score.")
    }
    return {
        "metrics": metrics,
        "after": any_rank(all_gather_json(first_difference(learned.items(), after, 1e-5))),
        "base": any_rank(all_gather_json(first_difference(base.items(), weights))),
        "heads": sorted(heads),
        "bytes": bytes_of(model, PlannedRole(head, spec.geometry, groups.layout, True, "fp32", adapters=adapters)),
        "state": all_gather_json(sorted({shard.name.rpartition(".")[2] for shard in model.optimizer.shards()})),
    }


def bytes_of(model: MegatronModel, role: PlannedRole) -> list[Any]:
    """Return for each rank the bytes of live tensors and of the plan, for weights, gradients and moments."""
    buffers = [buffer for chunk in model.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    frozen = [one for chunk in model.chunks for one in chunk.parameters() if not one.requires_grad]
    assert model.optimizer is not None
    moments = [shard.tensors[kind].nbytes for shard in model.optimizer.shards() for kind in ("exp_avg", "exp_avg_sq")]
    live = (
        sum(buffer.param_data.nbytes for buffer in buffers) + sum(one.nbytes for one in frozen),
        sum(buffer.grad_data.nbytes for buffer in buffers),
        sum(moments),
    )
    planned = state_bytes(role, dist.get_rank())
    return [all_gather_json(live), all_gather_json((planned.weights, planned.gradients, planned.moments))]


def gather(trained: TrainedModel, adapters: ModelGeometry) -> dict[str, Tensor]:
    assert trained.model is not None
    pgs = trained.model.groups.collection
    return {k: v.clone() for k, v in Gatherer(trained.adapter_parameters(), adapters, pgs.tp, pgs.pp, pgs.tp_ep)}
