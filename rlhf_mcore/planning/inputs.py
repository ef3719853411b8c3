"""The inputs of a plan: the device, the models with their layouts, and the work of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rlhf_mcore.config.choices import MTP_TRAINED, run_kind
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import (
    SHORTEST_PREFIX,
    adapter_sizes,
    in_fp8,
    is_offloaded,
    longest_example,
    needs_critic,
    needs_reference,
    offloaded_parts,
)
from rlhf_mcore.config.resolve import with_sequences
from rlhf_mcore.config.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    LayoutConfig,
    RecomputeConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rlhf_mcore.expected_kernels import why_unshared
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.mtp import num_mtp_layers
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.readers.model_files import read_config, read_geometry

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuType:
    """A device of a node. Rates are peaks from data sheets; link rates count one direction."""

    name: str
    memory_bytes: int  # total that torch reports for the device
    bf16_flops: float  # dense
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float  # to all other devices of the node together
    network_bytes_per_s: float  # this device's share of the node's network
    host_bytes_per_s: float = 64e9  # between the host and the device
    cpu_bytes_per_s: float = 40e9  # memory of the host's processors, this device's share
    storage_bytes_per_s: float = 2e9  # from storage to a node
    per_node: int = 8


HOPPER = ("H100", "H200")  # devices with compute capability 9.0, which ``actor.fp8`` requires
GPUS = {
    # NVIDIA's data sheets of DGX H100, H200, A100 and B200. Each GPU has 400 Gb/s of network and PCIe 5; A100 200 Gb/s and PCIe 4.
    "H100": GpuType("H100", int(79.1 * GIB), 989e12, 3.35e12, 450e9, 50e9),
    "H200": GpuType("H200", int(139.8 * GIB), 989e12, 4.8e12, 450e9, 50e9),
    "A100": GpuType("A100", int(79.15 * GIB), 312e12, 2.04e12, 300e9, 25e9, 32e9),
    "A100-40": GpuType("A100-40", int(39.4 * GIB), 312e12, 1.56e12, 300e9, 25e9, 32e9),
    "B200": GpuType("B200", int(178.3 * GIB), 2250e12, 8.0e12, 900e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions about quantities that cannot be computed. The defaults are conservative for memory."""

    # Memory outside torch: 1 GiB for the CUDA context and kernels, and 0.4 GiB for each of ten NCCL communicators. A trainer rank has
    # six to eleven, depending on its layouts, and a colocated engine adds its own. This is an estimate. ``plan --run`` uses a
    # measured value.
    reserve_bytes: int = 5 * GIB
    # Leaves 5 % for allocator fragmentation and 1 % for memory that the formulas do not count.
    usable_memory: float = 0.94
    train_efficiency: float = 0.4  # share of the peak reached in forward and backward passes of dense models
    moe_efficiency: float = 0.25  # the same for MoE models
    decode_efficiency: float = 0.6  # share of the memory bandwidth reached while generating
    link_efficiency: float = 0.7  # share of a link's bandwidth reached in a sync
    mean_length: float = 0.5  # mean length of prompts and responses, as a share of the longest
    expert_imbalance: float = 1.25  # tokens of the busiest expert rank over their mean, for memory


CONSERVATIVE = Assumptions()


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """A model of a run.

    ``offload`` lists the parts that are on the device only while they are used. With ``by_layer``, their layers are loaded
    one by one. ``frozen`` contains Megatron's names of tower tensors that are not trained. ``fp8``: layers multiply in 8
    bits. ``epochs`` and ``updates`` are numbers per step. With adapters, the reference is the same model and no separate
    role.
    """

    name: str
    geometry: ModelGeometry
    layout: ParallelLayout
    trained: bool
    dtype: str = "bf16"
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: tuple[str, ...] = ()
    epochs: int = 1
    updates: int = 1
    by_layer: bool = False
    optimizer: str = "adamw"
    state_dtype: str = "fp32"  # masters and moments
    hosted: float = 0.0  # share of masters and moments that stays on the host, which steps it
    adapters: ModelGeometry | None = None  # trained instead of the weights
    frozen: frozenset[str] = frozenset()
    fp8: bool = False
    megatron: Mapping[str, Any] = field(default_factory=dict)  # Megatron fields that the user sets


def roles_of(cfg: Config, world_size: int, dtype: str) -> list[PlannedRole]:
    """List the models that a resolved configuration builds, the actor first. ``dtype`` applies to models without their own."""
    trainer, generates = cfg.trainer, run_kind(cfg).generates
    geometry = read_geometry(cfg.model.path, run_kind(cfg).head)
    if cfg.actor.mtp.mode in MTP_TRAINED:
        geometry = replace(geometry, mtp_layers=num_mtp_layers(read_config(cfg.model.path, "model.path")))
    actor = _plan_trained_role("actor", cfg.actor, geometry, world_size, dtype, cfg.actor.vision.train)
    if generates:  # otherwise a step is one update of one model
        updates = _updates(trainer.prompts_per_step, trainer.minibatch_size, trainer.ppo_epochs)
        parts = offloaded_parts(cfg.actor.offload)
        actor = replace(actor, offload=parts, epochs=trainer.ppo_epochs, updates=updates)
    roles = [actor]
    # With adapters, the reference is the actor without them. A precomputed reference is freed before the actor is built.
    if needs_reference(cfg) and actor.adapters is None and not cfg.reference.precompute:
        compared = read_geometry(cfg.reference.path or cfg.model.path, "lm")
        roles.append(_frozen("reference", compared, actor.layout, dtype, cfg.reference, cfg.actor))
    if not generates:
        return roles
    critic, reward = cfg.critic, cfg.reward.model
    if needs_critic(cfg):
        valued = read_geometry(critic.path or cfg.model.path, "token")
        epochs = critic.ppo_epochs or trainer.ppo_epochs
        updates = _updates(trainer.prompts_per_step, critic.minibatch_size or trainer.minibatch_size, epochs)
        role = _plan_trained_role("critic", critic, valued, world_size, _dtype(critic.dtype, dtype), "none")
        roles.append(replace(role, offload=offloaded_parts(critic.offload), epochs=epochs, updates=updates))
    if reward.path is not None:
        own = parallel_layout(reward.layout, reward.ranks, world_size, "reward.model.layout")
        scoring = read_geometry(reward.path, "sequence")
        roles.append(_frozen("reward", scoring, own, _dtype(reward.dtype, dtype), reward, reward))
    return [*roles, *_teachers(cfg, actor, world_size, dtype)]


def _teachers(cfg: Config, actor: PlannedRole, world_size: int, dtype: str) -> list[PlannedRole]:
    """List the models that the policy learns from, in addition to itself."""
    teacher = cfg.teacher
    if teacher.weights == "average":
        return [_frozen("teacher", actor.geometry, actor.layout, _dtype(teacher.dtype, "fp32"), teacher, None)]
    if teacher.path is None:
        return []
    own = parallel_layout(teacher.layout, teacher.ranks, world_size, "teacher.layout")
    paths = {"teacher": teacher.path, **{f"teacher[{name}]": path for name, path in (teacher.sources or {}).items()}}
    return [
        _frozen(name, read_geometry(path, "lm"), own, _dtype(teacher.dtype, dtype), teacher, teacher)
        for name, path in paths.items()
    ]


def _plan_trained_role(
    name: str, group: ActorConfig | CriticConfig, geometry: ModelGeometry, world_size: int, dtype: str, tower: str
) -> PlannedRole:
    """Describe a trained model. ``tower`` names the part of its vision tower that is trained."""
    sizes, vision, still = adapter_sizes(group.lora), FAMILIES[geometry.family].vision, frozenset[str]()
    if vision is not None:
        frozen = set(vision.frozen(geometry, tower))
        still = frozenset(rule.mcore for rule in vision.rules(geometry) if frozen & set(rule.tensors))
    return PlannedRole(
        name,
        geometry,
        parallel_layout(group.layout, group.ranks, world_size, f"{name}.layout"),
        True,
        dtype,
        group.recompute,
        optimizer=group.optimizer.name,
        state_dtype=group.optimizer.state_dtype,
        hosted=group.optimizer.offload,
        adapters=None if sizes is None else replace(geometry, adapter=sizes),
        frozen=still,
        fp8=in_fp8(group),
        megatron=group.megatron or {},
    )


def _frozen(
    name: str,
    geometry: ModelGeometry,
    layout: ParallelLayout,
    dtype: str,
    group: ReferenceConfig | RewardModelConfig | TeacherConfig,
    computed_as: ActorConfig | RewardModelConfig | TeacherConfig | None,
) -> PlannedRole:
    """Describe a frozen model. ``computed_as`` is the group with its ``megatron`` fields."""
    return PlannedRole(
        name,
        geometry,
        layout,
        False,
        dtype,
        offload=("weights",) if is_offloaded(group.offload) else (),
        by_layer=group.offload == "by_layer",
        fp8=computed_as is not None and in_fp8(computed_as),
        megatron=(computed_as and computed_as.megatron) or {},
    )


def _dtype(stated: str | None, default: str) -> str:
    return default if stated in (None, "auto") else str(stated)


def _updates(prompts: int, minibatch: int | None, epochs: int) -> int:
    return epochs * (prompts // (minibatch or prompts))


def engines_apart(cfg: Config) -> bool:
    """Return whether engines have their own devices. Their ranks follow the ranks of the trainer."""
    return cfg.rollout.placement == "disaggregated" and run_kind(cfg).generates


def num_engines(cfg: Config, world_size: int) -> int:
    """Count the engines for ``world_size`` trainer ranks."""
    return cfg.rollout.num_engines if engines_apart(cfg) else world_size // engine_grid(cfg).size


def num_devices(cfg: Config, world_size: int) -> int:
    """Count the devices of the trainer and of disaggregated engines."""
    return world_size + (cfg.rollout.num_engines * engine_grid(cfg).size if engines_apart(cfg) else 0)


@dataclass(frozen=True, slots=True)
class EngineGrid:
    """The ranks of an engine: tensor parallel, pipeline stages, data parallel.

    Data-parallel ranks replicate the attention and share the experts. With ``ep`` each rank has whole experts, otherwise a
    part of each. ``drafts``: the last stage drafts with MTP layers, and therefore has an embedding.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    drafts: bool = False

    @property
    def size(self) -> int:
        """Number of ranks of an engine."""
        return self.tp * self.pp * self.dp


def engine_grid(cfg: Config) -> EngineGrid:
    """Return the grid of the engines. An engine without sharding is whole on every rank."""
    layout, kind = cfg.rollout.layout, engine_kind(cfg.rollout.engine)
    drafts = kind.reads("rollout.speculative") and cfg.rollout.speculative.method == "mtp"
    return EngineGrid(layout.tp, layout.pp, layout.dp, layout.ep, drafts) if kind.is_sharded else EngineGrid()


def parallel_layout(layout: LayoutConfig, ranks: list[int] | None, world_size: int, field: str) -> ParallelLayout:
    """Build a layout over all ranks, or over the ranks [first, end).

    Raises:
        ConfigError: the layout does not divide its ranks.
    """
    try:
        return ParallelLayout.of(layout, ranks, world_size)
    except ValueError as error:
        raise ConfigError(f"{field}: {error}; change it or the number of processes") from error


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step. Token numbers are expected values at the assumed mean length; ``microbatch_tokens`` is the limit."""

    sequences: int
    prompt_tokens: float
    response_tokens: float  # per sequence
    microbatch_tokens: int
    responses_per_prompt: int = 1  # responses that share one computed prompt; 1: prefixes are not shared

    def shared_prompts(self, role: PlannedRole) -> float:
        """Return the number of prompts per step that a model need not compute again."""
        is_short = self.prompt_tokens < SHORTEST_PREFIX
        if is_short or why_unshared(role.geometry, role.layout.cp, has_gpu=True) is not None:
            return 0.0
        return self.sequences * (1 - 1 / self.responses_per_prompt)

    def computed_tokens(self, role: PlannedRole) -> float:
        """Return the number of tokens per step that a model computes, over all ranks."""
        return self.tokens - self.shared_prompts(role) * self.prompt_tokens

    def copied_keys(self, role: PlannedRole) -> float:
        """Return the number of keys that attention copies per computed token, if the model shares prefixes.

        One kernel reads the paths of all segments one after another, so it reads a prompt once more for each of its
        responses. With context parallelism, a rank has two pieces of every segment, and reads the keys of all ranks.
        """
        if not self.shared_prompts(role):
            return 0.0
        cp, n = role.layout.cp, self.responses_per_prompt
        own, above = self.prompt_tokens + n * self.response_tokens, n * self.prompt_tokens
        return (own * cp + above * (2 * cp if cp > 1 else 1)) / own

    @property
    def tokens(self) -> float:
        """Return the number of tokens per step, over all ranks."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)


def workload(cfg: Config, assumed: Assumptions) -> Workload:
    """Return the work of a step: rows that it generates and trains on, or the given rows of a supervised run."""
    trainer, sampling = cfg.trainer, cfg.rollout.sampling
    if not run_kind(cfg).generates:
        rows, longest = trainer.prompts_per_step * run_kind(cfg).rows_per_example, longest_example(cfg)
        return Workload(rows, longest * assumed.mean_length, 0.0, trainer.max_tokens_per_microbatch)
    return Workload(
        trainer.prompts_per_step * sampling.n,
        cfg.data.max_prompt_tokens * assumed.mean_length,
        sampling.max_new_tokens * assumed.mean_length,
        trainer.max_tokens_per_microbatch,
        sampling.n if trainer.share_prefixes and trainer.packing else 1,
    )


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of one data-parallel rank in one update; for a frozen model, in one pass."""

    num_microbatches: int
    bubble: float  # share of the pipeline's time in which a stage is idle


def rank_share(work: Workload, role: PlannedRole) -> RankShare:
    """Count the microbatches of an update, and compute its pipeline bubble.

    The bubble is (p - 1) / (v m + p - 1) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
    """
    layout, share = role.layout, role.epochs / role.updates / role.layout.dp
    count = max(1, -(-int(work.computed_tokens(role) * share) // work.microbatch_tokens))
    if layout.vpp:
        count = -(-count // layout.pp) * layout.pp
    waiting = layout.pp - 1
    return RankShare(count, waiting / ((layout.vpp or 1) * count + waiting))


def forward_roles(cfg: Config, roles: Sequence[PlannedRole]) -> Sequence[PlannedRole]:
    """List the models that process the rows of a step without a backward pass."""
    if run_kind(cfg).generates:
        return roles
    compares = needs_reference(cfg) and not cfg.reference.precompute
    return roles[-1:] if compares else []  # the reference, or the actor without its adapters


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """All inputs of the memory estimate. ``world_size`` counts trainer ranks; disaggregated engines have further ranks."""

    cfg: Config
    roles: Sequence[PlannedRole]
    dtype: str
    gpu: GpuType
    assumed: Assumptions
    work: Workload
    world_size: int

    @property
    def sequences(self) -> int:
        """Number of responses that a data-parallel group of an engine decodes concurrently."""
        return with_sequences(self.cfg.rollout, self.gpu.memory_bytes, self.gpu.name).sequences

    @property
    def available(self) -> int:
        return int(self.gpu.memory_bytes * self.assumed.usable_memory)


def plan_inputs(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions) -> PlanInputs:
    """Collect the inputs of the memory and time estimates for a resolved configuration.

    Raises:
        ConfigError: a model's config.json cannot be read, or a layout does not divide its ranks.
    """
    dtype = "bf16" if cfg.model.dtype == "auto" else cfg.model.dtype
    roles = roles_of(cfg, world_size, dtype)
    return PlanInputs(cfg, roles, dtype, gpu, assumed, workload(cfg, assumed), world_size)


RATES = [field.name for field in fields(GpuType) if field.name != "name"]
ASSUMED = [field.name for field in fields(Assumptions)]


def device_and_assumptions(name: str, changes: Sequence[str]) -> tuple[GpuType, Assumptions]:
    """Apply the user's changes to a device and to the assumptions.

    Raises:
        ConfigError: a name is unknown, or a value is out of range.
    """
    gpu, assumed = GPUS[name], Assumptions()
    for change in changes:
        key, _, text = change.partition("=")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(f"--set {change!r} is not of the form NAME=NUMBER, as in --set reserve_bytes=2e9")
        if key not in RATES + ASSUMED:
            raise ConfigError(f"--set {key}: unknown name; there are: {', '.join(RATES + ASSUMED)}")
        value = type(getattr(gpu if key in RATES else assumed, key))(number)
        is_share = key in ASSUMED and key not in ("reserve_bytes", "expert_imbalance")
        if value < 0 or (value == 0 and key != "reserve_bytes") or (is_share and value > 1):
            bounds = "from 0 on" if key == "reserve_bytes" else "above 0 and at most 1" if is_share else "above 0"
            raise ConfigError(f"--set {change} is out of range; give a number {bounds}")
        gpu, assumed = (
            (replace(gpu, **{key: value}), assumed) if key in RATES else (gpu, replace(assumed, **{key: value}))
        )
    return gpu, assumed
