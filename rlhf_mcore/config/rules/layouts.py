"""Check that layouts fit the number of processes, and the models that they split."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.questions import (
    OtherModel,
    RoleLayout,
    balanced_stages,
    needs_critic,
    other_models,
    role_layouts,
)
from rlhf_mcore.config.resolve import default_world_size
from rlhf_mcore.config.rules.parts import layer_problems
from rlhf_mcore.config.rules.rollout import engine_keys
from rlhf_mcore.config.schema import Config, LayoutConfig, MoEConfig, RecomputeConfig, RolloutConfig
from rlhf_mcore.config.schema.rollout import RolloutLayoutConfig
from rlhf_mcore.config.schema.run import MAX_WORLD
from rlhf_mcore.families import FAMILIES, UNSUPPORTED, has_expert_bias
from rlhf_mcore.foreign import shorten
from rlhf_mcore.geometry import LatentSizes, ModelGeometry
from rlhf_mcore.readers.model_files import inspect_model, with_head


def world_problems(cfg: Config, world_size: int | None) -> Iterator[str]:
    """Check that the roles fit a world of ``world_size`` processes (None: ``default_world_size``)."""
    world, source = _world(cfg, world_size)
    for role in role_layouts(cfg):
        yield from layout_problems(role, world, f"{source}={world}")


def engine_problems(cfg: Config, world_size: int | None, geometry: ModelGeometry | None) -> Iterator[str]:
    """Check that the engines fit the world, and that an engine can split the model.

    ``geometry`` describes ``model.path``, or is None if it is not known.
    """
    world, source = _world(cfg, world_size)
    layout, ranks = cfg.rollout.layout, cfg.actor.ranks
    if ranks is not None and cfg.bridge.method == "gather":
        yield f"actor.ranks={ranks}: bridge.method=gather needs all ranks; set bridge.method=planned, or actor.ranks=null"
    if world % (size := layout.num_ranks) and cfg.rollout.placement == "colocated":
        yield f"{source}={world} is not divisible by {engine_keys(layout)}={size}; use a multiple of {size} processes"
    if geometry is not None:
        yield from engine_cut_problems(cfg.rollout, geometry, "model.path")


def engine_cut_problems(rollout: RolloutConfig, geometry: ModelGeometry, model: str) -> Iterator[str]:
    """Check that an engine can split the model. ``model`` is the key that names it."""
    layout, tp, groups = rollout.layout, rollout.layout.tp, geometry.num_kv_heads
    yield from tensor_cut_problems(geometry, "rollout.layout.tp", tp, model)
    if layout.pp > geometry.num_layers:
        yield f"rollout.layout.pp={layout.pp} is more than num_hidden_layers={geometry.num_layers} of {model}; lower it"
    yield from _engine_expert_problems(layout, geometry, model)
    family = FAMILIES.get(geometry.family, UNSUPPORTED)
    keeps_heads = family.has_stacked_experts or family.norm_of_projections
    if engine_kind(rollout.engine).is_sharded and keeps_heads and groups % tp:
        repeats = f"rollout.engine={rollout.engine} does not repeat the num_key_value_heads={groups}"
        yield f"rollout.layout.tp={tp}: {repeats} of {model}; choose a divisor of {groups}"


def _engine_expert_problems(layout: RolloutLayoutConfig, geometry: ModelGeometry, model: str) -> Iterator[str]:
    keys = f"rollout.layout.tp{'*dp' * (layout.dp > 1)}={layout.tp * layout.dp}"
    if (experts := geometry.experts) is None:
        for key, size in {"ep": layout.ep, "dp": layout.dp}.items():
            if size > 1:
                more = " and use more engines" if key == "dp" else ""
                yield f"rollout.layout.{key}={size}, but {model} has no experts; set it to 1{more}"
        return
    if layout.ep > 1:
        yield from _divides(f"rollout.layout.ep={layout.ep}", layout.ep, experts.count, "num_experts", model)
    else:
        yield from _divides(keys, layout.tp * layout.dp, experts.ffn_size, "moe_intermediate_size", model)
    if experts.count < layout.tp * layout.dp:
        yield f"{keys} is more than the {experts.count} experts of {model}; lower it"


def _world(cfg: Config, world_size: int | None) -> tuple[int, str]:
    """Return the number of processes, and a text for its source."""
    if world_size is not None:
        return world_size, "the number of processes"
    return default_world_size(cfg), "trainer.world_size"


def role_problems(cfg: Config, actor: ModelGeometry | None) -> Iterator[str]:
    """Check the models of the other roles, each with its layout."""
    for model in other_models(cfg):
        yield from model_problems(model, actor)
    if needs_critic(cfg):
        key, path = "model.path" if cfg.critic.path is None else "critic.path", cfg.critic.path or cfg.model.path
        geometry, _ = inspect_model(path, key, ("lm", "token"))
        if geometry is not None:
            yield from balance_problems("critic", cfg.critic.moe, geometry, key)
            yield from recompute_problems("critic", cfg.critic.recompute, geometry, packing=cfg.trainer.packing)
            yield from layer_problems(cfg.critic.lora, "critic.lora", with_head(geometry, "token"))


def model_problems(model: OtherModel, actor: ModelGeometry | None) -> Iterator[str]:
    """Check the files, vocabulary and layout of another model. ``actor`` is the actor's geometry, or None if it is not known."""
    key, path = model.key, model.path
    geometry, problems = inspect_model(path, key, model.heads)
    if key != "model.path":
        yield from problems
    if geometry is None or actor is None:
        return
    size, own = geometry.vocab_size, actor.vocab_size
    if size < own or (size > own and model.role != "teacher"):  # a teacher may have more
        yield f"{key}={path}: its vocab_size={size} is not model.path's {own}; choose a model with the same vocabulary"
    yield from cut_problems(model.role, model.layout, geometry, key)


def layout_problems(role: RoleLayout, world: int, source: str) -> Iterator[str]:
    """Check a role's layout and ranks in a world of ``world`` processes. ``source`` is a text for the source of that number."""
    name, layout = role.name, role.layout
    if world > MAX_WORLD:
        yield f"{source} is more than the limit of {MAX_WORLD}; lower it, or {name}.layout and {name}.ranks"
        return
    if layout.vpp is not None and layout.pp == 1:
        yield f"{name}.layout.vpp={layout.vpp} needs {name}.layout.pp of at least 2, found 1; set {name}.layout.vpp=null"
    if layout.sequence_parallel and layout.tp == 1:
        yield f"{name}.layout.sequence_parallel=True needs {name}.layout.tp of at least 2, found 1; set it to false"
    if role.ranks is not None:
        if not (len(role.ranks) == 2 and 0 <= role.ranks[0] < role.ranks[1] <= world):
            yield f"{name}.ranks={shorten(role.ranks)} is not [first, end) within {source}; choose ranks of the run"
            return
        world = role.ranks[1] - role.ranks[0]
        source = f"the number of ranks in {name}.ranks={role.ranks}"
    ranks, etp = layout.tp * layout.pp * layout.cp, layout.tp if layout.etp is None else layout.etp
    stage = world // layout.pp
    if world % ranks:
        product = f"{name}.layout.tp*pp*cp={layout.tp}*{layout.pp}*{layout.cp}={ranks}"
        yield f"{source} is not divisible by {product}; use a multiple of {ranks} processes or change {name}.layout"
    if layout.ep == 1 and etp != layout.tp:
        wanted = f"{name}.layout.tp={layout.tp} with {name}.layout.ep=1"
        yield f"{name}.layout.etp={etp} must equal {wanted}; set {name}.layout.etp=null or raise {name}.layout.ep"
    elif world % ranks == 0 and stage % (etp * layout.ep):
        product = f"{name}.layout.ep*etp={layout.ep}*{etp}={layout.ep * etp}"
        ranks_of = f"the {stage} ranks of a pipeline stage ({source} over {name}.layout.pp={layout.pp})"
        yield f"{product} does not divide {ranks_of}; change {name}.layout.ep or etp"


def cut_problems(role: str, layout: LayoutConfig, geometry: ModelGeometry, model: str) -> Iterator[str]:
    """Check that ``layout`` of ``role`` can split the model. ``model`` is the key that names it."""
    yield from tensor_cut_problems(geometry, f"{role}.layout.tp", layout.tp, model)
    yield from _expert_cut_problems(f"{role}.layout", layout, geometry, model)
    unusable = list(_stage_problems(f"{role}.layout", layout, geometry, model))
    yield from unusable or _selection_problems(f"{role}.layout", layout, geometry, model)


def balance_problems(role: str, moe: MoEConfig, geometry: ModelGeometry, model: str) -> Iterator[str]:
    """Check that a load-balancing loss has experts, and that an updated expert bias exists."""
    if moe.aux_loss_coef and not geometry.num_experts:
        yield f"{role}.moe.aux_loss_coef={moe.aux_loss_coef:g}, but {model} has no experts; set it to 0"
    if moe.expert_bias_rate and not has_expert_bias(geometry):
        yield f"{role}.moe.expert_bias_rate={moe.expert_bias_rate:g}, but the router of {model} has no bias per expert; set it to 0"


def recompute_problems(
    role: str, recompute: RecomputeConfig, geometry: ModelGeometry, *, packing: bool
) -> Iterator[str]:
    """Check that a recomputed layer finds the keys that an earlier layer selected for its microbatch."""
    if recompute.whole_layers and not packing and _layers_with_others_keys(geometry):
        yield (
            f"{role}.recompute.granularity={recompute.granularity} is supported with trainer.packing=true only, if layers "
            "use the keys selected in other layers; set it to true, or the granularity to off or selective"
        )


def _stage_problems(key: str, layout: LayoutConfig, geometry: ModelGeometry, model: str) -> Iterator[str]:
    stages, sizes, num_layers = layout.pp * (layout.vpp or 1), layout.layers_per_stage, geometry.num_layers
    name, layers = f"{key}.pp{'*vpp' * (layout.vpp is not None)}={stages}", f"num_hidden_layers={num_layers} of {model}"
    if stages > num_layers:
        yield f"{name} is more than {layers}; lower it"
        return
    given = f"{key}.layers_per_stage={shorten(sizes)}"
    example = f"for example {key}.layers_per_stage={_possible_stages(geometry, stages)}"
    if sizes is None and num_layers % stages:
        yield f"{name} does not divide {layers}; choose a divisor of {num_layers}, or set the layers of each stage, {example}"
    elif sizes is not None and len(sizes) != stages:
        yield f"{given} has {len(sizes)} numbers for {name} stages; give one number per stage, {example}"
    elif sizes is not None and (min(sizes) < 1 or sum(sizes) != num_layers):
        yield f"{given} does not add up to {layers}; give positive numbers with this sum, {example}"


def _selection_problems(key: str, layout: LayoutConfig, geometry: ModelGeometry, model: str) -> Iterator[str]:
    """Check that no stage begins with a layer that uses the keys selected in an earlier layer."""
    shared, stages = _layers_with_others_keys(geometry), layout.pp * (layout.vpp or 1)
    borders = list(accumulate(layout.layers_per_stage or balanced_stages(geometry.num_layers, stages)))[:-1]
    if wrong := [layer for layer in borders if layer in shared]:
        own = [layer for layer in range(1, geometry.num_layers) if layer not in shared]
        yield (
            f"{key}: a pipeline stage begins with layer {wrong[0]} of {model}, which uses the keys selected in an earlier "
            f"layer; let stages begin with layers that have an indexer ({shorten(own)}), for example "
            f"{key}.layers_per_stage={_possible_stages(geometry, stages)}, or lower pp or vpp"
        )


def _possible_stages(geometry: ModelGeometry, stages: int) -> list[int]:
    """Divide layers among stages about equally, with stages that begin with layers that select their own keys."""
    sizes, shared = balanced_stages(geometry.num_layers, stages), _layers_with_others_keys(geometry)
    own = [layer for layer in range(geometry.num_layers) if layer not in shared]
    borders = [0]
    for equal in accumulate(sizes[:-1]):
        later = [layer for layer in own if layer > borders[-1]]
        borders += sorted(later, key=lambda layer: abs(layer - equal))[:1]
    return [high - low for low, high in pairwise([*borders, geometry.num_layers])]


def _layers_with_others_keys(geometry: ModelGeometry) -> tuple[int, ...]:
    indexer = geometry.attention.indexer if isinstance(geometry.attention, LatentSizes) else None
    return () if indexer is None else indexer.shared_layers


def _expert_cut_problems(key: str, layout: LayoutConfig, geometry: ModelGeometry, model: str) -> Iterator[str]:
    if (experts := geometry.experts) is None:
        if layout.ep > 1:
            yield f"{key}.ep={layout.ep}, but {model} has no experts; set it to 1"
        return
    etp = layout.tp if layout.etp is None else layout.etp
    yield from _divides(f"{key}.ep={layout.ep}", layout.ep, experts.count, "num_experts", model)
    yield from _divides(f"{key}.etp={etp}", etp, experts.ffn_size, "moe_intermediate_size", model)
    if etp > 1 and FAMILIES.get(geometry.family, UNSUPPORTED).has_stacked_experts:
        more = f"set it to 1 (with {key}.tp > 1 this needs {key}.ep > 1)"
        yield f"{key}.etp={etp}: {model} stores all experts in one tensor, so experts cannot be split; {more}"
    if layout.tp > 1 and not layout.sequence_parallel:
        with_tp = f"{key}.sequence_parallel=False with {key}.tp={layout.tp}"
        yield f"{with_tp}: MoE models ({model}) need sequence parallelism to train with tensor parallelism; set it to true"


def _divides(shown: str, parts: int, size: int, name: str, model: str) -> Iterator[str]:
    if size % parts:
        yield f"{shown} does not divide {name}={size} of {model}; choose a divisor of {size}"


def tensor_cut_problems(geometry: ModelGeometry, field: str, tp: int, model: str) -> Iterator[str]:
    """Check that ``tp`` ranks can split heads and MLP of a model. ``field`` is the key of ``tp``."""
    sizes = {"num_attention_heads": geometry.num_heads}
    if geometry.has_dense_mlp:
        sizes["intermediate_size"] = geometry.ffn_size
    if geometry.experts is not None and geometry.experts.shared_ffn_size:
        sizes["shared_expert_intermediate_size"] = geometry.experts.shared_ffn_size
    if geometry.delta is not None:
        sizes["linear_num_key_heads"] = geometry.delta.key_heads
    if geometry.space is not None:
        sizes["n_groups"] = geometry.space.groups  # divides the number of heads
    for name, size in sizes.items():
        yield from _divides(f"{field}={tp}", tp, size, name, model)
    for name, attention in zip(
        ("num_key_value_heads", "num_global_key_value_heads"), geometry.attentions, strict=False
    ):
        groups = attention[0].num_kv_heads
        if geometry.num_heads % tp == 0 and max(groups, tp) % min(groups, tp):
            relation = f"neither divides nor is a multiple of {name}={groups} of {model}"
            yield f"{field}={tp} {relation}; choose a divisor or a multiple of {groups}"
