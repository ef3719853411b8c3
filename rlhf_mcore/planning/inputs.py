"""Hold what a plan is made from: the device, the models with their layouts, and the work of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.implied import (
    adapter_sizes,
    in_fp8,
    longest_example,
    needs_critic,
    needs_reference,
    offloaded_parts,
)
from rlhf_mcore.config.model_files import read_config, read_geometry
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import (
    Config,
    LayoutConfig,
    RecomputeConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.mtp import num_mtp_layers
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuType:
    """One device of a node. Rates are peaks from the makers' data sheets, links in one direction."""

    name: str
    memory_bytes: int  # what torch reports as the device's total
    bf16_flops: float  # dense
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float  # to all other devices of the node together
    network_bytes_per_s: float  # this device's share of the node's network
    host_bytes_per_s: float = 64e9  # between the host and the device
    per_node: int = 8


HOPPER = ("H100", "H200")  # of compute capability 9.0, which ``actor.fp8`` asks for
GPUS = {
    # NVIDIA's data sheets of DGX H100, H200, A100 and B200: 400 Gb/s of network a GPU and PCIe 5; 200 Gb/s and PCIe 4 with A100.
    "H100": GpuType("H100", int(79.1 * GIB), 989e12, 3.35e12, 450e9, 50e9),
    "H200": GpuType("H200", int(139.8 * GIB), 989e12, 4.8e12, 450e9, 50e9),
    "A100": GpuType("A100", int(79.15 * GIB), 312e12, 2.04e12, 300e9, 25e9, 32e9),
    "A100-40": GpuType("A100-40", int(39.4 * GIB), 312e12, 1.56e12, 300e9, 25e9, 32e9),
    "B200": GpuType("B200", int(178.3 * GIB), 2250e12, 8.0e12, 900e9, 50e9),
}


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assume what cannot be computed. The defaults err on the side of caution for memory."""

    reserve_bytes: int = int(2.5 * GIB)  # CUDA context, NCCL's and cuBLAS's buffers
    usable_memory: float = 0.95  # the allocator's holes
    train_efficiency: float = 0.4  # share of the peak reached in forward and backward passes of dense models
    moe_efficiency: float = 0.25  # and of mixtures of experts
    decode_efficiency: float = 0.6  # share of the memory's bandwidth reached while generating
    link_efficiency: float = 0.7  # share of a link's bandwidth reached in a sync
    mean_length: float = 0.5  # mean length of prompts and responses, as a share of the longest
    expert_imbalance: float = 1.25  # tokens of the busiest expert rank over their mean, for memory


@dataclass(frozen=True, slots=True)
class PlannedRole:
    """One model of a run.

    ``offload``: the parts that are on the device only while they are used; ``by_layer``: layers of them come one by one.
    ``frozen`` are Megatron's tensors that do not learn, those of a tower. ``fp8``: layers multiply in 8 bits. ``epochs`` and
    ``updates`` are those of a step. A reference of a model with adapters is that model, and no role.
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
    adapters: ModelGeometry | None = None  # what learns in the place of the weights
    frozen: frozenset[str] = frozenset()
    fp8: bool = False


def roles_of(cfg: Config, world_size: int, dtype: str) -> list[PlannedRole]:
    """List the models that a resolved configuration builds, the actor first. ``dtype``: of those that do not have their own."""
    trainer, critic, reward = cfg.trainer, cfg.critic, cfg.reward.model
    layout = parallel_layout(cfg.actor.layout, cfg.actor.ranks, world_size, "actor.layout")
    geometry = read_geometry(cfg.model.path, run_kind(cfg).head)
    if cfg.actor.mtp.mode in MTP_TRAINED:
        geometry = replace(geometry, mtp_layers=num_mtp_layers(read_config(cfg.model.path, "model.path")))
    sizes = adapter_sizes(cfg.actor.lora)
    adapters = None if sizes is None else replace(geometry, adapter=sizes)
    name = cfg.actor.optimizer.name
    still = _frozen_of_tower(geometry, cfg.actor.vision.train)
    frozen = []
    if (
        needs_reference(cfg) and adapters is None and not cfg.reference.precompute
    ):  # else it is gone before the actor is there
        compared = read_geometry(cfg.reference.path or cfg.model.path, "lm")
        reference = _frozen("reference", compared, layout, dtype, cfg.reference)
        frozen = [replace(reference, fp8=in_fp8(cfg.actor))]
    if not run_kind(cfg).generates:  # a step is one update of one model
        how = cfg.actor.recompute
        learned = PlannedRole(
            "actor", geometry, layout, True, dtype, how, optimizer=name, adapters=adapters, frozen=still
        )
        return [replace(learned, fp8=in_fp8(cfg.actor)), *frozen]
    updates = _updates(trainer.prompts_per_step, trainer.minibatch_size, trainer.ppo_epochs)
    roles = [
        PlannedRole(
            "actor",
            geometry,
            layout,
            True,
            dtype,
            cfg.actor.recompute,
            offloaded_parts(cfg.actor.offload),
            epochs=trainer.ppo_epochs,
            updates=updates,
            optimizer=name,
            adapters=adapters,
            frozen=still,
            fp8=in_fp8(cfg.actor),
        ),
        *frozen,
    ]
    if needs_critic(cfg):
        own = parallel_layout(critic.layout, critic.ranks, world_size, "critic.layout")
        geometry = read_geometry(critic.path or cfg.model.path, "token")
        epochs = critic.ppo_epochs or trainer.ppo_epochs
        updates = _updates(trainer.prompts_per_step, critic.minibatch_size or trainer.minibatch_size, epochs)
        own_dtype = _dtype(critic.dtype, dtype)
        parts = offloaded_parts(critic.offload)
        name, how = critic.optimizer.name, critic.recompute
        critic_sizes = adapter_sizes(critic.lora)
        learns = None if critic_sizes is None else replace(geometry, adapter=critic_sizes)
        role = PlannedRole("critic", geometry, own, True, own_dtype, how, parts, epochs, updates, optimizer=name)
        still = _frozen_of_tower(geometry, "none")
        roles.append(replace(role, adapters=learns, frozen=still, fp8=in_fp8(critic)))
    if reward.path is not None:
        own = parallel_layout(reward.layout, reward.ranks, world_size, "reward.model.layout")
        geometry = read_geometry(reward.path, "sequence")
        own_dtype = _dtype(reward.dtype, dtype)
        roles.append(replace(_frozen("reward", geometry, own, own_dtype, reward), fp8=in_fp8(reward)))
    return [*roles, *_teachers(cfg, roles[0], world_size, dtype)]


def _teachers(cfg: Config, actor: PlannedRole, world_size: int, dtype: str) -> list[PlannedRole]:
    """List the models that the policy learns from, beside itself."""
    teacher = cfg.teacher
    if teacher.weights == "average":
        return [_frozen("teacher", actor.geometry, actor.layout, _dtype(teacher.dtype, "fp32"), teacher)]
    if teacher.path is None:
        return []
    own = parallel_layout(teacher.layout, teacher.ranks, world_size, "teacher.layout")
    paths = {"teacher": teacher.path, **{f"teacher[{name}]": path for name, path in (teacher.sources or {}).items()}}
    return [
        replace(
            _frozen(name, read_geometry(path, "lm"), own, _dtype(teacher.dtype, dtype), teacher), fp8=in_fp8(teacher)
        )
        for name, path in paths.items()
    ]


def _frozen_of_tower(geometry: ModelGeometry, train: str) -> frozenset[str]:
    """Return Megatron's names of the tensors of a tower of which ``train`` learns."""
    if (vision := FAMILIES[geometry.family].vision) is None:
        return frozenset()
    still = set(vision.frozen(geometry, train))
    return frozenset(rule.mcore for rule in vision.rules(geometry) if still & set(rule.tensors))


def _dtype(stated: str | None, default: str) -> str:
    return default if stated in (None, "auto") else str(stated)


def _frozen(
    name: str,
    geometry: ModelGeometry,
    layout: ParallelLayout,
    dtype: str,
    cfg: ReferenceConfig | RewardModelConfig | TeacherConfig,
) -> PlannedRole:
    parts, by_layer = (("weights",) if cfg.offload else ()), bool(cfg.offload) and cfg.offload_by_layer
    return PlannedRole(name, geometry, layout, False, dtype, offload=parts, by_layer=by_layer)


def _updates(prompts: int, minibatch: int | None, epochs: int) -> int:
    return epochs * (prompts // (minibatch or prompts))


def engines_apart(cfg: Config) -> bool:
    """Tell whether engines have devices of their own. Their ranks follow those of the trainer."""
    return cfg.rollout.placement == "disaggregated" and run_kind(cfg).generates


def num_engines(cfg: Config, world_size: int) -> int:
    """Count the engines beside, or on, so many ranks of the trainer."""
    return cfg.rollout.num_engines if engines_apart(cfg) else world_size // engine_grid(cfg).size


@dataclass(frozen=True, slots=True)
class EngineGrid:
    """Cut an engine into ranks, counted as vLLM counts them: tensor parallel, then stages, then data parallel.

    Data-parallel ranks have the same attention, and share the experts. With ``ep`` each has whole ones, else a part of all.
    ``drafts``: whether the last stage drafts by MTP layers, and so has an embedding.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    drafts: bool = False

    @property
    def size(self) -> int:
        """Ranks of an engine."""
        return self.tp * self.pp * self.dp

    def stage(self, rank: int) -> int:
        return rank // self.tp % self.pp

    def expert_rank(self, rank: int) -> int:
        """Return its number among the ranks of its stage, which share the experts."""
        return rank // (self.tp * self.pp) * self.tp + rank % self.tp

    def layers(self, num_layers: int, stage: int) -> range:
        """Return the layers of a stage. Those that are left over are on the last stages but the very last, as in vLLM."""
        each, more = divmod(num_layers, self.pp)
        sizes = [each + (self.pp - 1 - more <= number < self.pp - 1) for number in range(self.pp)]
        first = sum(sizes[:stage])
        return range(first, first + sizes[stage])


def engine_grid(cfg: Config) -> EngineGrid:
    """Return how engines are cut. One that is not sharded is whole on every rank."""
    layout, kind = cfg.rollout.layout, engine_kind(cfg.rollout.engine)
    drafts = kind.reads("rollout.speculative") and cfg.rollout.speculative.method == "mtp"
    return EngineGrid(layout.tp, layout.pp, layout.dp, layout.ep, drafts) if kind.is_sharded else EngineGrid()


def parallel_layout(layout: LayoutConfig, ranks: list[int] | None, world_size: int, field: str) -> ParallelLayout:
    """Build a layout over all ranks, or over [first, end) of them.

    Raises:
        ConfigError: it does not divide its ranks.
    """
    try:
        return ParallelLayout.of(layout, ranks, world_size)
    except ValueError as error:
        raise ConfigError(f"{field}: {error}; change it or the number of processes") from error


@dataclass(frozen=True, slots=True)
class Workload:
    """One step. Tokens are expected ones, at the assumed mean length; ``microbatch_tokens`` is the limit."""

    sequences: int
    prompt_tokens: float
    response_tokens: float  # of a sequence
    microbatch_tokens: int

    @property
    def tokens(self) -> float:
        """Return the tokens of a step, over all ranks."""
        return self.sequences * (self.prompt_tokens + self.response_tokens)


def workload(cfg: Config, assumed: Assumptions) -> Workload:
    """Describe what a step generates and learns from; for a supervised run what it is given."""
    trainer, sampling = cfg.trainer, cfg.rollout.sampling
    if not run_kind(cfg).generates:
        rows, longest = trainer.prompts_per_step * run_kind(cfg).rows_per_example, longest_example(cfg)
        return Workload(rows, longest * assumed.mean_length, 0.0, trainer.max_tokens_per_microbatch)
    return Workload(
        trainer.prompts_per_step * sampling.n,
        cfg.data.max_prompt_tokens * assumed.mean_length,
        sampling.max_new_tokens * assumed.mean_length,
        trainer.max_tokens_per_microbatch,
    )


@dataclass(frozen=True, slots=True)
class RankShare:
    """The share of one data-parallel rank in one update (for a frozen model in one pass)."""

    dp: int
    sequences: float
    num_microbatches: int
    bubble: float  # share of the pipeline's time in which a stage waits


def rank_share(work: Workload, role: PlannedRole) -> RankShare:
    """Count microbatches of an update, and the bubble (p - 1) / (v m + p - 1) (Narayanan et al. 2021, arXiv 2104.04473, 2.2)."""
    layout, share = role.layout, role.epochs / role.updates / role.layout.dp
    count = max(1, -(-int(work.tokens * share) // work.microbatch_tokens))
    if layout.vpp:
        count = -(-count // layout.pp) * layout.pp
    waiting = layout.pp - 1
    return RankShare(layout.dp, work.sequences * share, count, waiting / ((layout.vpp or 1) * count + waiting))


def forward_roles(cfg: Config, roles: Sequence[PlannedRole]) -> Sequence[PlannedRole]:
    """List the models that run over the rows of a step without a backward pass."""
    if run_kind(cfg).generates:
        return roles
    compares = needs_reference(cfg) and not cfg.reference.precompute
    return roles[-1:] if compares else []  # the reference, or the actor without its adapters


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """All that memory depends on. ``world_size``: ranks of the trainer; engines of their own have further ones."""

    cfg: Config
    roles: Sequence[PlannedRole]
    dtype: str
    gpu: GpuType
    assumed: Assumptions
    work: Workload
    world_size: int

    @property
    def available(self) -> int:
        return int(self.gpu.memory_bytes * self.assumed.usable_memory)


RATES = [field.name for field in fields(GpuType) if field.name != "name"]
ASSUMED = [field.name for field in fields(Assumptions)]


def device_and_assumptions(name: str, changes: Sequence[str]) -> tuple[GpuType, Assumptions]:
    """Apply the user's changes to a device and to the assumptions.

    Raises:
        ConfigError: there is no such number, or it cannot have that value.
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
            raise ConfigError(f"--set {key}: no such number; there are: {', '.join(RATES + ASSUMED)}")
        value = type(getattr(gpu if key in RATES else assumed, key))(number)
        is_share = key in ASSUMED and key not in ("reserve_bytes", "expert_imbalance")
        if value < 0 or (value == 0 and key != "reserve_bytes") or (is_share and value > 1):
            bounds = "from 0 on" if key == "reserve_bytes" else "above 0 and at most 1" if is_share else "above 0"
            raise ConfigError(f"--set {change} is out of range; give a number {bounds}")
        gpu, assumed = (
            (replace(gpu, **{key: value}), assumed) if key in RATES else (gpu, replace(assumed, **{key: value}))
        )
    return gpu, assumed
