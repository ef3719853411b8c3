"""A whole plan: memory, traffic and time of a configuration in a world of given size, on a given device."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.rules.rollout import engine_keys
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.planning.activations import describe
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import (
    Assumptions,
    GpuType,
    PlanInputs,
    PlannedRole,
    RankShare,
    Workload,
    engines_apart,
    rank_share,
    roles_of,
    workload,
)
from rlhf_mcore.planning.memory import (
    GENERATE,
    SYNC,
    PhaseMemory,
    engines_fit,
    kv_tokens,
    models_fit,
    phases,
    pinned_bytes,
    state_tokens,
)
from rlhf_mcore.planning.sync import SyncBytes, estimate_seconds, later_bytes, num_devices, plan_sync
from rlhf_mcore.planning.timing import phase_seconds
from rlhf_mcore.planning.weights import StateBytes, checkpoint_bytes, state_bytes


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One model: its size, its layout, what it holds on its first rank and in a checkpoint."""

    name: str
    parameters: int
    trained: bool
    layout: dict[str, int | None]
    recompute: str
    state: StateBytes
    checkpoint_bytes: int
    cut: RankShare
    offload: tuple[str, ...] = ()  # what is on the device only while it is used


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Report as ``rlhf-mcore plan``. ``sync`` is None where it was only estimated (while comparing layouts) or there is none."""

    world_size: int
    gpu: GpuType
    dtype: str
    roles: list[RolePlan]
    phases: list[PhaseMemory]
    kv_tokens: int
    pinned_bytes: int
    sync: SyncBytes | None
    work: Workload
    seconds: dict[str, float]
    engine_devices: int = 0  # beside the trainer's, which are ``world_size``
    state_tokens: int = 0  # of cache, as much as which a sequence's gated delta nets take
    samples_ahead: bool = False  # trainer.max_staleness: responses are drawn while the trainer learns
    route_bytes: int = 0  # of a token's routes, where they are replayed: on the host, and from an engine to the models
    later_sync_bytes: int | None = None  # that each engine needs at every sync but the first; None: all are alike
    engine_problem: str = ""  # why no machine takes an engine of its own

    @property
    def step_s(self) -> float:
        return step_seconds(self.seconds, self.samples_ahead)

    @property
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases) and not self.engine_problem


def make_plan(
    cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions | None = None, *, exact_sync: bool = True
) -> RunPlan:
    """Plan a valid and resolved configuration (``config.validate``, ``config.derive``).

    Args:
        exact_sync: make the bridge's own plan (up to some seconds for models with many experts), not a guess of its time.

    Raises:
        ConfigError: a model's config.json cannot be read.
    """
    assumed = assumed or Assumptions()
    cfg = with_offload(cfg, world_size, gpu, assumed)
    inputs = plan_inputs(cfg, world_size, gpu, assumed)
    roles, dtype = inputs.roles, inputs.dtype
    generates = run_kind(cfg).generates
    sync = plan_sync(cfg, roles[0], world_size, gpu, assumed) if exact_sync and generates else None
    sync_s = sync.seconds if sync else estimate_seconds(cfg, roles[0], gpu, assumed)
    return RunPlan(
        world_size,
        gpu,
        dtype,
        [_role_plan(role, inputs) for role in roles],
        phases(inputs),
        kv_tokens(inputs) if generates else 0,
        max(pinned_bytes(inputs, rank) for rank in (0, world_size - 1)),
        sync,
        inputs.work,
        phase_seconds(inputs, sync_s),
        num_devices(cfg, world_size) - world_size,
        state_tokens(inputs) if generates else 0,
        samples_ahead(cfg),
        _route_bytes(cfg, roles[0].geometry),
        later_bytes(cfg, roles[0]) if generates else None,
        engine_problem(cfg, gpu) if generates else "",
    )


def plan_inputs(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions) -> PlanInputs:
    """Collect what memory and time of a resolved configuration depend on.

    Raises:
        ConfigError: a model's config.json cannot be read, or a layout does not divide its ranks.
    """
    dtype = "bf16" if cfg.model.dtype == "auto" else cfg.model.dtype
    roles = roles_of(cfg, world_size, dtype)
    return PlanInputs(cfg, roles, dtype, gpu, assumed, workload(cfg, assumed), world_size)


def samples_ahead(cfg: Config) -> bool:
    """Tell whether responses are sampled while the trainer learns."""
    return run_kind(cfg).generates and cfg.trainer.max_staleness > 0


def step_seconds(seconds: dict[str, float], samples_ahead: bool) -> float:
    """Sum up the phases of a step, of which two may run at the same time."""
    if not samples_ahead:
        return sum(seconds.values())
    learning = sum(seconds for name, seconds in seconds.items() if name not in (GENERATE, SYNC))
    return max(seconds[GENERATE], learning) + seconds[SYNC]


def engine_problem(cfg: Config, gpu: GpuType) -> str:
    """Explain why Ray has no machine for an engine, whose ranks are on one; empty: it has."""
    ranks = cfg.rollout.layout.num_ranks
    if not engines_apart(cfg) or ranks <= gpu.per_node:
        return ""
    return (
        f"{engine_keys(cfg.rollout.layout)}={ranks}: under Ray an engine is on one node, and a node has {gpu.per_node} devices "
        "(--set per_node); lower it, and have more engines (rollout.num_engines)"
    )


def _route_bytes(cfg: Config, geometry: ModelGeometry) -> int:
    """Return the bytes of a token's routes, of 16 bits each."""
    if cfg.actor.router_replay == "off" or geometry.experts is None:
        return 0
    return 2 * len(geometry.moe_layers) * geometry.experts.per_token


def with_offload(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions | None = None) -> Config:
    """Decide ``offload`` of every model that leaves it to the plan: as little as makes everything fit, else everything.

    If two ways fit, less of the trained models leaves. They stay where no sleeping engine shares the device.
    """
    assumed = assumed or Assumptions()
    *ways, last = _ways_to_offload(cfg)
    for trained, frozen in ways:
        candidate = _offloaded(cfg, trained, frozen)
        inputs = plan_inputs(candidate, world_size, gpu, assumed)
        if models_fit(inputs) and engines_fit(inputs):
            return candidate
    return _offloaded(cfg, *last)


def with_least_memory(cfg: Config) -> Config:
    """Offload everything that leaves it to the plan. What does not fit then fits in no way."""
    return _offloaded(cfg, *_ways_to_offload(cfg)[-1])


def _ways_to_offload(cfg: Config) -> list[tuple[str, bool]]:
    """List the values that ``offload`` of trained and of frozen models may get. The last ones need least memory in every phase."""
    rollout, models = cfg.rollout, (cfg.reference, cfg.reward.model, cfg.teacher)
    shared = run_kind(cfg).generates and not engines_apart(cfg) and rollout.sleep and engine_kind(rollout.engine).sleeps
    is_open = shared and "auto" in (cfg.actor.offload, cfg.critic.offload)
    frozen = (False, True) if any(model.offload is None for model in models) else (False,)
    return list(product(("never", "state", "always") if is_open else ("never",), frozen))


def _offloaded(cfg: Config, trained: str, frozen: bool) -> Config:
    """Set ``offload`` of the models that leave it to the plan."""
    groups: dict[str, Any] = {}
    for name in ("actor", "critic"):
        if getattr(cfg, name).offload == "auto":
            groups[name] = replace(getattr(cfg, name), offload=trained)
    for name in ("reference", "teacher"):
        if getattr(cfg, name).offload is None:
            groups[name] = replace(getattr(cfg, name), offload=frozen)
    if cfg.reward.model.offload is None:
        groups["reward"] = replace(cfg.reward, model=replace(cfg.reward.model, offload=frozen))
    return replace(cfg, **groups) if groups else cfg


def _role_plan(role: PlannedRole, inputs: PlanInputs) -> RolePlan:
    layout = role.layout
    named = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "cp": layout.cp, "dp": layout.dp, "ep": layout.ep}
    return RolePlan(
        role.name,
        num_parameters(role.geometry),
        role.trained,
        named | {"etp": layout.expert_tp},
        describe(role.recompute),
        state_bytes(role, layout.first_rank),
        checkpoint_bytes(role) if role.trained else 0,
        rank_share(inputs.work, role),
        ("weights layer by layer",) if role.by_layer else role.offload,
    )


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Write the whole plan as JSON values; sizes in bytes, times in seconds."""
    data = asdict(plan)
    for entry, phase in zip(data["phases"], plan.phases, strict=True):
        entry |= {"total": phase.total, "fits": phase.fits}
    return data | {"fits": plan.fits, "step_s": plan.step_s}
