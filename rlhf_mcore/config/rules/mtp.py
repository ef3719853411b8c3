"""Rules for MTP layers: training them with this model and layout, and drafting with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError, FileProblem, shortened
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.mtp import MTP_KEY, num_mtp_layers
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.model_files import read_config, tensor_names


def mtp_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """List problems with ``actor.mtp`` and with MTP drafts. ``geometry`` describes ``model.path``."""
    mode, kind, layout, path = cfg.actor.mtp.mode, run_kind(cfg), cfg.actor.layout, cfg.model.path
    drafts = cfg.rollout.speculative
    if kind.generates and drafts.method == "mtp" and engine_kind(cfg.rollout.engine).reads("rollout.speculative"):
        yield from _model_problems(path, geometry, "rollout.speculative.method=mtp", "set it to off")
        count, wanted = num_mtp_layers(read_config(path, path)), drafts.num_tokens
        if wanted > count > 0 and wanted % count:
            relation = f"is neither at most nor a multiple of the {_layers(count)} of model.path"
            yield f"rollout.speculative.num_tokens={wanted} {relation}; set it to {count}"
    if mode not in MTP_TRAINED:
        return
    name, keep = f"actor.mtp.mode={mode}", "set it to keep"
    if kind.head != "lm":
        yield f"{name}: with algorithm.kind={kind.name} the model predicts no tokens; {keep}"
        return
    if mode == "joint" and kind.generates:
        yield f"{name} changes the gradient of the policy, so it needs algorithm.kind=sft; set it to train"
    if layout.cp > 1:
        yield f"{name} is not supported with actor.layout.cp={layout.cp}; {keep}, or actor.layout.cp to 1"
    overrides = cfg.actor.megatron or {}
    if overrides.get("overlap_grad_reduce") and layout.pp > 1:
        yield f"{name} with actor.layout.pp={layout.pp} is not supported with actor.megatron.overlap_grad_reduce; remove that"
    if overrides.get("tp_comm_overlap"):
        yield f"{name} is not supported with actor.megatron.tp_comm_overlap; remove that"
    yield from _model_problems(path, geometry, name, keep)


def _layers(count: int) -> str:
    return f"{count} MTP layer{'s' * (count != 1)}"


def _model_problems(path: str, geometry: ModelGeometry, setting: str, keep: str) -> Iterator[str]:
    """Check that a model has MTP layers that this package supports, and their weights."""
    prefix, family = f"{setting}: model.path={path}", FAMILIES[geometry.family]
    if not any(rule.layers == "mtp" for rule in family.rules):
        supported = [name for name, family in FAMILIES.items() if any(rule.layers == "mtp" for rule in family.rules)]
        unsupported = f"is of family {family.name}, whose MTP layers are not supported"
        yield f"{prefix} {unsupported} (supported: {', '.join(supported)}); {keep}"
        return
    count = num_mtp_layers(read_config(path, path))
    if count == 0:
        yield f"{prefix} has no MTP layers (config.json: {MTP_KEY}); {keep}"
    elif geometry.tied_embeddings:
        yield f"{prefix} has tied embeddings, which MTP layers do not support; {keep}"
    else:
        try:
            names = tensor_names(Path(path))
        except ConfigError:  # reported with the model
            names = None
        whole = replace(geometry, mtp_layers=count)
        rules = [(layer, rule) for layer in whole.mtp_numbers for rule in family.layer_rules(whole, layer)]
        needed = {
            tensor
            for layer, rule in rules
            for expert in range(whole.num_experts if "{k}" in rule.mcore else 1)
            for tensor in rule.shapes(whole, layer, expert)
        }
        if missing := sorted(needed - names) if names is not None else []:
            lacks = f"{len(missing)} of their tensors are missing ({shortened(missing, 2)})"
            yield FileProblem(
                f"{prefix} names {_layers(count)} in config.json, but {lacks}, as in directories saved by transformers; "
                f"use the original directory, or {keep}"
            )
