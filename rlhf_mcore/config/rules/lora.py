"""Check that adapters can be trained, of this model and beside what else is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.implied import adapter_sizes, needs_critic, needs_reference
from rlhf_mcore.config.model_files import with_head
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import ActorConfig, ActorLoraConfig, Config, CriticConfig, LoraConfig
from rlhf_mcore.config.schema.key import Choices, description_of
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.geometry import ModelGeometry


def lora_problems(cfg: Config) -> Iterator[str]:
    """Problems with ``actor.lora`` and ``critic.lora``, and with what they do not go together with."""
    yield from _role_problems(cfg, "actor", cfg.actor)
    if needs_critic(cfg):
        yield from _role_problems(cfg, "critic", cfg.critic)
    if cfg.actor.lora.rank is None:
        return
    name = f"actor.lora.rank={cfg.actor.lora.rank}"
    if cfg.actor.freeze:
        yield f"{name} freezes all weights of the model; set actor.freeze=[]"
    if cfg.actor.vision.train != "none":
        yield f"{name} freezes all weights of the tower; set actor.vision.train=none"
    if cfg.actor.mtp.mode in MTP_TRAINED:
        yield f"{name} is not supported with actor.mtp.mode={cfg.actor.mtp.mode}; set that to keep"
    if run_kind(cfg).generates and cfg.bridge.method == "gather":
        remedy = "bridge.method=planned" if engine_kind(cfg.rollout.engine).has_live_weights else "it to null"
        yield f"{name}: bridge.method=gather sends the weights without adapters; set {remedy}"
    if run_kind(cfg).generates and cfg.bridge.verify == "full":
        yield f"{name}: bridge.verify=full compares with the weights without adapters; set bridge.verify=digest"
    if needs_reference(cfg):
        yield from _reference_problems(cfg, name)


def _pissa_problems(role: str, group: ActorConfig | CriticConfig) -> Iterator[str]:
    """Half of what adapters hold is fixed there, and half begins with the same values."""
    if group.lora.dropout:
        yield f"{role}.lora.init=pissa is not supported with {role}.lora.dropout={group.lora.dropout}; set that to 0"
    if group.lora.path is not None:
        yield f"{role}.lora.init=pissa has no effect with {role}.lora.path={group.lora.path}; remove one of them"
    if group.optimizer.weight_decay:
        yield (
            f"{role}.lora.init=pissa: {role}.optimizer.weight_decay={group.optimizer.weight_decay} would move what is fixed; set "
            "it to 0"
        )


def _dora_problems(key: str, lora: LoraConfig) -> Iterator[str]:
    """Check what does not go together with magnitudes. ``key``: the group of ``lora``."""
    if lora.dropout:
        yield f"{key}.use_dora=True is not supported with {key}.dropout={lora.dropout}; set that to 0"
    if lora.init == "pissa":
        yield f"{key}.use_dora=True is not supported with {key}.init=pissa; set that to gaussian"
    if isinstance(lora, ActorLoraConfig) and lora.sync == "adapter":
        yield f"{key}.use_dora=True: engines add no magnitudes, so {key}.sync=adapter is not possible; set that to merge"


def _role_problems(cfg: Config, role: str, group: ActorConfig | CriticConfig) -> Iterator[str]:
    """Problems with the adapters of one model. ``role`` is the name of its ``group``."""
    lora, default, key = group.lora, type(group.lora)(), f"{role}.lora"
    if lora.rank is None:
        for item in fields(lora):
            value, allowed = getattr(lora, item.name), description_of(item).allowed
            is_misspelled = isinstance(allowed, Choices) and not allowed.holds(value)  # which is another problem
            if value != getattr(default, item.name) and not is_misspelled:
                yield f"{key}.{item.name}={value} has no effect with {key}.rank=null; set that, or remove it"
        return
    name = f"{key}.rank={lora.rank}"
    if not lora.targets:
        yield f"{key}.targets=[] leaves nothing to train; name linear layers, or all-linear"
    if lora.init == "pissa":
        yield from _pissa_problems(role, group)
    if lora.use_dora:
        yield from _dora_problems(key, lora)
    if group.moe.expert_bias_rate:
        yield f"{name}: biases of experts stay as they are; set {role}.moe.expert_bias_rate=0"
    if group.optimizer.name == "muon":
        yield f"{name} is not supported with {role}.optimizer.name=muon; set that to adamw"


def _reference_problems(cfg: Config, name: str) -> Iterator[str]:
    """Check the reference: it is the actor without its adapters, so no second model could be another or be moved."""
    reference = cfg.reference
    if reference.path not in (None, cfg.model.path):
        yield f"{name}: the reference is model.path without adapters; remove reference.path={reference.path}"
    if reference.refresh_steps:
        yield (
            f"{name}: the reference is the actor without adapters, and stays as it is; "
            f"set reference.refresh_steps={reference.refresh_steps} to 0"
        )
    if reference.offload or reference.offload_by_layer:
        which = "offload" if reference.offload else "offload_by_layer"
        yield f"{name}: the reference has no weights of its own; remove reference.{which}"


def target_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """Adapters of the actor that the model of ``geometry`` cannot have, or that its engine cannot add."""
    sizes = adapter_sizes(cfg.actor.lora)
    wants_adapters = cfg.actor.lora.sync == "adapter" and not cfg.actor.lora.use_dora  # which is another problem
    if sizes is not None and sizes.targets and run_kind(cfg).generates and wants_adapters:
        kind = engine_kind(cfg.rollout.engine)
        for problem in kind.adapter_problems(cfg, replace(geometry, adapter=sizes)):
            yield f"actor.lora.sync=adapter: {problem}; set actor.lora.sync=merge"
    yield from layer_problems(cfg.actor.lora, "actor.lora", with_head(geometry, run_kind(cfg).head))


def layer_problems(lora: LoraConfig, field: str, geometry: ModelGeometry) -> Iterator[str]:
    """List targets without a layer or without adapters in this model, and misfits of the adapter to begin with."""
    sizes = adapter_sizes(lora)
    if sizes is None or not sizes.targets:
        return
    from rlhf_mcore.families.adapters import check_targets

    adapters = replace(geometry, adapter=sizes)
    try:
        check_targets(FAMILIES[geometry.family], adapters, f"{field}.targets")
    except ConfigError as error:
        yield str(error)
        return
    if lora.path is not None and lora.init != "pissa":  # which is another problem
        from rlhf_mcore.config.adapter_files import start_problems

        yield from map(FileProblem, start_problems(lora.path, adapters, field))
