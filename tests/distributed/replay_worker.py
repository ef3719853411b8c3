"""Replay given routes on every layout of experts, and compare with transformers whose routers are forced to use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.roles.policy import Actor, logprobs_of, recorded_routes, routes_of
from rlhf_mcore.types import ROUTES, Microbatch, TrainBatch
from tests.distributed import models, update_worker
from tests.distributed.setting import (
    TEMPERATURE,
    Settings,
    batch_for,
    build,
    finish,
    hf_logprobs,
    load_hf,
    moe_groups_of,
    response_values,
    rows,
    start,
)
from tests.distributed.update_worker import update

# The first model uses every kind of split. The others have other routers: sigmoid with biases and groups, groups by best expert.
LAYOUTS = {
    "qwen3_moe_mixed": (
        "dp4",
        "ep2_etp2_dp4",
        "tp2_sp_ep2_dp2",
        "pp2_vpp2_ep2_dp2",
        "tp2_sp_pp2_ep2_etp1",
        "cp4_ep2",
        "tp2_sp_cp2_ep2_etp1",
        "pp2_ep2_dp2_uneven",
    ),
    "deepseek_v3": ("tp2_sp_ep2_etp1_dp2", "pp2_vpp2_ep2_dp2"),
    "deepseek_v2": ("tp2_sp_pp2_ep2_etp1",),
}
RECOMPUTE = {
    "uniform": RecomputeConfig(granularity="full", num_layers=1),
    "block": RecomputeConfig(granularity="block", num_layers=1),
    "selective": RecomputeConfig(granularity="selective", modules=["moe", "core_attn"]),
}
RECOMPUTED = {"pp2_vpp2_ep2_dp2": "uniform", "tp2_sp_cp2_ep2_etp1": "block", "tp2_sp_pp2_ep2_etp1": "selective"}
UNKNOWN = 5  # every fifth input has no recorded route


def main(directory: Path) -> None:
    platform = start()
    groups: dict[str, ModelGroups] = {}
    findings: dict[str, Any] = {"oracle": {}, "updates": {}, "passes": {}, "recorded": {}}
    for name, layouts in LAYOUTS.items():
        path, reference = directory / name, directory / f"{name}_reference"
        if dist.get_rank() == 0:
            models.make(name, path)
            models.make(name, reference, seed=7)
        dist.barrier()
        hf, frozen = load_hf(path), load_hf(reference)
        given = routes_of_rows(hf)
        if dist.get_rank() == 0:
            findings["oracle"][name] = forced_oracle(path, frozen, directory / f"{name}_after", given)
        dist.barrier()
        after = load_file(directory / f"{name}_after" / "model.safetensors")
        with torch.no_grad(), force_routes(hf, given):
            expected = [hf_logprobs(hf, row)[0] for row in rows()]
        for layout in layouts:
            recompute = RECOMPUTED.get(layout) if name == "qwen3_moe_mixed" else None
            settings = Settings(
                max_tokens=24,
                packing="cp" in layout or layout != "dp4",
                recompute=RECOMPUTE[recompute] if recompute else None,
                router_replay="rollout",
            )
            mine, key = moe_groups_of(layout, groups), f"{name}/{layout}"
            complete = partial(give, given=given)
            findings["updates"][key] = update(path, mine, platform, settings, frozen, after, complete=complete)
            _, actor = build(path, mine, platform, settings)
            findings["passes"][key] = passes(actor, given, expected)
            recording = Actor(actor.model, TEMPERATURE, actor.algorithm, router_replay="old_logprobs")
            findings["recorded"][key] = compare_routes(recording, hf)
    path = directory / "qwen3_moe_mixed"
    # Every rank holds the whole gradient of the router. All routes are given, because a free choice would change within a step.
    mine = moe_groups_of("tp4_sp_ep2_etp1", groups)
    model, actor = build(path, mine, platform, Settings(router_replay="rollout"))
    findings["differences"] = finite_differences(model, actor, routes_of_rows(load_hf(path), unknown=False))
    finish(findings, directory)


# ---------------------------------------------------------------------------------------------------------------- routes
def gates(hf: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer.mlp.gate for layer in hf.model.layers if hasattr(layer.mlp, "gate")]


@torch.no_grad()
def own_routes(hf: torch.nn.Module, ids: list[int]) -> Tensor:
    """Return the experts of each input [n, layers, k], sorted, chosen by transformers."""
    taken: list[Tensor] = []
    hooks = [gate.register_forward_hook(lambda _m, _a, out: taken.append(out[2])) for gate in gates(hf)]
    hf(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return torch.stack([each.view(-1, each.size(-1)) for each in taken], dim=1).sort(-1).values


def routes_of_rows(hf: torch.nn.Module, *, unknown: bool = True) -> list[Tensor]:
    """Return for every row experts of its inputs [n, layers, k] that no router would choose; -1 if the route is unknown."""
    generator = torch.Generator().manual_seed(5)
    count, chosen = hf.config.num_experts if hasattr(hf.config, "num_experts") else hf.config.n_routed_experts, []
    for row in rows():
        n = len(row.prompt_ids) + len(row.response_ids)
        scores = torch.rand(n, len(gates(hf)), count, generator=generator)
        routes = scores.topk(hf.config.num_experts_per_tok).indices
        if unknown:
            routes[UNKNOWN - 1 :: UNKNOWN] = -1
        chosen.append(routes)
    return chosen


def field_of(given: Tensor) -> Tensor:
    """Shift the routes of an input to the token after it."""
    return torch.cat([torch.zeros_like(given[:1]), given[:-1] + 1]).to(torch.int16)


def give(batch: TrainBatch, given: list[Tensor]) -> None:
    batch.fields[ROUTES] = torch.cat([field_of(given[0])[:0], *(field_of(given[row]) for row in batch.rows.tolist())])


@contextmanager
def force_routes(hf: torch.nn.Module, given: list[Tensor]) -> Iterator[list[int]]:
    """Force transformers to use given routes, with weights as in the papers. Yields the number of changed choices."""
    by_ids = {tuple(row.prompt_ids + row.response_ids): routes for row, routes in zip(rows(), given, strict=True)}
    current: list[Tensor] = []
    changed = [0, 0]
    config = hf.config

    def begin(module: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        current[:] = [by_ids[tuple(ids[0].tolist())]]

    def choose(module: Any, args: Any, output: Any, layer: int) -> Any:
        logits, _, own = output
        logits, own = logits.view(-1, logits.size(-1)).float(), own.view(-1, own.size(-1))
        routes = current[0][:, layer]
        chosen = torch.where(routes < 0, own, routes)
        known = routes[:-1, 0] >= 0  # the last input predicts nothing
        changed[0] += int(((own.sort(-1).values != chosen.sort(-1).values).any(-1)[:-1] & known).sum())
        changed[1] += int(known.sum())
        is_sigmoid = config.model_type == "deepseek_v3"
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        weights = scores.gather(1, chosen)
        if is_sigmoid:
            weights = weights / weights.sum(-1, keepdim=True)
        return output[0], weights * getattr(config, "routed_scaling_factor", 1.0), chosen

    hooks = [hf.register_forward_pre_hook(begin, with_kwargs=True)]
    hooks += [gate.register_forward_hook(partial(choose, layer=layer)) for layer, gate in enumerate(gates(hf))]
    yield changed
    for hook in hooks:
        hook.remove()


def forced_oracle(path: Path, reference: torch.nn.Module, after: Path, given: list[Tensor]) -> dict[str, float]:
    """Update a policy with given routes. The reference chooses its own routes."""
    with ExitStack() as around:
        counts: list[list[int]] = []

        def load_forced(path: Path) -> torch.nn.Module:
            hf = load_hf(path)
            counts.append(around.enter_context(force_routes(hf, given)))
            return hf

        around.enter_context(patch.object(update_worker, "load_hf", load_forced))
        found = update_worker.oracle(path, reference, after)
    return {**found, "mismatch": counts[0][0] / counts[0][1]}


# ---------------------------------------------------------------------------------------------------------------- checks
def passes(actor: Actor, given: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Check a pass with replayed routes: its logprobs, its routes, and a following pass without given routes."""
    batch = batch_for(rows())
    before = actor.compute_logprobs(batch)
    give(batch, given)
    wanted = batch.fields[ROUTES]
    worst = 0.0
    with recorded_routes(actor.model, batch):
        replayed = actor_logprobs(actor, batch)
    for row, found in response_values(batch, replayed).items():
        worst = max(worst, float((torch.tensor(found) - expected[row]).abs().max()))
    taken = batch.fields.pop(ROUTES)
    again = actor.compute_logprobs(batch)
    known = wanted > 0
    mine = [worst, int((taken != wanted)[known].sum()), float((again - before).abs().sum())]
    moved = float((replayed - before).abs().max()) if before.numel() else 0.0
    names = ("distance", "different", "left_behind", "moved")
    return dict(zip(names, map(max, zip(*all_gather_json([*mine, moved]), strict=True)), strict=True))


def actor_logprobs(actor: Actor, batch: TrainBatch) -> Tensor:
    return logprobs_of(actor.model, batch, TEMPERATURE, routes=routes_of(batch, "rollout"))


def compare_routes(actor: Actor, hf: torch.nn.Module) -> dict[str, int]:
    """Compare the routes of the old-logprob pass with the router logits of transformers. Returns [differing tokens, tokens]."""
    batch = batch_for(rows())
    actor.compute_logprobs(batch)
    lengths, own = batch.lengths[batch.rows].tolist(), [0, 0]
    routes = batch.fields[ROUTES]
    assert isinstance(routes, Tensor)
    for row, part in zip(batch.rows.tolist(), routes.split(lengths), strict=True):
        wanted = own_routes(hf, rows()[row].prompt_ids + rows()[row].response_ids)[:-1] + 1
        assert not part[0].any()
        own[0] += int((part[1:].sort(-1).values != wanted).any(-1).sum())
        own[1] += wanted[..., 0].numel()
    return dict(zip(("different", "all"), map(sum, zip(*all_gather_json(own), strict=True)), strict=True))


def finite_differences(model: MegatronModel, actor: Actor, given: list[Tensor]) -> list[list[float]]:
    """Return the gradient of the sum of all logprobs for some router weights, and the central difference quotient of that sum."""
    placed = actor.model

    def microbatches() -> list[Microbatch]:
        batch = batch_for(rows())
        give(batch, given)
        fields = {"loss_mask": batch.loss_mask, **routes_of(batch, "rollout")}
        [tokens] = placed.deliver(batch, [placed.deal(batch)], fields)
        return placed.microbatches(tokens)

    def logprobs(outputs: Tensor, microbatch: Microbatch) -> Tensor:
        return model.logprobs_and_entropy(outputs, microbatch, TEMPERATURE, with_entropy=False)[0].double().sum()

    def loss(outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        return model.logprobs_and_entropy(outputs, microbatch, TEMPERATURE, with_entropy=False)[0].sum(), {}

    def total() -> float:
        return sum(float(value) for value in model.forward(microbatches(), logprobs))

    model.forward_backward(microbatches(), loss)
    weights = [p for chunk in model.chunks for name, p in chunk.named_parameters() if "router.weight" in name]
    found, step = [], 2e-2
    for weight in weights:
        gradient = weight.main_grad.flatten()
        for place in (3, 77, 150):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    weight.view(-1)[place] += sign * step
                values.append(total())
                with torch.no_grad():
                    weight.view(-1)[place] -= sign * step
            found.append([float(gradient[place]), (values[0] - values[1]) / (2 * step)])
    return found
