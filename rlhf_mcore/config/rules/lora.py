"""Rules for adapters: other keys, the model's layers, and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.questions import adapter_sizes, is_offloaded, needs_critic, needs_reference
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import ActorConfig, Config, CriticConfig, LoraConfig
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.adapters import check_targets
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.plugins import load_plugin, missing_plugin
from rlhf_mcore.readers.adapter_files import start_problems
from rlhf_mcore.readers.model_files import with_head


def lora_problems(cfg: Config) -> Iterator[str]:
    """List problems with ``actor.lora`` and ``critic.lora``, alone and with other keys."""
    yield from _role_problems(cfg, "actor", cfg.actor)
    if needs_critic(cfg):
        yield from _role_problems(cfg, "critic", cfg.critic)
    if cfg.actor.lora.rank is None:
        return
    name = f"actor.lora.rank={cfg.actor.lora.rank}"
    if cfg.actor.freeze:
        yield f"{name} freezes all weights of the model; set actor.freeze=[]"
    if cfg.actor.vision.train != "none":
        yield f"{name} freezes all weights of the vision tower; set actor.vision.train=none"
    if cfg.actor.mtp.mode in MTP_TRAINED:
        yield f"{name} is not supported with actor.mtp.mode={cfg.actor.mtp.mode}; set that to keep"
    if run_kind(cfg).generates and cfg.bridge.method == "gather":
        remedy = "bridge.method=planned" if engine_kind(cfg.rollout.engine).has_live_weights else "it to null"
        yield f"{name}: bridge.method=gather sends the weights without adapters; set {remedy}"
    if needs_reference(cfg):
        yield from _reference_problems(cfg, name)


def _plugin_problems(key: str, role: str, group: ActorConfig | CriticConfig) -> Iterator[str]:
    """List problems with adapters that need plug-ins (PiSSA, DoRA). ``key`` is the group ``lora`` of ``role``."""
    lora = group.lora
    for is_used, name, needed_by in (
        (lora.init == "pissa", "pissa", f"{key}.init=pissa"),
        (lora.use_dora, "dora", f"{key}.use_dora=true"),
    ):
        if not is_used:
            continue
        problem = missing_plugin("adapters", name, needed_by)
        if problem is not None:
            yield problem
        else:
            yield from load_plugin("adapters", name, needed_by).list_problems(role, group)


def _role_problems(cfg: Config, role: str, group: ActorConfig | CriticConfig) -> Iterator[str]:
    """List problems with the adapters of one model. ``role`` is the name of its ``group``."""
    lora, default, key = group.lora, type(group.lora)(), f"{role}.lora"
    if lora.rank is None:
        for name, value in lora:
            if value != getattr(default, name):
                yield f"{key}.{name}={value} has no effect with {key}.rank=null; set that, or remove it"
        return
    name = f"{key}.rank={lora.rank}"
    if not lora.targets:
        yield f"{key}.targets=[] selects no layers; name linear layers, or all-linear"
    yield from _plugin_problems(key, role, group)
    if group.moe.expert_bias_rate:
        yield f"{name}: expert biases are frozen; set {role}.moe.expert_bias_rate=0"
    if group.optimizer.name == "muon":
        yield f"{name} is not supported with {role}.optimizer.name=muon; set that to adamw"


def _reference_problems(cfg: Config, name: str) -> Iterator[str]:
    """Check the reference, which is the actor without its adapters. There is no second model to load, refresh or offload."""
    reference = cfg.reference
    if reference.path not in (None, cfg.model.path):
        yield f"{name}: the reference is model.path without adapters; remove reference.path={reference.path}"
    if reference.refresh_steps:
        yield (
            f"{name}: the reference is the actor without adapters, which never changes; "
            f"set reference.refresh_steps={reference.refresh_steps} to 0"
        )
    if is_offloaded(reference.offload):
        yield f"{name}: the reference has no separate weights; remove reference.offload={reference.offload}"


def target_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """List problems with the actor's adapters in the model of ``geometry`` and in its engine."""
    sizes = adapter_sizes(cfg.actor.lora)
    wants_adapters = cfg.actor.lora.sync == "adapter" and not cfg.actor.lora.use_dora  # its plug-in reports DoRA
    if sizes is not None and sizes.targets and run_kind(cfg).generates and wants_adapters:
        kind = engine_kind(cfg.rollout.engine)
        for problem in kind.adapter_problems(cfg.rollout, replace(geometry, adapter=sizes)):
            yield f"actor.lora.sync=adapter: {problem}; set actor.lora.sync=merge"
    yield from layer_problems(cfg.actor.lora, "actor.lora", with_head(geometry, run_kind(cfg).head))


def layer_problems(lora: LoraConfig, field: str, geometry: ModelGeometry) -> Iterator[str]:
    """List invalid targets for this model, and mismatches of the initial adapters."""
    sizes = adapter_sizes(lora)
    if sizes is None or not sizes.targets:
        return
    adapters = replace(geometry, adapter=sizes)
    try:
        check_targets(FAMILIES[geometry.family], adapters, f"{field}.targets")
    except ConfigError as error:
        yield str(error)
        return
    if lora.path is not None and lora.init != "pissa":  # its plug-in reports PiSSA
        yield from map(FileProblem, start_problems(lora.path, adapters, field))
