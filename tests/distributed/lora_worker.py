"""Compare one update of adapters under several layouts with PEFT and torch's AdamW.

The explicit formula replaces PEFT for experts, which transformers stores in one tensor, and if PEFT is not installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call

from rlhf_mcore.bridge.files.gather import Gatherer
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.cli.generation import select_sent
from rlhf_mcore.config.schema import Config, OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import rng_tracker_states, set_rng_tracker_states
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.adapters import add_adapters, initialize
from rlhf_mcore.roles.policy import Reference, SupervisedActor
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from tests import beside
from tests.covering import covering_rows
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.setting import (
    MOE_LAYOUTS,
    batch_for,
    finish,
    gatherer,
    groups_of,
    load_hf,
    moe_groups_of,
    response_values,
    rows,
    splits_of,
    start,
)

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, clip_grad=0.5, weight_decay=0.1)
ATTENTION = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")  # neither keys nor gates
LAYOUTS = {  # allowed layouts of each model
    "qwen3": ("dp4", "tp2_dp2", "tp2_dp2_sp", "tp4", "pp2_dp2", "tp2_pp2", "cp2_dp2", "tp2_sp_cp2"),
    "qwen2": ("tp2_dp2", "tp2_dp2_sp", "tp4_sp", "pp2_dp2", "tp2_pp2_vpp2_sp"),
    "qwen3_moe": ("ep2_dp4", "tp2_sp_dp2", "tp2_sp_ep2_etp1_dp2", "tp2_sp_ep2_dp2", "ep2_etp2_dp4", "pp2_ep2_dp2"),
    "gemma4_text": ("tp2_dp2_sp", "tp4"),  # two or four ranks have the key head whose projection is also the values
    "deepseek_v3_kimi": ("ep2_dp4", "tp2_sp_dp2", "tp2_sp_ep2_etp1_dp2"),
    "deepseek_v3_dense": ("tp2_dp2", "pp2_dp2"),
    "qwen3_ends": ("tp2_dp2", "tp2_dp2_sp", "pp2_dp2", "cp2_dp2"),
    "qwen3_pissa": ("tp2_dp2_sp", "pp2_dp2"),
    "qwen3_dora": ("tp2_dp2", "tp2_pp2", "cp2_dp2"),
    "qwen2_dora": ("tp2_dp2_sp", "tp4"),
    "deepseek_v3_dense_dora": ("tp2_dp2", "pp2_dp2"),
}
TARGETS = {
    "qwen2": ATTENTION,
    "qwen2_dora": ATTENTION,
    "qwen3_ends": ("q_proj", "down_proj", "embed_tokens", "lm_head"),
}
SIZES = {name: AdapterSizes(3, 12.0, TARGETS.get(name, ("all-linear",)), name == "qwen2") for name in LAYOUTS}
SIZES |= {name: replace(SIZES[name], use_dora=True) for name in LAYOUTS if name.endswith("_dora")}
SIZES["qwen3_pissa"] = AdapterSizes(6, 24.0, ("all-linear",), fixed=3)
RECOMPUTE = {
    "full": RecomputeConfig(granularity="full"),
    "selective": RecomputeConfig(granularity="selective", modules=["mlp", "core_attn"]),
}
# Other models have experts, or MLPs that PEFT's all-linear skips because their names look like experts.
OF_PEFT = ("qwen3", "qwen2", "gemma4_text", "qwen3_ends", "qwen3_pissa", "qwen3_dora", "qwen2_dora")
WITH_ZERO = (
    "qwen3",
    "qwen3_moe",
    "qwen3_ends",
    "qwen2_dora",
)  # updated with B = 0 too; the others only with a trained B


def cases_of(layouts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return a few allowed layouts for each model. All layouts occur, and each model occurs with each kind of split."""
    rows = covering_rows(
        {"model": tuple(layouts), "layout": tuple(dict.fromkeys(name for names in layouts.values() for name in names))},
        lambda row: row["layout"] in layouts[row["model"]],
        lambda row: {**splits_of(row["layout"]), "model": row["model"]},
    )
    return {model: [row["layout"] for row in rows if row["model"] == model] for model in layouts}


def main(directory: Path) -> None:
    platform, groups, findings = start(), dict[str, ModelGroups](), dict[str, Any]()
    for name, layouts in cases_of(LAYOUTS).items():
        path = directory / name
        beginnings = ("grown", "zero") if name in WITH_ZERO else ("grown",)
        found = findings[name] = {"oracle": {}, "updates": {}}
        if dist.get_rank() == 0:
            models.make(name.removesuffix("_ends").removesuffix("_pissa").removesuffix("_dora"), path)
            found["oracle"] = {beginning: oracle(name, path, beginning) for beginning in beginnings}
        dist.barrier()
        # Only one layout starts with B = 0, because A then gets no gradient.
        for layout, beginning in [(layout, "grown") for layout in layouts] + [(layouts[0], "zero")]:
            if beginning in beginnings:
                made = (moe_groups_of if layout in MOE_LAYOUTS else groups_of)(layout, groups)
                found["updates"][f"{layout}/{beginning}"] = update(name, path, made, platform, beginning)
    path = directory / "qwen3"
    findings["recompute"] = {
        kind: update("qwen3", path, groups_of("tp2_pp2", groups), platform, "grown", recompute)
        for kind, recompute in RECOMPUTE.items()
    }
    findings["dropout"] = {
        layout: measure_dropout(path, groups_of(layout, groups), platform) for layout in ("tp2_dp2", "tp2_dp2_sp")
    }
    findings["initial"] = {layout: initial(path, groups_of(layout, groups), platform) for layout in ("dp4", "tp2_pp2")}
    finish(findings, directory)


# ------------------------------------------------------------------------------------------------------------ oracles
def oracle(name: str, path: Path, beginning: str) -> dict[str, float]:
    """Update adapters with torch's AdamW. Writes the tensors before and after, and logprobs, to files next to the model."""
    hf, geometry = load_hf(path), load_spec(path).geometry
    hf.requires_grad_(False)
    torch.manual_seed(3)
    shapes = hf_shapes(replace(geometry, adapter=SIZES[name]))
    scale = 1.0 if beginning == "grown" else 0.0
    values = {key: 0.1 * torch.randn(shape) * (scale if "lora_B" in key else 1.0) for key, shape in shapes.items()}
    if SIZES[name].fixed:
        values = halves(hf, values)
    for key in values:
        if "magnitude" in key:  # the magnitudes are already trained, but not part of the reference
            weight = hf.get_parameter(f"{key.removeprefix('base_model.model.').partition('.lora_')[0]}.weight")
            values[key] = weight.detach().norm(dim=1) * (1 + scale * values[key])
    save_file(values, path / f"{beginning}.safetensors")
    learns, run = (with_peft if name in OF_PEFT and beside.is_there("peft", "accelerate") else written_out)(
        hf, name, values
    )
    logprobs = [row_logprobs(run, row) for row in rows()]
    save_file({str(n): value.detach() for n, value in enumerate(logprobs)}, path / f"{beginning}_logprobs.safetensors")
    if SIZES[name].use_dora:
        save_file(merged_by_hand(hf, name, values), path / f"{beginning}_merged.safetensors")
    loss = -torch.cat(logprobs).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(list(learns.values()), OPTIMIZER.clip_grad)
    cfg = optimizer_of(name)
    vectors = [value for value in learns.values() if value.dim() == 1]  # vectors are not decayed
    groups = [
        {"params": [value for value in learns.values() if value.dim() > 1]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, cfg.lr, (cfg.beta1, cfg.beta2), eps=cfg.eps, weight_decay=cfg.weight_decay).step()
    after = {key: with_fixed(value.detach(), values[key]) for key, value in learns.items()}
    save_file(after, path / f"{beginning}_after.safetensors")
    with torch.no_grad():
        plain = load_hf(path)
        base = [row_logprobs(lambda ids: plain(ids).logits, row) for row in rows()]
    save_file({str(n): value for n, value in enumerate(base)}, path / "base_logprobs.safetensors")
    return {"loss/sft": float(loss), "actor/grad_norm": float(norm)}


def optimizer_of(name: str) -> OptimizerConfig:
    return OPTIMIZER.model_copy(update={"weight_decay": 0.0}) if SIZES[name].fixed else OPTIMIZER


def halves(hf: Any, noise: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return PiSSA's factors of every weight: trained halves with noise, and the negated initial values as fixed halves."""
    values = {}
    for key in (key for key in noise if "lora_A" in key):
        weight = hf.get_parameter(key.removeprefix("base_model.model.").replace("lora_A.", ""))
        u, s, v = torch.linalg.svd(weight.detach(), full_matrices=False)
        root, b = (s[:3] / 4.0).sqrt(), key.replace("lora_A", "lora_B")
        first, second = root[:, None] * v[:3], u[:, :3] * root
        values[key] = torch.cat([first + 0.1 * noise[b].abs().max() * noise[key][:3], first])
        values[b] = torch.cat([second + 0.1 * noise[b][:, :3], -second], dim=1)
    return values


def with_fixed(learned: Tensor, before: Tensor) -> Tensor:
    """Append the fixed half to the trained half, if there is one."""
    if learned.shape == before.shape:
        return learned
    rows, columns = learned.shape
    below = torch.cat([learned, before[rows:, :columns]])
    return torch.cat([below, before[:, columns:]], dim=1).contiguous()


def row_logprobs(run: Any, row: Any) -> Tensor:
    """Return the logprobs of the response tokens of one row."""
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    log_p = torch.log_softmax(run(ids)[0].float(), dim=-1)
    first = len(row.prompt_ids)
    return torch.stack([log_p[first + t - 1, token] for t, token in enumerate(row.response_ids)])


def merged_by_hand(hf: Any, name: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights whose rows have length m and the direction of W + scale B A (tests/unit/bridge/test_peft.py checks with PEFT)."""
    weights = load_file(Path(hf.config._name_or_path) / "model.safetensors")
    for key in (key for key in values if "magnitude" in key):
        module, head = (
            key.partition(".lora_")[0],
            f"{key.partition('.lora_')[0].removeprefix('base_model.model.')}.weight",
        )
        merged = (
            weights[head] + SIZES[name].scale * values[f"{module}.lora_B.weight"] @ values[f"{module}.lora_A.weight"]
        )
        weights[head] = values[key][:, None] * merged / merged.norm(dim=1, keepdim=True)
    return weights


def with_peft(hf: Any, name: str, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    peft, sizes = beside.peft(), SIZES[name]
    targets = sizes.targets[0] if len(sizes.targets) == 1 else list(sizes.targets)
    cfg = peft.LoraConfig(
        r=sizes.rank, lora_alpha=int(sizes.alpha), target_modules=targets, use_rslora=sizes.use_rslora
    )
    cfg.use_dora = sizes.use_dora
    if sizes.fixed:  # PEFT stores the residual instead of the weight
        cfg.r, cfg.lora_alpha, cfg.init_lora_weights = 3, 12, "pissa"
    model = peft.get_peft_model(hf, cfg)
    learns = {
        key.replace("vector.default.weight", "vector").replace(".default", ""): p
        for key, p in model.named_parameters()
        if p.requires_grad
    }
    assert learns.keys() == values.keys(), "PEFT adapts the same layers"
    with torch.no_grad():
        for key, parameter in learns.items():
            parameter.copy_(values[key][tuple(map(slice, parameter.shape))])
    return learns, lambda ids: model(ids).logits


def written_out(hf: Any, name: str, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """Replace each W by W + scale B A. transformers stores the experts of a layer in one tensor."""
    fixed = SIZES[name].fixed
    learns = {
        key: (value[:fixed] if "lora_A" in key else value[:, :fixed]) if fixed else value
        for key, value in values.items()
    }
    learns = {key: value.clone().requires_grad_() for key, value in learns.items()}
    scale = SIZES[name].alpha / (SIZES[name].rank ** (0.5 if SIZES[name].use_rslora else 1.0))

    def compute_delta(module: str) -> Tensor:
        prefix = f"base_model.model.{module}"
        if module == "model.embed_tokens":
            return scale * (learns[f"{prefix}.lora_embedding_B"] @ learns[f"{prefix}.lora_embedding_A"]).t()
        product = scale * learns[f"{prefix}.lora_B.weight"] @ learns[f"{prefix}.lora_A.weight"]
        if fixed:
            product = product + scale * (
                values[f"{prefix}.lora_B.weight"][:, fixed:] @ values[f"{prefix}.lora_A.weight"][fixed:]
            )
        return product

    def with_magnitude(module: str, merged: Tensor) -> Tensor:
        magnitude = learns.get(f"base_model.model.{module}.lora_magnitude_vector")
        return merged if magnitude is None else (magnitude / merged.detach().norm(dim=1))[:, None] * merged

    def weights() -> Iterator[tuple[str, Tensor]]:
        for key, weight in hf.named_parameters():
            module = key.removesuffix(".weight")
            if {
                f"base_model.model.{module}.lora_A.weight",
                f"base_model.model.{module}.lora_embedding_A",
            } & learns.keys():
                yield key, with_magnitude(module, weight + compute_delta(module))
            elif found := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", key):
                parts = ("gate_proj", "up_proj") if found.group(2) == "gate_up" else ("down_proj",)
                each = [
                    torch.cat([compute_delta(f"{found.group(1)}.{e}.{part}") for part in parts])
                    for e in range(weight.size(0))
                ]
                yield key, weight + torch.stack(each)

    return learns, lambda ids: functional_call(hf, dict(weights()), (ids,)).logits


# ---------------------------------------------------------------------------------------------------------------- ours
def build(
    name: str,
    path: Path,
    groups: ModelGroups,
    platform: Platform,
    dropout: float,
    recompute: RecomputeConfig | None,
    layer_spec: str = "local",
) -> tuple[SupervisedActor, ModelGeometry]:
    spec, sizes = load_spec(path), SIZES[name]
    adapters = replace(spec.geometry, adapter=sizes)
    options = replace(
        BuildOptions("fp32", layer_spec, recompute or RecomputeConfig(), True, False, 0),
        add_adapters=partial(add_adapters, geometry=adapters, layout=groups.layout, dropout=dropout),
    )
    model = build_model(spec, groups, platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    trained = TrainedModel(
        groups.layout,
        model,
        spec,
        TrainerConfig(max_tokens_per_microbatch=64),
        optimizer=optimizer_of(name),
        plan=MinibatchPlan(1000),
        name="actor",
        adapter=sizes,
    )
    return SupervisedActor(trained), adapters


def fill(actor: SupervisedActor, adapters: ModelGeometry, file: Path) -> None:
    """Fill the adapters from a file and build the optimizer."""
    fill_again(actor, adapters, file)
    assert actor.model.model is not None
    actor.model.model.add_optimizer(actor.model.optimizer)


def fill_again(actor: SupervisedActor, adapters: ModelGeometry, file: Path) -> None:
    folder = file.parent / f"{file.stem}_alone_{dist.get_rank()}"
    folder.mkdir(exist_ok=True)
    save_file(load_file(file), folder / "model.safetensors")
    load(actor.model.adapter_parameters(), adapters, HFReader(folder))


def gather(actor: SupervisedActor, adapters: ModelGeometry) -> dict[str, Tensor]:
    model = actor.model.model
    assert model is not None
    pgs = model.groups.collection
    return {k: v.clone() for k, v in Gatherer(model.adapter_parameters(), adapters, pgs.tp, pgs.pp, pgs.tp_ep)}


def update(
    name: str,
    path: Path,
    groups: ModelGroups,
    platform: Platform,
    beginning: str,
    recompute: RecomputeConfig | None = None,
    layer_spec: str = "local",
) -> dict[str, Any]:
    actor, adapters = build(name, path, groups, platform, 0.0, recompute, layer_spec)
    fill(actor, adapters, path / f"{beginning}.safetensors")
    batch, model = batch_for(rows()), actor.model.model
    assert model is not None
    reference = Reference(actor.model, 1.0)
    found = {
        "logprobs": distance(batch, actor.compute_logprobs(batch), path / f"{beginning}_logprobs.safetensors"),
        "reference": distance(batch, reference.compute_logprobs(batch), path / "base_logprobs.safetensors"),
        "metrics": actor.deliver_update(batch)().metrics,
    }
    after = load_file(path / f"{beginning}_after.safetensors")
    found["after"] = any_rank(all_gather_json(first_difference(gather(actor, adapters), after, 1e-5)))
    found["moved"] = max(
        float((after[key] - value).abs().max()) for key, value in load_file(path / f"{beginning}.safetensors").items()
    )
    found["base"] = any_rank(all_gather_json(first_difference(gatherer(model), load_file(path / "model.safetensors"))))
    if adapters.adapter is not None and adapters.adapter.use_dora:
        # Before the update, which has moved what is sent: the norms of rows that ranks share are summed when a sync begins.
        fill_again(actor, adapters, path / f"{beginning}.safetensors")
        expected = load_file(path / f"{beginning}_merged.safetensors")
        found["sent"] = any_rank(all_gather_json(first_difference(gather_sent(actor), expected, 1e-6)))
    assert model.optimizer is not None
    found["shards"] = all_gather_json(sorted({shard.name.rpartition(".")[2] for shard in model.optimizer.shards()}))
    return found


def gather_sent(actor: SupervisedActor) -> dict[str, Tensor]:
    """Return the whole weights that engines receive."""
    cfg, model = Config(), actor.model.model
    assert model is not None
    cfg.actor.lora.rank, cfg.actor.lora.sync = 3, "merge"
    sources = select_sent(cfg, actor.model).sources
    sources.prepare()
    opened = sources.open(SimpleNamespace(source_buffers={p.name for p in model.local_parameters()}))
    merged = [replace(p, tensor=opened[p.name].view(p.tensor.shape)) for p in model.local_parameters()]
    pgs = model.groups.collection
    return {k: v.clone() for k, v in Gatherer(merged, actor.model.spec.geometry, pgs.tp, pgs.pp, pgs.tp_ep)}


def distance(batch: Any, values: Tensor, file: Path) -> float:
    """Return the largest difference between these logprobs and the logprobs in a file."""
    expected = load_file(file)
    worst = 0.0
    for row, found in response_values(batch, values).items():
        worst = max(worst, float((torch.tensor(found) - expected[str(row)]).abs().max()))
    return max(all_gather_json(worst))


def measure_dropout(path: Path, groups: ModelGroups, platform: Platform) -> dict[str, Any]:
    """Return gradient norms with dropout: twice from the same generator state, with recomputed layers, and without dropout."""
    norms = []
    for dropout, recompute in ((0.3, None), (0.3, None), (0.3, RecomputeConfig(granularity="full")), (0.0, None)):
        actor, adapters = build("qwen3", path, groups, platform, dropout, recompute)
        fill(actor, adapters, path / "grown.safetensors")
        torch.manual_seed(11)
        states = {name: torch.Generator().manual_seed(dist.get_rank()).get_state() for name in rng_tracker_states()}
        set_rng_tracker_states(states)
        actor.compute_logprobs(batch_for(rows()))  # without dropout
        norms.append(actor.deliver_update(batch_for(rows()))().grad_norm)
        copies = gather(actor, adapters)
    return {"norms": norms, "finite": all(bool(value.isfinite().all()) for value in copies.values())}


def initial(path: Path, groups: ModelGroups, platform: Platform) -> dict[str, Any]:
    """Return sums of new adapters, and the largest element of A with its bound."""
    actor, adapters = build("qwen3", path, groups, platform, 0.0, None)
    initialize(actor.model.adapter_parameters(), adapters, seed=5)
    values = gather(actor, adapters)
    largest = max(float(v.abs().max()) * v.size(1) ** 0.5 for k, v in values.items() if "lora_A" in k)
    b = max(float(v.abs().max()) for k, v in values.items() if "lora_B" in k)
    return {
        "sums": {k: float(v.double().sum()) for k, v in values.items() if "lora_A" in k},
        "largest": largest,
        "b": b,
    }
