"""Properties of the planner's arithmetic, for models and layouts that hypothesis chooses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import lcm, prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.commands.plan.suggest import _actor_layouts, _engines, changes, suggest
from rlhf_mcore.config.derive import balanced_stages, resolve
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import Config, RecomputeConfig
from rlhf_mcore.config.validate import validate
from rlhf_mcore.geometry import AdapterSizes, DeltaSizes, ExpertSizes, GroupedSizes, LatentSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout, is_expert
from rlhf_mcore.planning.activations import forward_activations, head_bytes, training_activations
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import GPUS, Assumptions, EngineGrid, PlannedRole
from rlhf_mcore.planning.memory import GENERATE, SYNC, phases
from rlhf_mcore.planning.plan import (
    RunPlan,
    _offloaded,
    _ways_to_offload,
    make_plan,
    plan_inputs,
    with_least_memory,
    with_offload,
)
from rlhf_mcore.planning.sync import engine_numel, engine_tensors, weight_bytes
from rlhf_mcore.planning.weights import chunk_tensors, state_bytes

ROOT = Path(__file__).resolve().parents[3]
H100, ASSUMED = GPUS["H100"], Assumptions()
DENSE = ModelGeometry("qwen3", 8, 64, GroupedSizes(4, 2, 16), 192, 1000, False)
EXPERTS = ExpertSizes(8, 96, per_token=2, shared_ffn_size=96)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied_embeddings=True),
    "experts": replace(DENSE, family="qwen3_moe", experts=replace(EXPERTS, shared_ffn_size=0)),
    "dense layers and MTP": replace(
        DENSE, family="glm4_moe", experts=replace(EXPERTS, dense_layers=(0,)), mtp_layers=1
    ),
    "latent": replace(
        DENSE,
        family="deepseek_v3",
        attention=LatentSizes(4, 24, 8, 16, 32, 48),
        experts=replace(EXPERTS, dense_layers=(0, 1)),
    ),
    "delta nets": replace(
        DENSE,
        family="qwen3_next",
        experts=EXPERTS,
        delta=DeltaSizes((0, 1, 2, 4, 5, 6), key_heads=4, value_heads=8, key_dim=8, value_dim=8, kernel=4),
    ),
    "critic": replace(DENSE, head="token"),
}
few = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def roles(draw: st.DrawFn, *, trained: bool = True) -> PlannedRole:
    geometry = draw(st.sampled_from(list(MODELS.values())))
    tp, pp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 3)))
    ep = draw(st.sampled_from((1, 2, 4))) if geometry.experts else 1
    etp = draw(st.sampled_from((1, 2))) if ep > 1 else None
    vpp = draw(st.sampled_from((None, 2))) if pp > 1 else None
    dp *= lcm(tp * cp * dp, ep * (etp or tp)) // (tp * cp * dp)
    stages = None if geometry.num_layers % (pp * (vpp or 1)) == 0 else tuple(balanced_stages(geometry.num_layers, pp))
    layout = ParallelLayout(tp * pp * cp * dp, tp, pp, vpp, cp, tp > 1, ep, etp, stages, draw(st.sampled_from((0, 4))))
    return PlannedRole(
        "actor",
        geometry,
        layout,
        trained,
        draw(st.sampled_from(("bf16", "fp32"))),
        draw(st.sampled_from((RecomputeConfig("off"), RecomputeConfig("full"), RecomputeConfig("selective")))),
        optimizer=draw(st.sampled_from(("adamw", "muon", "sgd"))),
    )


def walk_buffers(role: PlannedRole, rank: int) -> tuple[int, int, int]:
    """Elements of a rank's flat buffers, and of parameters and matrices that it steps, parameter by parameter as Megatron does."""
    layout, geometry = role.layout, role.geometry
    place, apart = layout.coordinates(rank), layout.ep > 1
    shared = (
        {"embedding.word_embeddings.weight"}
        if layout.pp > 1 and (geometry.tied_embeddings or geometry.mtp_layers)
        else set()
    )
    shared |= {"output_layer.weight"} if shared and geometry.tied_embeddings else set()
    index, size = place["dp"] * layout.cp + place["cp"], layout.dp * layout.cp
    totals = [0, 0, 0]
    for chunk in chunk_tensors(geometry, layout, place["pp"]):
        trained = [tensor for tensor in chunk if tensor.trained]
        own = [tensor for tensor in trained if not (apart and is_expert(tensor.name))]
        experts = [tensor for tensor in trained if apart and is_expert(tensor.name)]
        grids = ((own, index, size), (experts, layout.expert_coordinates(rank)["edp"], layout.expert_dp))
        for tensors, mine, ranks in grids:
            bucket: list[tuple[int, int, bool]] = []
            buckets = [bucket]
            for tensor in reversed(tensors):
                if tensor.name in shared:
                    buckets += [[(0, tensor.numel, tensor.is_matrix)], bucket := []]
                    continue
                start = -(-bucket[-1][1] // 64) * 64 if bucket else 0
                bucket.append((start, start + tensor.numel, tensor.is_matrix))
            for ranges in filter(None, buckets):
                unit = lcm(ranks, 128)
                length = -(-ranges[-1][1] // unit) * unit
                low, high = length // ranks * mine, length // ranks * (mine + 1)
                mine_of = [(max(0, min(end, high) - max(start, low)), matrix) for start, end, matrix in ranges]
                totals[0] += length
                totals[1] += sum(count for count, _ in mine_of)
                totals[2] += sum(count for count, matrix in mine_of if matrix)
    return totals[0], totals[1], totals[2]


@few
@given(roles(), st.data())
def test_state_is_that_of_a_walk_over_every_parameter(role: PlannedRole, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from(role.layout.ranks))
    numel, owned, matrices = walk_buffers(role, rank)
    moments = {"adamw": 2 * owned, "muon": 2 * owned - matrices, "sgd": owned}[role.optimizer]
    state = state_bytes(role, rank)
    assert (state.gradients, state.moments) == (4 * numel, 4 * moments)
    assert state.masters == (0 if role.dtype == "fp32" else 4 * owned)
    assert state.weights == (4 if role.dtype == "fp32" else 2) * numel


@few
@given(roles())
def test_data_parallel_ranks_share_the_state_of_their_stage_and_shards(role: PlannedRole) -> None:
    """Over all ranks the state is that of one replica, whatever the number of replicas."""
    one = replace(
        role.layout, world_size=lcm(role.layout.tp, role.layout.expert_tp * role.layout.ep) * role.layout.pp, cp=1
    )
    alone = replace(role, layout=one)

    def total(made: PlannedRole) -> int:
        return sum(state_bytes(made, rank).moments for rank in made.layout.ranks)

    assert total(role) == total(alone)
    stages = [state_bytes(role, role.layout.rank_of(pp=pp)).weights for pp in range(role.layout.pp)]
    for pp, dp in product(range(role.layout.pp), range(role.layout.dp)):
        assert state_bytes(role, role.layout.rank_of(dp=dp, pp=pp)).weights == stages[pp]


@few
@given(st.sampled_from(list(MODELS.values())), st.sampled_from((1, 2, 4)))
def test_stages_add_up_to_the_model(geometry: ModelGeometry, pp: int) -> None:
    """A tied embedding is held at both ends, and an MTP layer has a copy of the embedding."""
    frozen = PlannedRole("reference", geometry, ParallelLayout(pp, pp=pp), False, "fp32")
    held = sum(state_bytes(frozen, rank).total for rank in range(pp))
    copies = pp > 1 and (geometry.tied_embeddings + bool(geometry.mtp_layers))
    assert held == 4 * (num_parameters(geometry) + copies * geometry.vocab_size * geometry.hidden_size)


@few
@given(roles(trained=False), st.sampled_from((2, 4)))
def test_sharding_never_adds_weights_and_never_divides_by_more_than_its_size(role: PlannedRole, size: int) -> None:
    whole = replace(role, layout=ParallelLayout(1), dtype="bf16")
    shards = [ParallelLayout(size, tp=size), ParallelLayout(size, pp=size)]
    if role.geometry.experts:
        shards.append(ParallelLayout(size, ep=size, etp=1))
    for layout in shards:
        held = [state_bytes(replace(whole, layout=layout), rank).weights for rank in layout.ranks]
        assert max(held) <= state_bytes(whole, 0).weights <= sum(held)


@few
@given(roles(), st.lists(st.integers(1, 50_000), min_size=2, max_size=4), st.integers(1, 16))
def test_activations_grow_with_tokens_and_microbatches(role: PlannedRole, tokens: list[int], count: int) -> None:
    for pp in range(role.layout.pp):
        for fewer, more in pairwise(sorted(tokens)):
            found = [training_activations(role, pp, n, count, 2, ASSUMED).total for n in (fewer, more)]
            assert found[0] <= found[1]
            found = [forward_activations(role, pp, n, 2, ASSUMED).total for n in (fewer, more)]
            assert found[0] <= found[1]
            assert head_bytes(role, pp, fewer, 2, training=True) <= head_bytes(role, pp, more, 2, training=True)
        later = [training_activations(role, pp, tokens[0], n, 2, ASSUMED).layers for n in (count, count + 1)]
        assert later[0] <= later[1]


@few
@given(roles(), st.integers(1, 20_000))
def test_full_recomputation_keeps_no_more_than_none(role: PlannedRole, tokens: int) -> None:
    kept = [
        training_activations(replace(role, recompute=RecomputeConfig(how)), 0, 10_000 + tokens, 64, 2, ASSUMED).layers
        for how in ("full", "selective", "off")
    ]
    assert max(kept[:2]) <= kept[2] + 10**9 * (role.layout.num_stages >= role.geometry.num_layers)


GRIDS = [EngineGrid(*sizes) for sizes in ((1,), (2,), (4,), (2, 2), (1, 4), (1, 1, 2, 2), (4, 1, 1, 4), (2, 1, 2, 4))]


@pytest.mark.parametrize("name", ["dense", "tied", "experts", "dense layers and MTP", "latent", "delta nets"])
def test_sizes_of_an_engine_are_sums_over_all_its_tensors(name: str) -> None:
    geometry = MODELS[name]
    for grid in GRIDS:
        if geometry.experts is None and (grid.dp > 1 or grid.ep > 1):
            continue
        by_stage = [
            sum(prod(tensor.shape) for tensor in engine_tensors(geometry, grid, stage * grid.tp))
            for stage in range(grid.pp)
        ]
        assert engine_numel(geometry, grid) == max(by_stage)
        assert weight_bytes(geometry, grid, 2, None) == 2 * max(by_stage)
        assert weight_bytes(geometry, grid, 2, "int8") < weight_bytes(geometry, grid, 2, None)


def test_layers_with_different_adapters_are_counted_apart() -> None:
    """Adapters of one of eight layers: A has 8 x 64 elements, B 64 x 8."""
    adapters = replace(DENSE, adapter=AdapterSizes(8, 16.0, ("model.layers.3.self_attn.o_proj",)))
    for pp in (1, 4):
        role = PlannedRole("actor", DENSE, ParallelLayout(pp, pp=pp), True, adapters=adapters)
        held = [state_bytes(role, rank).gradients for rank in range(pp)]
        assert held == [4 * 8 * (64 + 64) * (3 // (8 // pp) == stage) for stage in range(pp)]


# ------------------------------------------------------------------------------------------------------------ whole plans
def config(model: str, *overrides: str) -> Config:
    keys = ["data.train=[absent.parquet]", f"model.path={ROOT / 'configs' / 'models' / model}", *overrides]
    return resolve(load_config(ROOT / "configs" / "base.yaml", keys))


PPO = config("Qwen2.5-7B", "algorithm=ppo", "algorithm.kl.coef=0.01", "reference.offload=null")
MIXTURE = config("Qwen3-30B-A3B", "actor.layout.ep=8", "actor.recompute.granularity=full")


@pytest.mark.parametrize("cfg", [PPO, MIXTURE], ids=["PPO", "experts"])
def test_every_further_way_to_offload_takes_no_more_memory_than_less_of_it(cfg: Config) -> None:
    """The search for layouts relies on it: what does not fit with everything offloaded fits in no way."""
    least = {phase.phase: phase.total for phase in phases(plan_inputs(with_least_memory(cfg), 16, H100, ASSUMED))}
    for trained, frozen in _ways_to_offload(cfg):
        for phase in phases(plan_inputs(_offloaded(cfg, trained, frozen), 16, H100, ASSUMED)):
            assert least[phase.phase] <= phase.total


@pytest.mark.parametrize("cfg", [PPO, MIXTURE], ids=["PPO", "experts"])
@pytest.mark.parametrize("gpu", ["A100-40", "H100", "B200"])
def test_verdict_is_that_of_all_phases_and_totals_are_sums_of_parts(cfg: Config, gpu: str) -> None:
    plan = make_plan(cfg, 16, GPUS[gpu], exact_sync=False)
    assert plan.fits == all(phase.total <= phase.available and not phase.problem for phase in plan.phases)
    assert all(phase.total == sum(phase.parts.values()) for phase in plan.phases)
    assert plan.step_s == pytest.approx(sum(plan.seconds.values()))
    if plan.fits:  # and then nothing more leaves the device than has to
        chosen = with_offload(cfg, 16, GPUS[gpu])
        assert all(phase.fits for phase in phases(plan_inputs(chosen, 16, GPUS[gpu], ASSUMED)))


def exhaustive(cfg: Config, world_size: int, count: int) -> list[tuple[float, tuple[str, ...]]]:
    """The suggestions of a search that validates and plans every candidate in full."""

    def tried(candidates: list[Config]) -> list[tuple[Config, RunPlan]]:
        found = []
        for candidate in candidates:
            try:
                validate(candidate, world_size, check_files=False)
                found.append((candidate, make_plan(candidate, world_size, H100, exact_sync=False)))
            except ConfigError:
                continue
        return found

    def rank(found: tuple[Config, RunPlan]) -> tuple[float, int]:
        candidate, plan = found
        return round(plan.step_s, 2), len(changes(cfg, candidate))

    def train_rank(found: tuple[Config, RunPlan]) -> tuple[float, int]:
        candidate, plan = found
        seconds = sum(seconds for name, seconds in plan.seconds.items() if name not in (GENERATE, SYNC))
        return round(seconds, 2), len(changes(cfg, candidate))

    trained = [
        found
        for found in tried(list(_actor_layouts(cfg, world_size, H100)))
        if all(phase.fits for phase in found[1].phases if phase.phase not in (GENERATE, SYNC))
    ]
    best: dict[tuple[int, ...], Config] = {}
    for candidate, _ in sorted(trained, key=train_rank):
        layout = candidate.actor.layout
        best.setdefault((layout.tp, layout.pp, layout.cp, layout.ep), candidate)
    suggestions = []
    for candidate in best.values():
        fitting = [found for found in tried(list(_engines(candidate, world_size, H100))) if found[1].fits]
        suggestions += sorted(fitting, key=rank)[:1]
        if len(suggestions) == 2 * count:
            break
    return [(found[1].step_s, changes(cfg, found[0])) for found in sorted(suggestions, key=rank)[:count]]


@pytest.mark.parametrize(
    ("model", "world_size"), [("Qwen2.5-7B", 8), pytest.param("Qwen3-30B-A3B", 16, marks=pytest.mark.full)]
)
def test_suggestions_are_those_of_an_exhaustive_search(model: str, world_size: int) -> None:
    cfg = config(model)
    found = suggest(cfg, world_size, H100, 1)
    assert [(made.plan.step_s, made.overrides) for made in found] == exhaustive(cfg, world_size, 1)
