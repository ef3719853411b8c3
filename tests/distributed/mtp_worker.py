"""Train MTP layers on four ranks. Compare them with transformers' layers, row by row, and through checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_mcore.bridge.files.carried import CarriedTensors
from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.gather import Gatherer
from rlhf_mcore.bridge.files.saved_model import SavedModel
from rlhf_mcore.bridge.map.rules import hf_shapes, part_of
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.data.examples import example_batch
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.mtp import MTPLearning
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.planning.inputs import PlannedRole
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.policy import Actor, SupervisedActor
from rlhf_mcore.roles.role_files import RoleFiles
from tests.difference import any_rank, first_difference
from tests.distributed import models
from tests.distributed.planning_worker import compare_state
from tests.distributed.setting import (
    TEMPERATURE,
    Settings,
    batch_for,
    build,
    finish,
    gatherer,
    load_hf,
    moe_groups_of,
    rows,
    start,
)
from tests.distributed.state_worker import assemble, save, train, weights_of
from tests.distributed.update_worker import fill
from tests.episodes import make_example
from tests.planned_bridge import planned_bridge
from tests.unit.bridge.engine import Engine

LAYERS = {"deepseek_v3": 1, "glm4_moe": 2}  # MTP layers of each model
COEF, CLIP = 0.3, 0.5
# The clipping norm is summed over other shards, so its relative error can be 1e-5. AdamW's first update, 1e-2 g / (|g| + eps), then
# changes by at most a quarter of that, 2.5e-8. A weight of up to 2 in magnitude is rounded to the next value, 2**-23 away, or to the
# value after it.
ROUNDED = 2 * 2**-23 + 2.5e-8
CASES = {
    "deepseek_v3": {"tp2_sp_pp2_ep2_etp1": True, "pp2_ep2_dp2_uneven": False},
    "glm4_moe": {"pp2_vpp2_ep2_dp2": True},
}  # layout -> packed
JOINT = ("tp2_sp_pp2_ep2_etp1",)
CIRCLE = ("tp2_sp_pp2_ep2_etp1", "ep2_dp4", "tp2_sp_pp2_ep2_etp1")


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {"alone": {}, "joint": {}, "oracle": {}}
    for name, count in LAYERS.items():
        path = directory / name
        if dist.get_rank() == 0:
            models.make(name, path)
            models.make(name, directory / f"{name}_reference", seed=7)
            for number in range(count):
                models.add_mtp_layer(path, count=number + 1)
            findings["oracle"][name] = alone_oracle(path, directory / f"{name}_mtp")
        dist.barrier()
        reference, expected = load_hf(directory / f"{name}_reference"), load_file(directory / f"{name}_mtp")
        for layout, packed in CASES[name].items():
            made = moe_groups_of(layout, groups)
            findings["alone"][f"{name}/{layout}"] = alone(path, made, platform, packed, reference, expected)
    path = directory / "glm4_moe"
    if dist.get_rank() == 0:
        findings["oracle"]["joint"] = joint_oracle(path, directory / "joint")
    dist.barrier()
    expected = load_file(directory / "joint")
    for layout in JOINT:
        findings["joint"][layout] = joint(path, moe_groups_of(layout, groups), platform, expected)
    findings["circle"] = circle(directory, "deepseek_v3", groups, platform)
    finish(findings, directory)


def learn(actor: Actor, reference: torch.nn.Module) -> dict[str, float]:
    batch = batch_for(rows())
    fill(batch, reference)
    return actor.deliver_update(batch)().metrics


def alone(
    path: Path,
    groups: ModelGroups,
    platform: Platform,
    packing: bool,
    reference: torch.nn.Module,
    expected: dict[str, Tensor],
) -> dict[str, Any]:
    """Compare an update with MTP layers and an update without."""
    settings = {"max_tokens": 24, "packing": packing, "expert_bias_rate": 0.01}
    model, actor = build(path, groups, platform, Settings(**settings, mtp=MTPLearning(temperature=TEMPERATURE)))
    metrics, found = learn(actor, reference), dict(gatherer(model))
    of_mtp = {name: tensor for name, tensor in found.items() if name in expected}
    trunk = {name: tensor for name, tensor in found.items() if name not in expected}
    without, actor = build(path, groups, platform, Settings(**settings))
    plain = learn(actor, reference)
    pgs, geometry = model.groups.collection, model.spec.geometry
    sent = Gatherer(part_of(model.local_parameters(), geometry, geometry.trunk), geometry, pgs.tp, pgs.pp, pgs.tp_ep)
    return {
        "sent": any_rank(all_gather_json(first_difference(sent, trunk))),
        "metrics": metrics,
        "plain": plain,
        "trunk": any_rank(all_gather_json(first_difference(gatherer(without), trunk, tolerance=ROUNDED))),
        "mtp": any_rank(all_gather_json(first_difference(of_mtp, expected, tolerance=1e-5))),
        "copies": any_rank(all_gather_json(copies_differ(model))),
    }


def copies_differ(model: MegatronModel) -> str:
    """Return whether the embedding on the last pipeline stage differs from the first stage. Collective over the model's ranks."""
    held = {p.name: p.tensor for p in model.local_parameters() if "embedding" in p.name}
    group = model.groups.collection.embd
    for tensor in held.values():
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        if not all(torch.equal(part, parts[0]) for part in parts):
            return f"{sorted(held)} differ between the stages"
    return "" if len(held) == 1 or model.groups.layout.pp > 1 else str(sorted(held))


def joint(path: Path, groups: ModelGroups, platform: Platform, expected: dict[str, Tensor]) -> dict[str, Any]:
    """Update all weights once on given responses."""
    recompute = RecomputeConfig(granularity="full", num_layers=2)
    settings = Settings(max_tokens=48, recompute=recompute, mtp=MTPLearning(alone=False, coef=COEF))
    model, actor = build(path, groups, platform, settings)
    batch = example_batch([make_example(row.prompt_ids, row.response_ids) for row in rows()])
    metrics = SupervisedActor(actor.model).deliver_update(batch)().metrics
    difference = first_difference(gatherer(model), expected, tolerance=1e-5)
    return {
        **metrics,
        "weights": any_rank(all_gather_json(difference)),
        "copies": any_rank(all_gather_json(copies_differ(model))),
    }


# ------------------------------------------------------------------------------------------ written down naively
class Plain(torch.nn.Module):
    """A transformers model followed by MTP layers: further decoder layers and their extra tensors."""

    def __init__(self, path: Path):
        super().__init__()
        config, held = AutoConfig.from_pretrained(path), load_file(path / "model.safetensors")
        count = config.num_nextn_predict_layers
        self.first = config.num_hidden_layers
        config.num_hidden_layers += count
        for name in ("layer_types", "mlp_layer_types"):  # one entry per layer
            if (kinds := getattr(config, name, None)) is not None:
                setattr(config, name, [*kinds, *kinds[-1:] * count])
        if (kinds := getattr(config, "indexer_types", None)) is not None:
            config.indexer_types = [*kinds, *["full"] * count]  # each has an indexer
        self.hf: Any = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()
        self.layers = self.hf.model.layers[self.first :]
        self.hf.model.layers = self.hf.model.layers[: self.first]
        hidden = config.hidden_size
        self.extra = torch.nn.ModuleDict()
        for number in range(self.first, self.first + count):
            parts = {
                name: torch.nn.RMSNorm(hidden, eps=config.rms_norm_eps) for name in ("enorm", "hnorm", "shared_head")
            }
            parts["eh_proj"] = torch.nn.Linear(2 * hidden, hidden, bias=False)
            for name, module in parts.items():
                key = f"model.layers.{number}.{'shared_head.norm' if name == 'shared_head' else name}.weight"
                module.weight.data.copy_(held[key].float())
            self.extra[str(number)] = torch.nn.ModuleDict(parts)

    def nll(self, tokens: list[int], prompt: int, temperature: float, *, alone: bool) -> tuple[Tensor, Tensor, int]:
        """Return the nll of the responses, their nll summed over MTP layers, and the number of tokens that these predict."""
        ids, hf = torch.tensor([tokens]), self.hf
        states = hf.model(ids).last_hidden_state
        positions = torch.arange(len(tokens))[None]
        rotation = hf.model.rotary_emb(states, positions)
        embedded, head = hf.model.embed_tokens(ids), hf.lm_head.weight
        log_p = torch.log_softmax(states[0] @ head.t() / temperature, -1)
        own = -sum(log_p[t - 1, tokens[t]] for t in range(prompt, len(tokens)))
        if alone:
            states, embedded, head = states.detach(), embedded.detach(), head.detach()
        total, predicted = torch.zeros(()), 0
        for depth, (parts, layer) in enumerate(zip(self.extra.values(), self.layers, strict=True), 1):
            length = len(tokens) - depth
            if length < 1:
                break
            both = torch.cat([parts["enorm"](embedded[:, depth:]), parts["hnorm"](states[:, :length])], dim=-1)
            cut = tuple(part[:, :length] for part in rotation)
            mask = torch.full((1, 1, length, length), -torch.inf).triu(1)  # an indexer reads it
            states = layer(
                parts["eh_proj"](both),
                attention_mask=mask,
                position_embeddings=cut,
                position_ids=positions[:, :length],
            )
            states = parts["shared_head"](states[0] if isinstance(states, tuple) else states)
            log_p = torch.log_softmax(states[0] @ head.t() / temperature, -1)
            for t in range(max(prompt, depth + 1), len(tokens)):
                total, predicted = total - log_p[t - depth - 1, tokens[t]], predicted + 1
        return own, total, predicted

    def mtp_parameters(self) -> list[torch.nn.Parameter]:
        return [*self.layers.parameters(), *self.extra.parameters()]

    def tensors(self, directory: Path, *, whole: bool) -> dict[str, Tensor]:
        """Return the tensors of MTP layers, or of the whole model, under their names in files."""
        self.hf.model.layers.extend(self.layers)
        self.hf.save_pretrained(directory)
        found = load_file(directory / "model.safetensors")
        prefixes = [f"model.layers.{number}." for number in self.extra]
        found = {name: t for name, t in found.items() if whole or name.startswith(tuple(prefixes))}
        for number, parts in self.extra.items():
            for name, module in parts.items():
                file = "shared_head.norm" if name == "shared_head" else name
                found[f"model.layers.{number}.{file}.weight"] = module.weight.detach().clone()
        return found


def step(parameters: list[torch.nn.Parameter]) -> float:
    """Step with clipping and AdamW, as in the trainer's tests."""
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, CLIP))
    decayed, plain = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    kinds = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    torch.optim.AdamW(kinds, lr=1e-2, eps=1e-3, betas=(0.9, 0.999)).step()
    return norm


def alone_oracle(path: Path, target: Path) -> dict[str, float]:
    plain, total, predicted = Plain(path), torch.zeros(()), 0
    num_tokens = sum(len(row.response_ids) for row in rows())
    for row in rows():
        _, nll, count = plain.nll(row.prompt_ids + row.response_ids, len(row.prompt_ids), TEMPERATURE, alone=True)
        total, predicted = total + nll, predicted + count
    (total / num_tokens / len(plain.layers)).backward()
    norm = step(plain.mtp_parameters())
    write(plain.tensors(target.with_suffix(".hf"), whole=False), target)
    return {"mtp_loss": float(total) / predicted, "grad_norm": norm}


def joint_oracle(path: Path, target: Path) -> dict[str, float]:
    plain, own, total, predicted = Plain(path), torch.zeros(()), torch.zeros(()), 0
    num_tokens = sum(len(row.response_ids) for row in rows())
    for row in rows():
        sft, nll, count = plain.nll(row.prompt_ids + row.response_ids, len(row.prompt_ids), 1.0, alone=False)
        own, total, predicted = own + sft, total + nll, predicted + count
    ((own + COEF / len(plain.layers) * total) / num_tokens).backward()
    norm = step([*plain.hf.parameters(), *plain.mtp_parameters()])
    write(plain.tensors(target.with_suffix(".hf"), whole=True), target)
    return {"loss": float(own) / num_tokens, "mtp_loss": float(total) / predicted, "grad_norm": norm}


def write(tensors: dict[str, Tensor], target: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target)


# --------------------------------------------------------------------------------------------------- checkpoints
def circle(directory: Path, name: str, groups: dict[str, ModelGroups], platform: Platform) -> dict[str, Any]:
    """Train, save, and reload at each layout, as in ``state_worker.circle``."""
    source, reference = directory / name, load_hf(directory / f"{name}_reference")
    settings = Settings(max_tokens=48, mtp=MTPLearning(temperature=TEMPERATURE))

    def files_of(model: MegatronModel, actor: Actor) -> RoleFiles:
        geometry = model.spec.geometry
        carried = CarriedTensors(source, geometry)
        assert not carried.types and len(carried.copies) == 2
        exporter = Exporter(
            model.local_parameters(),
            geometry,
            [str(source)],
            world_group(),
            bucket_bytes=4096,
            shard_bytes=150_000,
            carried=carried,
        )
        return RoleFiles("actor", actor.model, exporter)

    saved = [directory / f"circle_{number}" for number in range(len(CIRCLE) + 1)]
    model, actor = build(source, moe_groups_of(CIRCLE[0], groups), platform, settings)
    train(actor, reference)
    save(files_of(model, actor), saved[0])
    geometry, all_of_model = model.spec.geometry, dict(gatherer(model))
    engine = Engine(hf_shapes(geometry), torch.float32)
    options: dict[str, Any] = {"bucket_bytes": 20_000, "verify": True, "poison": True}
    planned_bridge(model.local_parameters(), geometry, engine, world_group(), **options).sync(0)
    synced = first_difference(engine.tensors, {name: all_of_model[name] for name in hf_shapes(geometry)})
    role = PlannedRole("actor", geometry, model.groups.layout, True, "fp32")
    found: dict[str, Any] = {"synced": synced, "bytes": compare_state(model, actor, role)["state"]}
    found |= {"uninterrupted": train(actor, reference), "resumed": {}}
    for number, layout in enumerate(CIRCLE):
        model, actor = build(saved[number] / "actor", moe_groups_of(layout, groups), platform, settings)
        files = files_of(model, actor)
        files.load_state(saved[number])
        write = files.snapshot()
        found["resumed"][f"{number} {layout}"] = train(actor, reference)
        save(lambda path, write=write: write(path), saved[number + 1])
    states = [assemble(path / "actor" / "training") for path in saved]
    tensors = [weights_of(path / "actor") for path in saved]
    found["moments"] = [first_difference(state, states[0]) for state in states]
    found["weights"] = [first_difference(held, tensors[0]) for held in tensors]
    found["names"] = sorted(set(tensors[0]) ^ set(load_file(source / "model.safetensors")))
    first = "model.layers.4."
    repeated = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    found["repeated"] = [torch.equal(tensors[0][first + of], tensors[0][name]) for of, name in repeated.items()]
    before = load_file(source / "model.safetensors")
    found["moved"] = float((tensors[0][f"{first}eh_proj.weight"] - before[f"{first}eh_proj.weight"]).abs().max())
    found["count"] = json.loads((saved[0] / "actor/config.json").read_text())["num_nextn_predict_layers"]
    model = SavedModel(saved[0] / "actor", saved[0] / "actor/training")
    assert model.find_problem(range(len(model.tensors))) is None
    return found
