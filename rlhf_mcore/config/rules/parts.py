"""Rules for parts of models: adapters, MTP layers and the vision tower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import Any

from rlhf_mcore.config.choices import MTP_TRAINED, run_kind
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError, FileProblem, join_first
from rlhf_mcore.config.questions import (
    adapter_sizes,
    balanced_stages,
    is_offloaded,
    needs_critic,
    needs_reference,
    other_models,
)
from rlhf_mcore.config.schema import ActorConfig, Config, CriticConfig, LayoutConfig, LoraConfig
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.adapters import check_targets
from rlhf_mcore.families.mtp import MTP_KEY, num_mtp_layers
from rlhf_mcore.foreign import read_json
from rlhf_mcore.geometry import LatentSizes, ModelGeometry, VisionSizes
from rlhf_mcore.plugins import load_plugin, missing_plugin
from rlhf_mcore.readers.adapter_files import start_problems
from rlhf_mcore.readers.model_files import PROCESSOR_FILES, read_config, read_geometry, tensor_names, with_head
from rlhf_mcore.readers.tokenizer_match import tokenizer_difference


# ----------------------------------------------------------------------------------------------------------- adapters
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
    """List problems with the adapters of one model, including adapters of plug-ins. ``role`` is the name of its ``group``."""
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


# --------------------------------------------------------------------------------------------------------- MTP layers
def mtp_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """List problems with ``actor.mtp`` and with MTP drafts. ``geometry`` describes ``model.path``."""
    mode, kind, layout, path = cfg.actor.mtp.mode, run_kind(cfg), cfg.actor.layout, cfg.model.path
    drafts = cfg.rollout.speculative
    if kind.generates and drafts.method == "mtp" and engine_kind(cfg.rollout.engine).reads("rollout.speculative"):
        yield from _mtp_model_problems(path, geometry, "rollout.speculative.method=mtp", "set it to off")
        hf_config = read_config(path, path)
        if "quantization_config" in hf_config and mode not in MTP_TRAINED:
            loaded = f"with actor.mtp.mode={mode} engines load MTP layers from model.path={path}, which is quantised"
            yield f"rollout.speculative.method=mtp: {loaded}; set actor.mtp.mode=train, or that to off or ngram"
        count, wanted = num_mtp_layers(hf_config), drafts.num_tokens
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
    yield from _mtp_model_problems(path, geometry, name, keep)


def indexer_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """List problems with ``actor.indexer``. ``geometry`` describes ``model.path``."""
    name, kind = f"actor.indexer={cfg.actor.indexer}", run_kind(cfg)
    if cfg.actor.indexer == "frozen":
        return
    indexer = geometry.attention.indexer if isinstance(geometry.attention, LatentSizes) else None
    if indexer is None:
        yield f"{name}, but model.path={cfg.model.path} has no indexer; set it to frozen"
    elif indexer.shared_layers:
        yield f"{name} is not supported if layers share selected keys, as in model.path={cfg.model.path}; set it to frozen"
    if cfg.actor.indexer == "warm_up" and kind.name != "sft":
        yield f"{name}: engines attend to selected keys, but the model to all, so it needs algorithm.kind=sft; set it to sparse"
    if cfg.actor.indexer == "warm_up" and cfg.actor.freeze:
        yield f"{name} freezes all other weights; remove actor.freeze"
    if not cfg.trainer.packing:
        yield f"{name} needs trainer.packing=true; set that, or it to frozen"
    if cfg.model.dtype == "fp16":
        yield f"{name} is not supported with model.dtype=fp16; set that to bf16"
    if adapter_sizes(cfg.actor.lora) is not None:
        yield f"{name} is not supported with actor.lora; set it to frozen"
    if cfg.actor.mtp.mode in MTP_TRAINED:
        yield f"{name} is not supported with actor.mtp.mode={cfg.actor.mtp.mode}; set that to keep"


def _layers(count: int) -> str:
    return f"{count} MTP layer{'s' * (count != 1)}"


def _mtp_model_problems(path: str, geometry: ModelGeometry, setting: str, keep: str) -> Iterator[str]:
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
            lacks = f"{len(missing)} of their tensors are missing ({join_first(missing, 2)})"
            yield FileProblem(
                f"{prefix} names {_layers(count)} in config.json, but {lacks}, as in directories saved by transformers; "
                f"use the original directory, or {keep}"
            )


# ------------------------------------------------------------------------------------------------------- vision tower
# Fields of VisionSizes that decide how pixels become patches, and patches become tokens.
_CUTS = ("image_token_id", "patch_size", "temporal_patch_size", "channels", "merge_size")
# Keys of a processor that decide the values of patches. Its pixel limits do not matter, because the policy resizes the images.
_SCALES = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def vision_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """List problems with ``actor.vision``, with the tower of ``model.path`` (``geometry``), and with the other models."""
    train, model = f"actor.vision.train={cfg.actor.vision.train}", f"model.path={cfg.model.path}"
    if geometry.vision is None:
        if cfg.actor.vision.train != "none":
            yield f"{train}: {model} reads no images; set it to none"
        return
    within = FAMILIES[geometry.family].vision
    if within is not None and within.attends_within and cfg.model.layer_spec == "te":
        mask = f"image tokens attend to each other in {model}, and Transformer Engine does not support this mask"
        yield f"model.layer_spec=te: {mask} for packed sequences; set it to auto or local"
    if cfg.actor.vision.train != "none" and (cfg.actor.megatron or {}).get("overlap_grad_reduce"):
        yield f"{train} is not supported with actor.megatron.overlap_grad_reduce; remove that"
    yield from _deepstack_problems("actor", "model.path", cfg.actor.layout, geometry)
    for other in other_models(cfg):
        try:
            theirs = read_geometry(other.path)
        except ConfigError:  # reported with the model
            continue
        yield from _deepstack_problems(other.role, other.key, other.layout, theirs)
        if other.path != cfg.model.path and cfg.data.image_key is not None:
            yield from _reader_problems(
                f"{other.key}={other.path}", other.path, theirs, cfg.model.path, geometry.vision
            )


def processor_problems(cfg: Config) -> Iterator[str]:
    """Report a missing processor file in the policy's directory."""
    if not any(isfile(Path(cfg.model.path) / name) for name in PROCESSOR_FILES[:2]):
        missing = f"model.path={cfg.model.path} has no {PROCESSOR_FILES[0]}, which defines image patches"
        yield FileProblem(f"{missing}; copy it from the original model directory")


def _deepstack_problems(role: str, key: str, layout: LayoutConfig, geometry: ModelGeometry) -> Iterator[str]:
    """Check that the first pipeline stage contains all layers to which image features are added."""
    sizes = layout.layers_per_stage or balanced_stages(geometry.num_layers, layout.pp * (layout.vpp or 1))
    if geometry.vision is not None and sizes[0] < (needed := geometry.vision.deepstack):
        yield (
            f"{role}.layout: the first pipeline stage has {sizes[0]} layers, but image features are added to the first "
            f"{needed} layers of {key} (DeepStack); lower pp or vpp, or give it more layers in layers_per_stage"
        )


def _reader_problems(shown: str, path: str, theirs: ModelGeometry, own_path: str, vision: VisionSizes) -> Iterator[str]:
    """Check that another model reads the images of the policy's rows as the policy does."""
    own, remedy = (
        f"model.path={own_path}",
        "choose a model of the same family, or set data.image_key=null to train on text",
    )
    if theirs.vision is None:
        yield f"{shown} reads no images, but {own} does; {remedy}"
        return
    for name in _CUTS:
        if (found := getattr(theirs.vision, name)) != (wanted := getattr(vision, name)):
            yield f"{shown} has {name}={found} for images, but {own} has {wanted}; {remedy}"
            return
    if difference := tokenizer_difference(path, own_path):
        yield f"{shown} has another tokenizer than {own}: {difference}; {remedy}"
    there, here = _processor(path), _processor(own_path)
    for name in _SCALES:
        if name in there and name in here and there[name] != here[name]:
            yield f"{shown}: its {PROCESSOR_FILES[0]} has {name}={there[name]}, but {own} has {here[name]}; {remedy}"


def _processor(directory: str) -> Mapping[str, Any]:
    """Return the settings of a processor, or {} if there is no file, which only the policy needs."""
    try:
        return read_json(Path(directory, PROCESSOR_FILES[0])).content
    except ConfigError:
        return {}
