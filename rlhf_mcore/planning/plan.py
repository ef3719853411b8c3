"""A whole plan: memory, traffic and time of a configuration with a world size on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rlhf_mcore.bridge.plan.sent_weights import sends_adapters
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import with_values
from rlhf_mcore.families import hf_shapes
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.engines import kv_tokens, state_tokens
from rlhf_mcore.planning.inputs import (
    CONSERVATIVE,
    Assumptions,
    GpuType,
    PlanInputs,
    PlannedRole,
    RankShare,
    Workload,
    engines_apart,
    num_devices,
    plan_inputs,
    rank_share,
)
from rlhf_mcore.planning.loading import LoadEstimate, load_of
from rlhf_mcore.planning.memory import BYTES, StateBytes, checkpoint_bytes, describe, state_bytes
from rlhf_mcore.planning.phases import (
    GENERATE,
    SYNC,
    PhaseMemory,
    engines_fit,
    hosted_bytes,
    models_fit,
    phases,
    pinned_bytes,
    stage_ranks,
)
from rlhf_mcore.planning.timing import SyncEstimate, phase_seconds, sync_of
from rlhf_mcore.readers.adapter_files import adapted_modules

# Megatron fields that change a model's memory in uncounted ways. A plan warns about them.
UNCOUNTED = {
    "activation_func_fp8_input_store",
    "activation_offload_fraction",
    "batch_invariant_mode",
    "bucket_size",
    "cpu_offloading",
    "cpu_offloading_weights",
    "defer_embedding_wgrad_compute",
    "distribute_saved_activations",
    "expert_gtp_weight_remat_size",
    "expert_tensor_parallel_num_weight_shards",
    "fine_grained_activation_offloading",
    "first_last_layers_bf16",
    "fp4",
    "gradient_accumulation_fusion",
    "gtp_weight_remat_size",
    "keep_fp8_transpose_cache",
    "log_max_attention_logit",
    "memory_efficient_layer_norm",
    "microbatch_group_size_per_vp_stage",
    "mlp_chunks_for_training",
    "moe_expert_rank_capacity_factor",
    "moe_input_jitter_eps",
    "moe_paged_stash",
    "moe_router_dtype",
    "moe_router_padding_for_fp8",
    "moe_router_padding_for_quantization",
    "moe_router_topk_limited_devices",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
    "moe_z_loss_coeff",
    "nccl_ub",
    "num_buckets",
    "param_name_patterns_for_fp32_local_accumulation",
    "qk_clip",
    "tensor_parallel_num_weight_shards",
    "tp_comm_overlap",
    "use_te_activation_func",
    "use_transformer_engine_op_fuser",
}


@dataclass(frozen=True, slots=True)
class RolePlan:
    """A model: its size, its layout, and its bytes on its first rank and in a checkpoint."""

    name: str
    parameters: int
    trained: bool
    layout: dict[str, int | None]
    recompute: str
    state: StateBytes
    checkpoint_bytes: int
    cut: RankShare
    offload: tuple[str, ...] = ()  # parts that are on the device only while they are used
    computed_share: float = 1.0  # share of a step's tokens; shared prefixes are computed once


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The result of ``rlhf-mcore plan``. ``sync`` is None for runs without engines."""

    world_size: int
    gpu: GpuType
    dtype: str
    roles: list[RolePlan]
    phases: list[PhaseMemory]
    kv_tokens: int
    pinned_bytes: int
    sync: SyncEstimate | None
    work: Workload
    seconds: dict[str, float]
    load: LoadEstimate
    hosted_bytes: int  # optimizer state of the fullest rank that the host keeps and steps
    engine_devices: int = 0  # in addition to the trainer's ``world_size`` devices
    state_tokens: int = 0  # cache tokens with the same size as a sequence's recurrent states
    samples_ahead: bool = False  # trainer.max_staleness > 0: responses are sampled while the trainer learns
    route_bytes: int = 0  # per token, if routes are replayed; on the host, and from an engine to the models
    later_sync_bytes: int | None = None  # per engine, at every sync except the first; None: all syncs are equal
    engine_nodes: int = 1  # nodes of a disaggregated engine
    warnings: tuple[str, ...] = ()  # phases that may exceed the run's timeouts, and uncounted memory

    @property
    def step_s(self) -> float:
        return step_seconds(self.seconds, self.samples_ahead)

    @property
    def fits(self) -> bool:
        return all(phase.fits for phase in self.phases)

    @property
    def fullest(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total / phase.available)


def make_plan(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions = CONSERVATIVE) -> RunPlan:
    """Plan a valid and resolved configuration (``config.validate``, ``config.resolve``).

    Raises:
        ConfigError: a model's config.json cannot be read.
    """
    cfg = with_offload(cfg, world_size, gpu, assumed)
    inputs = plan_inputs(cfg, world_size, gpu, assumed)
    roles, seconds, generates = inputs.roles, phase_seconds(inputs), run_kind(cfg).generates
    ranks = stage_ranks(inputs)
    return RunPlan(
        world_size,
        gpu,
        inputs.dtype,
        [_role_plan(role, inputs) for role in roles],
        phases(inputs),
        kv_tokens(inputs) if generates else 0,
        max(pinned_bytes(inputs, rank) for rank in ranks),
        sync_of(inputs) if generates else None,
        inputs.work,
        seconds,
        load_of(inputs),
        max(hosted_bytes(inputs, rank) for rank in ranks),
        num_devices(cfg, world_size) - world_size,
        state_tokens(inputs) if generates else 0,
        samples_ahead(cfg),
        _route_bytes(cfg, roles[0].geometry),
        _later_bytes(cfg, roles[0]) if generates else None,
        _engine_nodes(cfg, gpu) if engines_apart(cfg) else 1,
        (*_late_phases(inputs, seconds), *_uncounted_fields(roles)),
    )


def samples_ahead(cfg: Config) -> bool:
    """Return whether responses are sampled while the trainer learns."""
    return run_kind(cfg).generates and cfg.trainer.max_staleness > 0


def step_seconds(seconds: dict[str, float], samples_ahead: bool) -> float:
    """Return the duration of a step, in which generation and training may overlap."""
    if not samples_ahead:
        return sum(seconds.values())
    learning = sum(seconds for name, seconds in seconds.items() if name not in (GENERATE, SYNC))
    return max(seconds[GENERATE], learning) + seconds[SYNC]


def _engine_nodes(cfg: Config, gpu: GpuType) -> int:
    """Count the nodes of an engine, which has the same number of ranks on each node; see ``rollout.remote.cluster``."""
    ranks = cfg.rollout.layout.num_ranks
    return next(nodes for nodes in range(1, ranks + 1) if ranks % nodes == 0 and ranks // nodes <= gpu.per_node)


def _late_phases(inputs: PlanInputs, seconds: Mapping[str, float]) -> Iterator[str]:
    """Yield warnings for phases that may exceed a timeout of the run.

    Generation has no timeout, because sampled tokens count as progress. All ranks start the next phase after this one. Ranks
    without a part of its model wait for it in a collective.
    """
    trainer = inputs.cfg.trainer
    partial = {role.name for role in inputs.roles if role.layout.world_size < inputs.world_size}
    for phase, estimate in seconds.items():
        limits = {"trainer.watchdog_s": trainer.watchdog_s or math.inf}
        if phase.partition(" ")[0] in partial:
            limits["trainer.collective_timeout_s"] = trainer.collective_timeout_s
        low = [f"{key}={limit}" for key, limit in limits.items() if estimate > limit]
        if phase != GENERATE and low:
            yield f"{phase} is estimated at {estimate:.0f} s, longer than {' and '.join(low)}; raise it"


def _uncounted_fields(roles: Sequence[PlannedRole]) -> Iterator[str]:
    """Yield warnings for Megatron fields whose effect on the memory is not counted."""
    for role in roles:
        names = [f"megatron.{name}" for name, value in role.megatron.items() if value and name in UNCOUNTED]
        if names:
            yield f"{role.name}: the memory that {', '.join(names)} saves or takes is not counted"


def _later_bytes(cfg: Config, actor: PlannedRole) -> int | None:
    """Count the bytes that each engine needs at the second and later syncs of a run with adapters; None without adapters.

    These are A and B, or the adapted weights after merging.
    """
    if actor.adapters is None:
        return None
    if sends_adapters(cfg, actor.geometry):
        return num_parameters(actor.adapters) * BYTES[actor.dtype]
    shapes = hf_shapes(actor.geometry)
    return sum(math.prod(shapes[f"{module}.weight"]) for module in adapted_modules(actor.adapters)) * BYTES[actor.dtype]


def _route_bytes(cfg: Config, geometry: ModelGeometry) -> int:
    """Return the bytes of a token's routes, 16 bits each."""
    if cfg.actor.router_replay == "off" or geometry.experts is None:
        return 0
    return 2 * len(geometry.moe_layers) * geometry.experts.per_token


def with_offload(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions = CONSERVATIVE) -> Config:
    """Choose ``offload`` for every model with ``offload=auto``: the least that makes everything fit, else everything.

    If two choices fit, prefer the one that offloads less of the trained models. These stay on the device if no sleeping
    engine shares it.
    """
    *ways, last = _ways_to_offload(cfg)
    for trained, frozen in ways:
        candidate = _set_offload(cfg, trained, frozen)
        inputs = plan_inputs(candidate, world_size, gpu, assumed)
        if models_fit(inputs) and engines_fit(inputs):
            return candidate
    return _set_offload(cfg, *last)


def with_least_memory(cfg: Config) -> Config:
    """Offload every model with ``offload=auto``. A configuration that still does not fit cannot fit."""
    return _set_offload(cfg, *_ways_to_offload(cfg)[-1])


def _ways_to_offload(cfg: Config) -> list[tuple[str, str]]:
    """List the candidate ``offload`` values of trained and frozen models. The last ones need the least memory in every phase."""
    rollout, models = cfg.rollout, (cfg.reference, cfg.reward.model, cfg.teacher)
    sleeps = rollout.sleep_level > 0 and engine_kind(rollout.engine).sleeps
    shared = run_kind(cfg).generates and not engines_apart(cfg) and sleeps
    is_open = shared and "auto" in (cfg.actor.offload, cfg.critic.offload)
    frozen = ("never", "always") if any(model.offload == "auto" for model in models) else ("never",)
    return list(product(("never", "state", "always") if is_open else ("never",), frozen))


def _set_offload(cfg: Config, trained: str, frozen: str) -> Config:
    """Set ``offload`` of the models with ``offload=auto``."""
    choices = {"actor": trained, "critic": trained, "reference": frozen, "teacher": frozen, "reward.model": frozen}
    keys = {f"{name}.offload": choice for name, choice in choices.items()}
    return with_values(cfg, {key: choice for key, choice in keys.items() if value_of(cfg, key) == "auto"})


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
        inputs.work.computed_tokens(role) / inputs.work.tokens,
    )


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Convert the plan to JSON values; sizes in bytes, times in seconds."""
    data = asdict(plan)
    for entry, phase in zip(data["phases"], plan.phases, strict=True):
        entry |= {"total": phase.total, "fits": phase.fits}
    return data | {"fits": plan.fits, "step_s": plan.step_s}
