"""Test properties of the planner's arithmetic for models and layouts from hypothesis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import lcm
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.commands.plan.suggest import _actor_layouts, _engines, changes, suggest
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.questions import balanced_stages
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config, RecomputeConfig
from rlhf_mcore.config.validate import validate
from rlhf_mcore.geometry import DeltaSizes, ExpertSizes, GroupedSizes, LatentSizes, ModelGeometry, SpaceSizes
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import GPUS, Assumptions, PlannedRole, plan_inputs
from rlhf_mcore.planning.memory import Pass, forward_activations, head_bytes, state_bytes, training_activations
from rlhf_mcore.planning.phases import GENERATE, SYNC, phases
from rlhf_mcore.planning.plan import (
    RunPlan,
    _set_offload,
    _ways_to_offload,
    make_plan,
    with_least_memory,
    with_offload,
)

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
    "one block per layer": replace(
        DENSE,
        family="nemotron_h",
        experts=EXPERTS,
        space=SpaceSizes(heads=8, head_dim=8, groups=4, state_dim=16, kernel=4),
        blocks=("state_space", "moe", "attention", "dense", "state_space", "moe", "attention", "moe")[
            : DENSE.num_layers
        ],
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
        draw(
            st.sampled_from(
                (
                    RecomputeConfig(granularity="off"),
                    RecomputeConfig(granularity="full"),
                    RecomputeConfig(granularity="selective"),
                )
            )
        ),
        optimizer=draw(st.sampled_from(("adamw", "muon", "sgd"))),
    )


@few
@given(roles())
def test_data_parallel_ranks_share_the_state_of_their_stage_and_shards(role: PlannedRole) -> None:
    """The sum over all ranks equals the state of one replica, for any number of replicas."""
    one = replace(
        role.layout, world_size=lcm(role.layout.tp, role.layout.expert_tp * role.layout.ep) * role.layout.pp, cp=1
    )
    alone = replace(role, layout=one)

    def total(made: PlannedRole) -> int:
        return sum(state_bytes(made, rank).moments for rank in made.layout.ranks)

    assert total(role) == pytest.approx(total(alone), abs=4 * role.layout.world_size)
    stages = [state_bytes(role, role.layout.rank_of(pp=pp)).weights for pp in range(role.layout.pp)]
    for pp, dp in product(range(role.layout.pp), range(role.layout.dp)):
        assert state_bytes(role, role.layout.rank_of(dp=dp, pp=pp)).weights == stages[pp]


@few
@given(st.sampled_from(list(MODELS.values())), st.sampled_from((1, 2, 4)))
def test_stages_add_up_to_the_model(geometry: ModelGeometry, pp: int) -> None:
    """Both ends hold a tied embedding, and an MTP layer holds a copy of the embedding."""
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
            found = [training_activations(Pass(role, n), pp, count).total for n in (fewer, more)]
            assert found[0] <= found[1]
            found = [forward_activations(Pass(role, n), pp).total for n in (fewer, more)]
            assert found[0] <= found[1]
            assert head_bytes(Pass(role, fewer), pp, training=True) <= head_bytes(Pass(role, more), pp, training=True)
        later = [training_activations(Pass(role, tokens[0]), pp, n).layers for n in (count, count + 1)]
        assert later[0] <= later[1]


@few
@given(roles(), st.integers(1, 20_000))
def test_full_recomputation_keeps_no_more_than_none(role: PlannedRole, tokens: int) -> None:
    kept = [
        training_activations(
            Pass(replace(role, recompute=RecomputeConfig(granularity=how)), 10_000 + tokens), 0, 64
        ).layers
        for how in ("full", "selective", "off")
    ]
    assert max(kept[:2]) <= kept[2] + 10**9 * (role.layout.num_stages >= role.geometry.num_layers)


# ------------------------------------------------------------------------------------------------------------ whole plans
def config(model: str, *overrides: str) -> Config:
    keys = ["data.train=[absent.parquet]", f"model.path={ROOT / 'configs' / 'models' / model}", *overrides]
    return resolve(load_config(ROOT / "configs" / "base.yaml", keys))


PPO = config("Qwen2.5-7B", "algorithm=ppo", "algorithm.kl.coef=0.01", "reference.offload=auto")
MIXTURE = config("Qwen3-30B-A3B", "actor.layout.ep=8", "actor.recompute.granularity=full")


@pytest.mark.parametrize("cfg", [PPO, MIXTURE], ids=["PPO", "experts"])
def test_every_further_way_to_offload_takes_no_more_memory_than_less_of_it(cfg: Config) -> None:
    """The search for layouts relies on this. A layout that does not fit with everything offloaded never fits."""
    least = {phase.phase: phase.total for phase in phases(plan_inputs(with_least_memory(cfg), 16, H100, ASSUMED))}
    for trained, frozen in _ways_to_offload(cfg):
        for phase in phases(plan_inputs(_set_offload(cfg, trained, frozen), 16, H100, ASSUMED)):
            assert least[phase.phase] <= phase.total


@pytest.mark.parametrize("cfg", [PPO, MIXTURE], ids=["PPO", "experts"])
@pytest.mark.parametrize("gpu", ["A100-40", "H100", "B200"])
def test_verdict_is_that_of_all_phases_and_totals_are_sums_of_parts(cfg: Config, gpu: str) -> None:
    plan = make_plan(cfg, 16, GPUS[gpu])
    assert plan.fits == all(phase.total <= phase.available and not phase.problem for phase in plan.phases)
    assert all(phase.total == sum(phase.parts.values()) for phase in plan.phases)
    assert plan.step_s == pytest.approx(sum(plan.seconds.values()))
    if plan.fits:  # only as much is offloaded as necessary
        chosen = with_offload(cfg, 16, GPUS[gpu])
        assert all(phase.fits for phase in phases(plan_inputs(chosen, 16, GPUS[gpu], ASSUMED)))


def exhaustive(cfg: Config, world_size: int, count: int) -> list[tuple[float, tuple[str, ...]]]:
    """Return the suggestions of a search that validates and plans every candidate in full."""

    def try_candidates(candidates: list[Config]) -> list[tuple[Config, RunPlan]]:
        found = []
        for candidate in candidates:
            try:
                validate(candidate, world_size, check_files=False)
                found.append((candidate, make_plan(candidate, world_size, H100)))
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
        for found in try_candidates(list(_actor_layouts(cfg, world_size, H100)))
        if all(phase.fits for phase in found[1].phases if phase.phase not in (GENERATE, SYNC))
    ]
    best: dict[tuple[int, ...], Config] = {}
    for candidate, _ in sorted(trained, key=train_rank):
        layout = candidate.actor.layout
        best.setdefault((layout.tp, layout.pp, layout.cp, layout.ep), candidate)
    suggestions = []
    for candidate in best.values():
        fitting = [found for found in try_candidates(list(_engines(candidate, world_size, H100))) if found[1].fits]
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
