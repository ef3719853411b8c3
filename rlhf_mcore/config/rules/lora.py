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
    yield from _role_problems("actor", cfg.actor)
    if needs_critic(cfg):
        yield from _role_problems("critic", cfg.critic)
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


def _role_problems(role: str, group: ActorConfig | CriticConfig) -> Iterator[str]:
    """List problems with the adapters of one model, also those that need plug-ins. ``role`` is the name of its ``group``."""
    lora, name = group.lora, f"{role}.lora.rank={group.lora.rank}"
    if lora.rank is None:
        return
    if not lora.targets:
        yield f"{role}.lora.targets=[] selects no layers; name linear layers, or all-linear"
    plugins = {"pissa": (lora.init == "pissa", "init=pissa"), "dora": (lora.use_dora, "use_dora=true")}
    for plugin, (is_used, setting) in plugins.items():
        if is_used and (problem := missing_plugin("adapters", plugin, f"{role}.lora.{setting}")) is not None:
            yield problem
        elif is_used:
            yield from load_plugin("adapters", plugin, f"{role}.lora.{setting}").list_problems(role, group)
    if group.moe.expert_bias_rate:
        yield f"{name}: expert biases are frozen; set {role}.moe.expert_bias_rate=0"
    if group.optimizer.name == "muon":
        yield f"{name} is not supported with {role}.optimizer.name=muon; set that to adamw"


def _reference_problems(cfg: Config, name: str) -> Iterator[str]:
    """Check the reference, which is the actor without its adapters. There is no second model to load, refresh or offload."""
    reference = cfg.reference
    if reference.path not in (None, cfg.model.path):
        yield f"{name}: the reference is model.path without adapters; remove reference.path={reference.path}"
    if steps := reference.refresh_steps:
        yield f"{name}: the reference is the actor without adapters and never changes; set reference.refresh_steps={steps} to 0"
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
