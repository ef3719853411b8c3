"""Save and load weights and optimizer state between layouts on four ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import OptimizerConfig
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.collectives import all_gather_json, reduce_sums, world_group
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.roles.role_files import RoleFiles
from tests.difference import any_rank, first_difference, zeros_like
from tests.distributed import models
from tests.distributed.setting import (
    MOE_LAYOUTS,
    Settings,
    batch_for,
    build,
    finish,
    groups_of,
    hf_logprobs,
    load_hf,
    moe_groups_of,
    rows,
    start,
)
from tests.distributed.update_worker import fill
from tests.planned_bridge import planned_bridge
from tests.rows import rows_of_padded
from tests.unit.bridge.engine import Engine

# The default tier contains two more models, one of them trained by Muon (layers_worker.py).
CIRCLES = {
    "qwen3_tied": ("pp2_cp2", "dp4", "tp2_pp2", "pp2_cp2"),
    "qwen2": ("tp2_pp2_vpp2_sp", "tp4", "tp2_pp2_vpp2_sp"),
    "qwen2_moe": ("tp2_sp_pp2_ep2_etp1", "tp4_sp_ep2_etp1", "cp2_ep4_dp2", "tp2_sp_pp2_ep2_etp1"),
    # Latent attention, and expert biases, which no optimizer holds.
    "deepseek_v3": ("tp2_sp_cp2_ep2_etp1", "pp2_ep2_dp2_uneven", "cp4_ep2", "tp2_sp_cp2_ep2_etp1"),
    # Stacked and transposed experts, published in mxfp4.
    "gpt_oss": ("tp2_sp_pp2_ep2_etp1", "cp4_ep2", "tp2_sp_pp2_ep2_etp1"),
    # Stacked experts that ranks split, layers with other heads, and scales of layers, which no optimizer holds.
    "gemma4_text_moe": ("tp2_sp_pp2_ep2_etp1", "ep2_etp2_dp4", "tp2_sp_pp2_ep2_etp1"),
}
# Shares of the optimizer state in host memory by layout. A run that resumes at another layout changes the share.
SHARES = {"tp2_pp2_vpp2_sp": 0.5, "tp4": 1.0, "cp4_ep2": 0.5}
STEPS_BEFORE, BIAS_RATE = 2, 0.01
MUON = ("qwen3_moe",)  # trained by Muon; AdamW trains the others
LR, DECAY, MOMENTUM = 1e-2, 0.1, 0.9


def main(directory: Path) -> None:
    world = World(directory, CIRCLES)
    findings: dict[str, Any] = {"circles": {}, "precision": {}}
    for name, layouts in CIRCLES.items():
        findings["circles"][name] = circle(world, name, layouts)
    for dtype in ("bf16", "fp16"):
        findings["precision"][dtype] = there_and_back(world, dtype)
    findings["untrained"] = save_untrained(world)
    findings["mixed"] = mixed_up(world)
    findings["not_finite"] = {
        "gradient": not_finite(world, poison_gradient),
        "loss": not_finite(world, poison_loss),
    }
    findings["spoiled"] = {kind: spoil_state(world, kind) for kind in ("exp_avg", "exp_avg_sq", "master")}
    finish(findings, directory)


class World:
    """Objects that the checks share."""

    def __init__(self, directory: Path, names: Iterable[str]):
        self.directory = directory
        self.platform: Platform = start()
        self.groups: dict[str, ModelGroups] = {}
        for name in names:
            if dist.get_rank() == 0:
                models.make(name, directory / name)
                models.make(name, directory / f"{name}_reference", seed=7)
                if name == "gpt_oss":
                    models.pack(directory / name)
        dist.barrier()

    def build(self, name: str, path: Path, layout: str, dtype: str = "fp32") -> tuple[MegatronModel, Actor]:
        make = moe_groups_of if layout in MOE_LAYOUTS else groups_of
        settings = Settings(dtype=dtype, max_tokens=48, expert_bias_rate=BIAS_RATE * (name == "deepseek_v3"))
        share = 0.5 if dtype == "fp16" else SHARES.get(layout, 0.0)
        settings.optimizer = OptimizerConfig(lr=LR, eps=1e-3, clip_grad=0.5, weight_decay=DECAY, offload=share)
        if name in MUON:
            settings.optimizer = OptimizerConfig(
                name="muon", momentum=MOMENTUM, lr=LR, eps=1e-3, clip_grad=0.5, weight_decay=DECAY
            )
        return build(path, make(layout, self.groups), self.platform, settings)

    def files(self, model: MegatronModel, actor: Actor, companions: Path) -> RoleFiles:
        geometry = model.spec.geometry
        exporter = Exporter(
            model.local_parameters(), geometry, [str(companions)], world_group(), bucket_bytes=4096, shard_bytes=150_000
        )
        return RoleFiles("actor", actor.model, exporter)


def train(actor: Actor, reference: torch.nn.Module) -> dict[str, float]:
    batch = batch_for(rows())
    fill(batch, reference)
    return actor.deliver_update(batch)().metrics


def last_norm(model: str) -> str:
    return "backbone.norm_f.weight" if model.startswith("nemotron") else "model.norm.weight"


def circle(world: World, name: str, layouts: tuple[str, ...]) -> dict[str, Any]:
    """Train and save. At each layout, load, save again and run the next step. All files stay for comparison."""
    reference = load_hf(world.directory / f"{name}_reference")
    model, actor = world.build(name, world.directory / name, layouts[0])
    for _ in range(STEPS_BEFORE):
        train(actor, reference)
    files = world.files(model, actor, world.directory / name)
    saved = [world.directory / f"{name}_{number}" for number in range(len(layouts) + 1)]
    save(files, saved[0])
    expected = int(reduce_sums({"num_bytes": float(files.num_bytes())})["num_bytes"])
    written = sum(path.stat().st_size for path in saved[0].rglob("*") if path.is_file())
    differs = logprob_difference(actor, load_hf(saved[0] / "actor"))
    synced = first_difference(sync(model), weights_of(saved[0] / "actor"))
    found = {"uninterrupted": train(actor, reference), "resumed": {}, "steps": [], "logprob_difference": differs}
    found |= {"synced": synced, "biases": moved_biases(world.directory / name, saved[0] / "actor")}
    after = weights(files, world.directory / f"{name}_after")
    for number, layout in enumerate(layouts):
        model, actor = world.build(name, saved[number] / "actor", layout)
        files = world.files(model, actor, world.directory / name)
        files.load_state(saved[number])
        found["steps"].append(model.optimizer.scalars()["step"])
        # A snapshot that is written after the next update must be unchanged.
        write = files.snapshot()
        found["resumed"][f"{number} {layout}"] = train(actor, reference)
        save(lambda path, write=write: write(path), saved[number + 1])
    found["after_the_circle"] = first_difference(weights(files, world.directory / f"{name}_again"), after)
    states = [assemble(path / "actor" / "training") for path in saved]
    found["muon"] = of_slow_muon(saved[0] / "actor", world.directory / f"{name}_after" / "actor")
    found["moments"] = [first_difference(state, states[0]) for state in states]
    found["weights"] = [first_difference(weights_of(p / "actor"), weights_of(saved[0] / "actor")) for p in saved]
    found["files"] = [sorted(p.name for p in (path / "actor" / "training").iterdir()) for path in saved]
    found["size"] = [expected, written]
    found["moved"] = float(states[0][f"exp_avg/{last_norm(name)}"].abs().max())
    return found


def sync(model: MegatronModel) -> dict[str, torch.Tensor]:
    """Return the tensors of an engine after a sync. The engine is filled with NaN before, so every element comes from the sync."""
    geometry = model.spec.geometry
    engine = Engine(hf_shapes(geometry), torch.float32)
    options: dict[str, Any] = {"bucket_bytes": 20_000, "verify": True, "poison": True}
    planned_bridge(model.local_parameters(), geometry, engine, world_group(), **options).sync(0)
    return engine.tensors


def of_slow_muon(before: Path, after: Path) -> dict[str, float]:
    """Return for each matrix the largest relative difference between its update and the papers' update of the whole matrix."""
    old, new = weights_of(before), weights_of(after)
    first, second = (assemble(path / "training") for path in (before, after))
    found = {}
    for name in (key.removeprefix("momentum/") for key in first if key.startswith("momentum/")):
        was, is_now = (state[f"momentum/{name}"].double() for state in (first, second))
        direction = (is_now - MOMENTUM * was) + MOMENTUM * is_now  # the gradient, and Nesterov's momentum
        matrix = direction / direction.norm()
        for _ in range(5):
            square = matrix @ matrix.T
            matrix = 3.4445 * matrix - 4.7750 * square @ matrix + 2.0315 * square @ square @ matrix
        expected = -LR * (0.2 * max(matrix.shape) ** 0.5 * matrix + DECAY * old[name].double())
        found[name] = float((new[name].double() - old[name].double() - expected).norm() / expected.norm())
    return found


def moved_biases(before: Path, after: Path) -> list[float]:
    """Return for each layer the largest change of an expert bias."""
    old, new = HFReader(before), weights_of(after)
    names = [name for name in sorted(new) if name.endswith("e_score_correction_bias")]
    return [float((new[name] - old.read(name, (slice(None),))).abs().max()) for name in names]


def logprob_difference(actor: Actor, hf: torch.nn.Module) -> float:
    """Return the largest difference between the trainer's logprobs and transformers' logprobs with the checkpoint."""
    batch = batch_for(rows())
    found, worst = rows_of_padded(batch, actor.compute_logprobs(batch)), 0.0
    for row, source in enumerate(rows()):
        with torch.no_grad():
            expected, _ = hf_logprobs(hf, source)
        worst = max(worst, float((torch.tensor(found[row]) - expected).abs().max()))
    return worst


def not_finite(world: World, poison: Callable[[MegatronModel, list[Any]], None]) -> dict[str, Any]:
    """If one rank has a NaN, no rank makes the update, and all ranks make the next one.

    ``poison(model, sums)`` runs on each rank after gradients and losses are computed.
    """
    reference = load_hf(world.directory / "qwen2_reference")
    model, actor = world.build("qwen2", world.directory / "qwen2", "tp2_pp2")
    before = {p.name: p.tensor.clone() for p in model.local_parameters()}

    class Poisoned(MegatronModel):
        def forward_backward(self, *arguments: Any) -> Any:
            sums = super().forward_backward(*arguments)
            poison(self, sums)
            return sums

    actor.model.model = Poisoned(*(getattr(model, field.name) for field in fields(model)))
    skipped = train(actor, reference)
    actor.model.model = model
    changed = first_difference({p.name: p.tensor for p in model.local_parameters()}, before)
    made = train(actor, reference)
    return {
        "skipped": all_gather_json([skipped["actor/skipped_updates"], skipped["actor/bad_updates_in_a_row"]]),
        "changed": any_rank(all_gather_json(changed)),
        "made": all_gather_json([made["actor/skipped_updates"], made["actor/bad_updates_in_a_row"]]),
        "loss": made["loss/total"],
    }


def poison_gradient(model: MegatronModel, sums: list[Any]) -> None:
    if dist.get_rank() == 1:
        model.chunks[0].buffers[0].grad_data[3] = torch.nan


def poison_loss(model: MegatronModel, sums: list[Any]) -> None:
    """Set the loss to NaN on one of the two tensor-parallel ranks of the last stage."""
    assert model.groups.layout.tp == 2 and dist.get_world_size() == 4
    if dist.get_rank() == 3:
        sums[0].loss.fill_(torch.nan)


def spoil_state(world: World, kind: str) -> dict[str, Any]:
    """Put a NaN into one rank's optimizer state, which the gradient does not show."""
    reference = load_hf(world.directory / "qwen2_reference")
    model, actor = world.build("qwen2", world.directory / "qwen2", "tp2_pp2", "bf16")
    sound = train(actor, reference)
    if dist.get_rank() == 2:
        model.optimizer.shards()[-1].tensors[kind][1] = torch.nan
    after = train(actor, reference)
    files = world.files(model, actor, world.directory / "qwen2")
    return {
        "sound": all_gather_json("actor/not_finite" in sound),
        "spoiled": all_gather_json(after.get("actor/not_finite")),
        "grad_norm": after["actor/grad_norm"],
        "may_be_saved": all_gather_json(files.is_finite()),
    }


def save(files: RoleFiles | Callable[[Path], Any], path: Path) -> None:
    """Save live tensors, or the result of a snapshot."""
    write = files.write if isinstance(files, RoleFiles) else files
    write(path)
    dist.barrier()


def weights(files: RoleFiles, path: Path) -> dict[str, torch.Tensor]:
    save(files, path)
    return weights_of(path / "actor")


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


def assemble(directory: Path) -> dict[str, torch.Tensor]:
    """Assemble the whole tensors of a state from the index, without the reader. Returns them by kind and name."""
    index = json.loads((directory / "index.json").read_text())
    held = [load_file(directory / name) for name in index["files"]]
    whole = {}
    for name, entry in index["tensors"].items():
        for kind in entry["kinds"]:
            full = whole[f"{kind}/{name}"] = torch.full(entry["shape"], torch.nan)
            for file, begin, shape in entry["regions"]:
                spans = ",".join(f"{a}:{a + n}" for a, n in zip(begin, shape, strict=True))
                full[tuple(slice(a, a + n) for a, n in zip(begin, shape, strict=True))] = held[file][
                    f"{kind}/{name}[{spans}]"
                ]
    return whole


def there_and_back(world: World, dtype: str) -> dict[str, Any]:
    """With 16-bit weights, the masters are saved too, and a resumed run continues with the same bits."""
    name, reference = "qwen3_tied", load_hf(world.directory / "qwen3_tied_reference")
    model, actor = world.build(name, world.directory / name, "tp2_dp2", dtype)
    for _ in range(STEPS_BEFORE):
        train(actor, reference)
    files = world.files(model, actor, world.directory / name)
    saved = world.directory / dtype
    save(files, saved)
    going_on = [train(actor, reference) for _ in range(2)]
    expected = weights(files, world.directory / f"{dtype}_after")
    scalars = model.optimizer.scalars()
    model, actor = world.build(name, saved / "actor", "tp2_dp2", dtype)
    files = world.files(model, actor, world.directory / name)
    files.load_state(saved)
    resumed = [train(actor, reference) for _ in range(2)]
    return {
        "kinds": json.loads((saved / "actor/training/index.json").read_text())["tensors"]["model.norm.weight"]["kinds"],
        "weights": first_difference(weights(files, world.directory / f"{dtype}_again"), expected),
        "state": first_difference(
            *(assemble(world.directory / f"{dtype}_{x}" / "actor/training") for x in ("again", "after"))
        ),
        "metrics": [going_on, resumed],
        "scalars": [scalars, model.optimizer.scalars()],
    }


def save_untrained(world: World) -> dict[str, Any]:
    """Before the first update there are no moments. They are saved as zeros, which change nothing."""
    reference = load_hf(world.directory / "qwen2_reference")
    results = []
    for saves in (True, False):
        model, actor = world.build("qwen2", world.directory / "qwen2", "tp2_pp2")
        if saves:
            save(world.files(model, actor, world.directory / "qwen2"), world.directory / "untrained")
            zeros = assemble(world.directory / "untrained/actor/training")
        results.append(train(actor, reference))
    return {"state": first_difference(zeros, zeros_like(zeros)), "metrics": results}


def mixed_up(world: World) -> list[str]:
    """Combine the weights of one step with the state of another. Every rank that holds a part must report it."""
    model, actor = world.build("qwen3_tied", world.directory / "bf16_after" / "actor", "tp2_dp2", "bf16")
    files = world.files(model, actor, world.directory / "qwen3_tied")
    message = ""
    try:
        files.load_state(world.directory / "bf16")
    except ConfigError as error:
        message = str(error)
    # A state with another precision contains no masters.
    other = ""
    load(model.local_parameters(), model.spec.geometry, HFReader(world.directory / "qwen3_tied_0" / "actor"))
    try:
        files.load_state(world.directory / "qwen3_tied_0")
    except ConfigError as error:
        other = str(error)
    assert model.optimizer.shards()
    return [*all_gather_json(message), *all_gather_json(other)]
