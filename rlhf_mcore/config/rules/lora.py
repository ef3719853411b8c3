"""Whether adapters can be trained, of this model and beside what else is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.implied import adapter_sizes
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config, LoraConfig
from rlhf_mcore.config.schema.key import Choices, description_of
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.geometry import ModelGeometry


def lora_problems(cfg: Config) -> Iterator[str]:
    """Problems with ``actor.lora`` and what it does not go together with."""
    lora, default = cfg.actor.lora, LoraConfig()
    if lora.rank is None:
        for item in fields(lora):
            value, allowed = getattr(lora, item.name), description_of(item).allowed
            is_misspelled = isinstance(allowed, Choices) and not allowed.holds(value)  # which is another problem
            if value != getattr(default, item.name) and not is_misspelled:
                yield f"actor.lora.{item.name}={value} has no effect with actor.lora.rank=null; set that, or remove it"
        return
    name = f"actor.lora.rank={lora.rank}"
    if not lora.targets:
        yield "actor.lora.targets=[] leaves nothing to train; name linear layers, or all-linear"
    if lora.init == "pissa":
        yield from _pissa_problems(cfg)
    if lora.use_dora:
        yield "actor.lora.use_dora=True is not supported yet; set it to false"
    if run_kind(cfg).head != "lm":
        yield f"{name}: with algorithm.kind={cfg.algorithm.kind} a new head has to be trained too; set actor.lora.rank=null"
    if cfg.model.layer_spec == "te":
        yield f"{name} is not supported with the layers of Transformer Engine; set model.layer_spec=local, or auto"
    if cfg.actor.freeze:
        yield f"{name} freezes all weights of the model; set actor.freeze=[]"
    if cfg.actor.mtp.mode in MTP_TRAINED:
        yield f"{name} is not supported with actor.mtp.mode={cfg.actor.mtp.mode}; set that to keep"
    if cfg.actor.moe.expert_bias_rate:
        yield f"{name}: biases of experts stay as they are; set actor.moe.expert_bias_rate=0"
    if cfg.actor.optimizer.name == "muon":
        yield f"{name} is not supported with actor.optimizer.name=muon; set that to adamw"
    if run_kind(cfg).generates and cfg.bridge.method == "gather":
        yield f"{name}: bridge.method=gather sends the weights without adapters; set bridge.method=planned"
    if run_kind(cfg).generates and cfg.bridge.verify == "full":
        yield f"{name}: bridge.verify=full compares with the weights without adapters; set bridge.verify=digest"
    if run_kind(cfg).generates and cfg.algorithm.kl.coef:
        yield from _reference_problems(cfg, name)


def _pissa_problems(cfg: Config) -> Iterator[str]:
    """Half of what adapters hold is fixed there, and half begins with the same values."""
    if cfg.actor.lora.dropout:
        yield f"actor.lora.init=pissa is not supported with actor.lora.dropout={cfg.actor.lora.dropout}; set that to 0"
    if cfg.actor.lora.path is not None:
        yield f"actor.lora.init=pissa has no effect with actor.lora.path={cfg.actor.lora.path}; remove one of them"
    if cfg.actor.optimizer.weight_decay:
        yield (
            f"actor.lora.init=pissa: actor.optimizer.weight_decay={cfg.actor.optimizer.weight_decay} would move what is fixed; set "
            "it to 0"
        )


def _reference_problems(cfg: Config, name: str) -> Iterator[str]:
    """The reference is the actor without its adapters: there is no second model, which could be another or be moved."""
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
    """Targets that the model of ``geometry`` does not have, or that take no adapter, and adapters to begin with that are others."""
    sizes = adapter_sizes(cfg.actor.lora)
    if sizes is None or not sizes.targets:
        return
    from rlhf_mcore.families.adapters import check_targets

    if run_kind(cfg).generates and cfg.actor.lora.sync == "adapter":
        kind = engine_kind(cfg.rollout.engine)
        for problem in kind.adapter_problems(cfg, replace(geometry, adapter=sizes)):
            yield f"actor.lora.sync=adapter: {problem}; set actor.lora.sync=merge"
    try:
        check_targets(FAMILIES[geometry.family], replace(geometry, adapter=sizes), "actor.lora.targets")
    except ConfigError as error:
        yield str(error)
        return
    if cfg.actor.lora.path is not None:
        from rlhf_mcore.config.adapter_files import start_problems

        yield from map(FileProblem, start_problems(cfg.actor.lora.path, replace(geometry, adapter=sizes), "actor.lora"))
