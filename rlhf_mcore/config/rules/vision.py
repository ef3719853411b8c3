"""Check that a model that reads images can be trained with this layout and the other keys."""

from __future__ import annotations

from collections.abc import Iterator
from os.path import isfile
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.questions import balanced_stages, needs_critic, needs_reference
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config, LayoutConfig
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.vision import VisionSizes
from rlhf_mcore.foreign import read_json
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.model_files import PROCESSOR_FILES, read_geometry
from rlhf_mcore.readers.tokenizer_match import tokenizer_difference

# Fields of VisionSizes that decide how pixels become patches, and patches become tokens.
_CUTS = ("image_token_id", "patch_size", "temporal_patch_size", "channels", "merge_size")
# Keys of a processor that decide the values of patches. Its pixel limits do not matter, because the policy resizes the images.
_SCALES = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def processor_problems(cfg: Config) -> Iterator[str]:
    """Report a missing processor file in the policy's directory."""
    if not any(isfile(Path(cfg.model.path) / name) for name in PROCESSOR_FILES[:2]):
        yield FileProblem(
            f"model.path={cfg.model.path} has no {PROCESSOR_FILES[0]}, which defines image patches; copy it from the "
            "original model directory"
        )


def vision_problems(cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
    """List problems with ``actor.vision``, with the tower of ``model.path`` (``geometry``), and with the other models."""
    train = f"actor.vision.train={cfg.actor.vision.train}"
    if geometry.vision is None:
        if cfg.actor.vision.train != "none":
            yield f"{train}: model.path={cfg.model.path} reads no images; set it to none"
        return
    within = FAMILIES[geometry.family].vision
    if within is not None and within.attends_within and cfg.model.layer_spec == "te":
        yield (
            f"model.layer_spec=te: image tokens attend to each other in model.path={cfg.model.path}, and Transformer Engine "
            "does not support this mask for packed sequences; set it to auto or local"
        )
    if cfg.actor.vision.train != "none" and (cfg.actor.megatron or {}).get("overlap_grad_reduce"):
        yield f"{train} is not supported with actor.megatron.overlap_grad_reduce; remove that"
    yield from _stage_problems("actor", "model.path", cfg.actor.layout, geometry)
    for role, key, path, layout in _readers(cfg):
        try:
            theirs = geometry if path is None else read_geometry(path)
        except ConfigError:  # reported with the model
            continue
        yield from _stage_problems(role, key, layout, theirs)
        if path is not None and cfg.data.image_key is not None:
            yield from _reader_problems(f"{key}={path}", path, theirs, cfg.model.path, geometry.vision)


def _readers(cfg: Config) -> Iterator[tuple[str, str, str | None, LayoutConfig]]:
    """Yield (role, key, directory, layout) of the models that read the policy's rows. None means the policy's directory."""
    if not run_kind(cfg).generates:
        if run_kind(cfg).compares and cfg.reference.path is not None:
            yield "actor", "reference.path", cfg.reference.path, cfg.actor.layout
        return
    if needs_critic(cfg):
        yield "critic", "critic.path" if cfg.critic.path else "model.path", cfg.critic.path, cfg.critic.layout
    if needs_reference(cfg) and cfg.reference.path is not None:
        yield "actor", "reference.path", cfg.reference.path, cfg.actor.layout
    if cfg.reward.model.path is not None:
        yield "reward.model", "reward.model.path", cfg.reward.model.path, cfg.reward.model.layout
    if cfg.teacher.path is not None and cfg.teacher.weights == "path":
        yield "teacher", "teacher.path", cfg.teacher.path, cfg.teacher.layout
        for source, path in (cfg.teacher.sources or {}).items():
            yield "teacher", f"teacher.sources[{source}]", path, cfg.teacher.layout


def _stage_problems(role: str, key: str, layout: LayoutConfig, geometry: ModelGeometry) -> Iterator[str]:
    """Check that the first pipeline stage contains all layers to which image features are added."""
    sizes = layout.layers_per_stage or balanced_stages(geometry.num_layers, layout.pp * (layout.vpp or 1))
    if geometry.vision is not None and sizes[0] < geometry.vision.deepstack:
        yield (
            f"{role}.layout: the first pipeline stage has {sizes[0]} layers, but image features are added to the first "
            f"{geometry.vision.deepstack} layers of {key} (DeepStack); lower pp or vpp, or give it more layers in layers_per_stage"
        )


def _reader_problems(shown: str, path: str, theirs: ModelGeometry, own_path: str, vision: VisionSizes) -> Iterator[str]:
    """Check that another model reads the images of the policy's rows as the policy does."""
    remedy = "choose a model of the same family, or set data.image_key=null to train on text only"
    if theirs.vision is None:
        yield f"{shown} reads no images, but model.path={own_path} does; {remedy}"
        return
    for name in _CUTS:
        if (found := getattr(theirs.vision, name)) != (wanted := getattr(vision, name)):
            yield f"{shown} has {name}={found} for images, but model.path={own_path} has {wanted}; {remedy}"
            return
    if difference := tokenizer_difference(path, own_path):
        yield f"{shown} has another tokenizer than model.path={own_path}: {difference}; {remedy}"
    there, here = _scales(path), _scales(own_path)
    for name in _SCALES:
        if name in there and name in here and there[name] != here[name]:
            yield (
                f"{shown}: its {PROCESSOR_FILES[0]} has {name}={there[name]}, but model.path={own_path} has "
                f"{here[name]}; {remedy}"
            )


def _scales(directory: str) -> dict[str, Any]:
    """Return the settings of a processor, or {} if there is no file, which only the policy needs."""
    try:
        return dict(read_json(Path(directory, PROCESSOR_FILES[0])).content)
    except ConfigError:
        return {}
