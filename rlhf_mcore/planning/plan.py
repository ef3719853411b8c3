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
from rlhf_mcore.planning.memory import GENERATE, SYNC, PhaseMemory, kv_tokens, phases, pinned_bytes, state_tokens
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
        if not self.samples_ahead:
            return sum(self.seconds.values())
        learning = sum(seconds for name, seconds in self.seconds.items() if name not in (GENERATE, SYNC))
        return max(self.seconds[GENERATE], learning) + self.seconds[SYNC]

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
    dtype = "bf16" if cfg.model.dtype == "auto" else cfg.model.dtype
    roles = roles_of(cfg, world_size, dtype)
    inputs = PlanInputs(cfg, roles, dtype, gpu, assumed, workload(cfg, assumed), world_size)
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
        generates and cfg.trainer.max_staleness > 0,
        _route_bytes(cfg, roles[0].geometry),
        later_bytes(cfg, roles[0]) if generates else None,
        _engine_problem(cfg, gpu) if generates else "",
    )


def _engine_problem(cfg: Config, gpu: GpuType) -> str:
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
    rollout = cfg.rollout
    shared = run_kind(cfg).generates and not engines_apart(cfg) and rollout.sleep and engine_kind(rollout.engine).sleeps
    candidate = cfg
    for choice, frozen in product(("never", "state", "always") if shared else ("never",), (False, True)):
        actor = replace(cfg.actor, offload=choice) if cfg.actor.offload == "auto" else cfg.actor
        critic = replace(cfg.critic, offload=choice) if cfg.critic.offload == "auto" else cfg.critic
        reference, reward, teacher = cfg.reference, cfg.reward, cfg.teacher
        if reference.offload is None:
            reference = replace(reference, offload=frozen)
        if reward.model.offload is None:
            reward = replace(reward, model=replace(reward.model, offload=frozen))
        if teacher.offload is None:
            teacher = replace(teacher, offload=frozen)
        candidate = replace(cfg, actor=actor, critic=critic, reference=reference, reward=reward, teacher=teacher)
        if candidate == cfg or all(phase.fits for phase in _phases(candidate, world_size, gpu, assumed)):
            break
    return candidate


def _phases(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions) -> list[PhaseMemory]:
    dtype = "bf16" if cfg.model.dtype == "auto" else cfg.model.dtype
    roles = roles_of(cfg, world_size, dtype)
    return phases(PlanInputs(cfg, roles, dtype, gpu, assumed, workload(cfg, assumed), world_size))


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
