"""Search layouts that fit into memory, sorted by estimated time of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, value_of
from rlhf_mcore.config.questions import balanced_stages, needs_critic
from rlhf_mcore.config.rules.layouts import cut_problems as layout_problems
from rlhf_mcore.config.schema import Config, LayoutConfig, RecomputeConfig, RolloutLayoutConfig
from rlhf_mcore.config.schema.group import with_values
from rlhf_mcore.config.schema.rollout import truncates
from rlhf_mcore.config.validate import validate
from rlhf_mcore.families.quantised import QUANTISATIONS, cut_problems
from rlhf_mcore.geometry import ExpertSizes, ModelGeometry
from rlhf_mcore.planning.inputs import CONSERVATIVE, Assumptions, GpuType, PlanInputs, PlannedRole, plan_inputs
from rlhf_mcore.planning.phases import GENERATE, SYNC, engines_fit, models_fit
from rlhf_mcore.planning.plan import (
    RunPlan,
    make_plan,
    samples_ahead,
    step_seconds,
    with_least_memory,
)
from rlhf_mcore.planning.timing import phase_seconds
from rlhf_mcore.readers.model_files import read_geometry

SIZES = (1, 2, 4, 8, 16)
CONTEXTS = (
    1,
    2,
    4,
    8,
)  # context-parallel sizes to try if microbatches, which contain whole sequences, are longer than:
LONG_TOKENS = 16384
SHARES = (0.3, 0.5, 0.7, 0.85)
_ENGINE_PHASES = (GENERATE, SYNC)
MAX_SHOWN_WORLDS, MAX_SHOWN_SIZE = 6, 1024  # limits of a list of several worlds
_GROUPS = ("actor.layout", "actor.recompute", "critic.layout", "critic.recompute", "rollout.layout")
_VARIED = [key for key in KEYS if key.rpartition(".")[0] in _GROUPS]
_VARIED += ["rollout.num_engines", "rollout.gpu_memory_utilization"]
# Ways to need less memory, and their costs. A way with all changes of another way is offered only if the other does not fit.
_BF16_SUMS, _BF16_STATE = {"megatron": {"grad_reduce_in_fp32": False}}, {"optimizer.state_dtype": "bf16"}
_LESS_MEMORY: list[tuple[dict[str, Any], str]] = [
    ({"optimizer.offload": 0.5}, "the host steps half of the optimizer state: same arithmetic, slower updates"),
    (_BF16_SUMS, "gradients are summed in bf16: less precise"),
    (_BF16_STATE, "moments in bf16: less precise, needs Transformer Engine and a beta2 of about 0.95"),
    ({"optimizer.offload": 1.0}, "the host steps the optimizer state: same arithmetic, slower updates"),
    (_BF16_SUMS | _BF16_STATE, "gradients and moments in bf16: less precise, needs Transformer Engine"),
    (_BF16_SUMS | {"optimizer.offload": 1.0}, "gradients in bf16, and the host steps the optimizer state"),
]
ADAPTER_RANK = 8  # rank of suggested adapters; see docs/algorithms/lora.md


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout that fits: its overrides of the configuration, its plan, and its other costs."""

    overrides: tuple[str, ...]
    plan: RunPlan
    cost: str = ""


def suggest(
    cfg: Config, world_size: int, gpu: GpuType, count: int = 5, assumed: Assumptions = CONSERVATIVE
) -> list[Suggestion]:
    """Return the ``count`` fastest layouts that fit. Among equally fast layouts, the layout that changes fewer keys comes first.

    The search compares the layouts of the trained models first, then varies the engines' layouts for the fastest of them. It
    estimates the time of every candidate. It checks memory from the fastest candidate on, and the configuration's rules only for
    candidates that fit.
    """
    search = _Search(cfg, world_size, gpu, assumed)
    found: list[_Candidate] = []
    for layout in search.trained_layouts():
        if complete := search.best_engines(layout):
            found.append(complete)
        if len(found) == 2 * count:  # faster engines rarely compensate for slower training
            break
    best = sorted(found, key=_Candidate.rank)[:count]
    return [Suggestion(each.overrides, make_plan(each.cfg, world_size, gpu, assumed)) for each in best]


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A configuration in the search, with the estimated seconds of its phases."""

    cfg: Config
    overrides: tuple[str, ...]
    seconds: dict[str, float]
    inputs: PlanInputs  # with the ``offload`` that needs the least memory: if this does not fit, nothing does

    def rank(self) -> tuple[float, int]:
        return round(step_seconds(self.seconds, samples_ahead(self.cfg)), 2), len(self.overrides)

    def train_rank(self) -> tuple[float, int]:
        seconds = sum(seconds for name, seconds in self.seconds.items() if name not in _ENGINE_PHASES)
        return round(seconds, 2), len(self.overrides)

    @property
    def layouts(self) -> tuple[int, ...]:
        layouts = (self.cfg.actor.layout, self.cfg.critic.layout)
        return tuple(size for layout in layouts for size in (layout.tp, layout.pp, layout.cp, layout.ep))


@dataclass(frozen=True, slots=True)
class _Search:
    """The search over the layouts of one configuration in one world."""

    cfg: Config
    world_size: int
    gpu: GpuType
    assumed: Assumptions

    def trained_layouts(self) -> Iterator[_Candidate]:
        """Yield the layouts of the trained models that fit, the fastest first, each with its fastest recomputation."""
        candidates = map(self._find_candidate, _actor_layouts(self.cfg, self.world_size, self.gpu))
        taken: set[tuple[int, ...]] = set()
        for candidate in sorted(filter(None, candidates), key=_Candidate.train_rank):
            if candidate.layouts not in taken and models_fit(candidate.inputs) and self._is_valid(candidate):
                taken.add(candidate.layouts)
                yield candidate

    def best_engines(self, layout: _Candidate) -> _Candidate | None:
        """Return the candidate with the fastest engines that fit with a layout of the trained models, or None."""
        engines = map(self._find_candidate, _engines(layout.cfg, self.world_size, self.gpu))
        for candidate in sorted(filter(None, engines), key=_Candidate.rank):
            if engines_fit(candidate.inputs) and models_fit(candidate.inputs) and self._is_valid(candidate):
                return candidate
        return None

    def _find_candidate(self, cfg: Config) -> _Candidate | None:
        """Return the candidate for a configuration, or None if its layout does not divide the models or the world."""
        least = with_least_memory(cfg)
        try:
            inputs = plan_inputs(least, self.world_size, self.gpu, self.assumed)
        except ConfigError:
            return None
        if not all(_is_cut(role, cfg) for role in inputs.roles):
            return None
        return _Candidate(cfg, changes(self.cfg, cfg), phase_seconds(inputs), inputs)

    def _is_valid(self, candidate: _Candidate) -> bool:
        try:
            validate(candidate.cfg, self.world_size, check_files=False)
        except ConfigError:
            return False
        return True


def _is_cut(role: PlannedRole, cfg: Config) -> bool:
    """Return whether the tried layout can divide a model. Layouts of other models do not change."""
    layout = {"actor": cfg.actor.layout, "reference": cfg.actor.layout, "critic": cfg.critic.layout}.get(role.name)
    return layout is None or not any(layout_problems(role.name, layout, role.geometry, "model.path"))


@dataclass(frozen=True, slots=True)
class Offers:
    """Layouts that fit. If no layout fits the chosen world: larger worlds, ways that cost something, and adapters."""

    layouts: list[Suggestion]
    with_costs: Sequence[Suggestion] = ()
    adapters: Suggestion | None = None


def find_offers(cfg: Config, plan: RunPlan, assumed: Assumptions, *, is_chosen: bool) -> Offers:
    """Search layouts that fit: in the plan's world if the user has chosen it (``is_chosen``), else in several worlds.

    If none fits the chosen world, offer the fastest in a larger world, layouts with costs, and adapters.
    """
    found = suggest(cfg, plan.world_size, plan.gpu, assumed=assumed) if is_chosen else worlds(cfg, plan.gpu, assumed)
    if found or plan.fits:
        return Offers(found)
    world = (plan.world_size, plan.gpu, assumed)
    with_costs = with_less_memory(cfg, *world) if is_chosen else []
    return Offers(smallest_world(cfg, *world) if is_chosen else [], with_costs, with_adapters(cfg, *world))


def worlds(cfg: Config, gpu: GpuType, assumed: Assumptions) -> list[Suggestion]:
    """Return the fastest layout on 1, 2, 4, 8, ... processes, for the first ``MAX_SHOWN_WORLDS`` worlds with a layout that fits."""
    found: list[Suggestion] = []
    size = 1
    while size <= MAX_SHOWN_SIZE and len(found) < MAX_SHOWN_WORLDS:
        found += suggest(cfg, size, gpu, 1, assumed)
        size *= 2
    return found


def smallest_world(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions = CONSERVATIVE) -> list[Suggestion]:
    """Return the fastest layout in the smallest of 2, 4, ..., 64 times this world with a layout that fits, or [] if there is none."""
    found = (suggest(cfg, world_size * factor, gpu, 1, assumed) for factor in (2, 4, 8, 16, 32, 64))
    return next(filter(None, found), [])


def with_less_memory(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions) -> list[Suggestion]:
    """Return the fastest layout that fits for each way to need less memory, the fastest first. Each way has a cost."""
    found: list[tuple[set[str], Suggestion]] = []
    for ways, cost in _LESS_MEMORY:
        if any(keys <= ways.keys() for keys, _ in found):
            continue
        changed = {
            f"{name}.{key}": (getattr(cfg, name).megatron or {}) | value if key == "megatron" else value
            for name in ("actor", *(["critic"] if needs_critic(cfg) else []))
            for key, value in ways.items()
        }
        overrides = tuple(f"{key}={_override(value)}" for key, value in changed.items())
        for best in suggest(with_values(cfg, changed), world_size, gpu, 1, assumed):
            found.append(({*ways}, Suggestion((*overrides, *best.overrides), best.plan, cost)))
    return sorted((each for _, each in found), key=lambda each: each.plan.step_s)


def with_adapters(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions) -> Suggestion | None:
    """Return the fastest layout that fits if the run trains adapters instead of all weights.

    Returns None if the run already trains adapters, or if no layout fits with adapters.
    """
    changed: dict[str, Any] = {}
    if cfg.actor.lora.rank is None:
        changed["actor.lora.rank"] = ADAPTER_RANK
    if needs_critic(cfg) and cfg.critic.lora.rank is None:
        changed["critic.lora.rank"] = ADAPTER_RANK
    if not changed:
        return None
    overrides = tuple(f"{key}={rank}" for key, rank in changed.items())
    if cfg.actor.lora.rank is None:  # the reference is then the actor without adapters, so it has no weights to offload
        changed["reference.offload"] = "auto"
    found = suggest(with_values(cfg, changed), world_size, gpu, 1, assumed)
    return replace(found[0], overrides=(*overrides, *found[0].overrides)) if found else None


def _actor_layouts(cfg: Config, world_size: int, gpu: GpuType) -> Iterator[Config]:
    """Yield configurations with other layouts and recomputation of the actor. The critic keeps its own, or gets the same."""
    geometry = read_geometry(cfg.model.path)
    tensor = [size for size in SIZES if size <= min(gpu.per_node, world_size)]
    own = cfg.actor.layout
    contexts = CONTEXTS if cfg.trainer.max_tokens_per_microbatch > LONG_TOKENS else (1,)
    sizes = product(tensor, SIZES, contexts, SIZES if geometry.num_experts else (1,))
    for tp, pp, cp, ep in dict.fromkeys([(own.tp, own.pp, own.cp, own.ep), *sizes]):
        if world_size % (tp * pp * cp) or world_size // pp % ep or pp > geometry.num_layers:
            continue
        layout = _layout(cfg, geometry.num_layers, (tp, pp, cp, ep))
        for recompute in (
            cfg.actor.recompute,
            RecomputeConfig(granularity="off"),
            RecomputeConfig(granularity="full", num_layers=1),
        ):
            candidate = with_values(cfg, {"actor.layout": layout, "actor.recompute": recompute})
            yield candidate
            if needs_critic(cfg):
                yield with_values(candidate, {"critic.layout": layout, "critic.recompute": recompute})


def _engines(cfg: Config, world_size: int, gpu: GpuType) -> Iterator[Config]:
    """Yield configurations with other engine layouts and memory shares. Disaggregated engines keep their number of devices."""
    own, num_engines = cfg.rollout.layout, cfg.rollout.num_engines
    devices = num_engines * own.num_ranks if cfg.rollout.placement == "disaggregated" else 0
    geometry = read_geometry(cfg.model.path)
    in_blocks = cfg.rollout.quantization == "fp8" and engine_kind(cfg.rollout.engine).holds_8_bits
    rows = QUANTISATIONS["fp8"].block[0] if in_blocks else 1  # rows of a block, which engines do not divide
    layouts = [own, *_engine_layouts(min(gpu.per_node, world_size), geometry.experts, rows)]
    if _wants_plain_engines(cfg, geometry):
        layouts = [own, *(each for each in layouts if each.num_ranks == each.tp and each.ep == 1)]
    if in_blocks:
        layouts = [each for each in layouts if not any(cut_problems(geometry, each.tp, each.dp, each.ep))]
    grids = dict.fromkeys((each.tp, each.pp, each.dp, each.ep) for each in layouts if each.num_ranks <= world_size)
    for grid, share in product(grids, (cfg.rollout.gpu_memory_utilization, *SHARES)):
        layout = RolloutLayoutConfig(**dict(zip(("tp", "pp", "dp", "ep"), grid, strict=True)))
        engines, left = divmod(devices, layout.num_ranks) if devices else (num_engines, 0)
        if not left:
            made = {"layout": layout, "num_engines": engines, "gpu_memory_utilization": share}
            yield with_values(cfg, {f"rollout.{name}": value for name, value in made.items()})


def _wants_plain_engines(cfg: Config, geometry: ModelGeometry) -> bool:
    """Return whether engines support only tensor parallelism for this run, see docs/scale/parallelism.md."""
    replays = cfg.actor.router_replay == "rollout"
    return replays or truncates(cfg.rollout.sampling) or geometry.vision is not None


def _engine_layouts(node: int, experts: ExpertSizes | None, block: int) -> Iterator[RolloutLayoutConfig]:
    """Yield layouts of an engine: tensor parallel (slow across nodes), pipeline stages of one node each, and data parallel attention.

    If ``tp`` cannot divide experts into blocks of ``block`` rows, each rank gets whole experts, which takes the same time.
    """
    for tp, pp in (*product((*SIZES, 32), (1,)), (node, 2), (node, 4)):
        yield RolloutLayoutConfig(tp=tp, pp=pp, ep=tp if experts is not None and experts.ffn_size % (tp * block) else 1)
    if experts is not None and node > 1:
        yield from (RolloutLayoutConfig(dp=dp, ep=dp) for dp in (node, 2 * node))


def _layout(cfg: Config, num_layers: int, sizes: tuple[int, int, int, int]) -> LayoutConfig:
    tp, pp, cp, ep = sizes
    own = cfg.actor.layout
    if (own.tp, own.pp, own.cp, own.ep) == sizes:
        return own
    stages = balanced_stages(num_layers, pp) if num_layers % pp else None
    return LayoutConfig(
        tp=tp,
        pp=pp,
        vpp=None,
        layers_per_stage=stages,
        cp=cp,
        ep=ep,
        etp=1 if ep > 1 else None,
        sequence_parallel=tp > 1,
    )


def changes(old: Config, new: Config) -> tuple[str, ...]:
    """Return the overrides that change the layouts from ``old`` to ``new``."""
    overrides = []
    for key in _VARIED:
        if (value := value_of(new, key)) != value_of(old, key):
            overrides.append(f"{key}={_override(value)}")
    return tuple(overrides)


def _override(value: object) -> str:
    """Write a value as on a command line."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
