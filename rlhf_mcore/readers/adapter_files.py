"""Read ``adapter_config.json`` and the tensor headers of a PEFT directory, without torch or PEFT.

A PEFT directory contains low-rank adapters in ``adapter_config.json`` and ``adapter_model.safetensors``, but not their model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.families import hf_shapes
from rlhf_mcore.families.adapters import (
    ALL_LINEAR,
    EMBEDDING,
    OUTPUT,
    A,
    B,
    M,
    base_copies,
    hf_module,
    hf_name,
    name_in_memory,
    whole_tensors,
    without_dora,
)
from rlhf_mcore.foreign import Fields, read_json, shorten
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry
from rlhf_mcore.readers.hub import local_model
from rlhf_mcore.readers.hub_ids import absent_hint
from rlhf_mcore.readers.model_files import WEIGHT_DTYPES, StoredTensor, read_geometry, read_tensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TASKS = {"lm": "CAUSAL_LM", "token": "TOKEN_CLS", "sequence": "SEQ_CLS"}  # by head
ALL_TARGETS = (ALL_LINEAR, EMBEDDING, OUTPUT)
_MAX_RANK, _MAX_ALPHA = 65536, 1e9
_REMEDY = "use a plain LoRA adapter that PEFT saved"
_SAVE_BASE = "save the adapter with PEFT's path_initial_model_for_weight_conversion"
_OTHER_MODEL = "name the model that the adapter was trained for"
# Settings that may change the meaning of the tensors, with their supported values.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_qalora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # other values change the base model
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    # values that PEFT writes for a scoring head
    "modules_to_save": ([], ["score"], ["classifier", "score"], ["score", "classifier"]),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config"), ({}, False)),
}


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings of adapter_config.json. ``modules`` are the names in ``target_modules``, or None if it is a pattern."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    base: str
    modules: tuple[str, ...] | None
    head: str  # lm | token | sequence


def holds_adapter(directory: str | Path) -> bool:
    """Return whether a directory contains PEFT adapters and no model."""
    return isfile(Path(directory) / ADAPTER_CONFIG) and not isfile(Path(directory) / "config.json")


def read_settings(directory: str | Path) -> AdapterSettings:
    """Read adapter_config.json.

    Raises:
        ConfigError: it is missing or damaged, or describes other adapters than plain LoRA or DoRA.
    """
    path = Path(directory) / ADAPTER_CONFIG
    fields = read_json(path, remedy=_REMEDY)
    fields.text("peft_type", ("LORA",))
    for key, plain in _PLAIN.items():
        if key in fields and not _is_one_of(fields.content[key], plain):
            remedy = _SAVE_BASE if key == "init_lora_weights" else _REMEDY
            raise ConfigError(f"{path} has {key}={shorten(fields.content[key])}, which is not supported; {remedy}")
    return AdapterSettings(
        fields.integer("r", 1, _MAX_RANK),
        fields.number("lora_alpha", 0, _MAX_ALPHA),
        fields.flag("use_rslora", default=False),
        fields.flag("use_dora", default=False),
        fields.text("base_model_name_or_path", default=""),
        _modules(fields),
        next((head for head, task in TASKS.items() if task == fields.content.get("task_type")), "lm"),
    )


def _is_one_of(value: object, plain: Collection[object]) -> bool:
    """Return whether a value is allowed. Types are compared too, because 0 == False in Python."""
    return any(type(value) is type(one) and value == one for one in plain)


def _modules(fields: Fields) -> tuple[str, ...] | None:
    if isinstance(fields.content.get("target_modules"), str):
        return None
    return tuple(fields.texts("target_modules"))


def read_adapters(directory: str | Path, model: ModelGeometry) -> ModelGeometry:
    """Return the geometry of ``model`` with a directory's adapters. Tensor names decide the adapted layers.

    Raises:
        ConfigError: the directory is not a PEFT directory. Also if a tensor is missing, belongs to no layer of the model, or has
            another shape or dtype than its layer needs.
    """
    settings, path = read_settings(directory), Path(directory) / ADAPTER_WEIGHTS
    if not isfile(path):
        pickled = " (adapter_model.bin is a pickle file, which is not read)" if isfile(path.with_suffix(".bin")) else ""
        raise ConfigError(f"{directory} has no {ADAPTER_WEIGHTS}{pickled}; save it with safe_serialization=True")
    possible = adapted_modules(replace(model, adapter=AdapterSizes(1, 1.0, ALL_TARGETS)))
    stored = read_tensors(path)
    names = stored.keys() - {*base_copies(), *whole_tensors(model)}
    sides = (A, B, M) if settings.use_dora else (A, B)
    known = {hf_name(module, side): module for module in possible for side in sides if side != M or module != EMBEDDING}
    if unknown := sorted(names - known.keys()):
        of_no_layer = (
            f"{len(unknown)} tensors belong to no linear layer of the model, among them {shorten(unknown[0], 200)}"
        )
        raise ConfigError(f"{path}: {of_no_layer}; {_OTHER_MODEL}, and train no other layers with it")
    modules = {known[name] for name in names}
    if not modules:
        raise ConfigError(f"{path} contains no tensors; {_REMEDY}")
    named, config = settings.modules, Path(directory) / ADAPTER_CONFIG
    in_memory = map(name_in_memory, modules)
    ignored = [m for m in in_memory if named and not any(m == name or m.endswith(f".{name}") for name in named)]
    if ignored:
        absent = f"target_modules do not name {join_first(sorted(ignored), 3, ', ')}"
        raise ConfigError(f"{config}: {absent}, whose tensors are in {ADAPTER_WEIGHTS}; {_REMEDY}")
    if settings.use_dora and (module := without_dora(sorted(modules))):
        remedy = "train without it, or without adapters of experts, embedding and output layer"
        raise ConfigError(f"{config} has use_dora=true, which is not supported for {module}; {remedy}")
    targets = short_names(modules, possible)
    sizes = AdapterSizes(settings.rank, settings.alpha, targets, settings.use_rslora, use_dora=settings.use_dora)
    adapters = replace(model, adapter=sizes)
    _check_tensors(path, stored, model, adapters)
    return adapters


def _check_tensors(
    path: Path, stored: Mapping[str, StoredTensor], model: ModelGeometry, adapters: ModelGeometry
) -> None:
    """Compare the shapes and dtypes of a file with ``adapters``, and its copies of model weights with ``model``.

    Raises:
        ConfigError: a tensor is missing, or has another shape or dtype.
    """
    weights = hf_shapes(model)
    for name, of_base in base_copies().items():
        if name in stored and stored[name].shape != weights.get(of_base):
            unlike = f"tensor {name} is {list(stored[name].shape)}, unlike {of_base} of the model"
            raise ConfigError(f"{path}: {unlike}; train with the vocabulary of the model")
    for name, shape in hf_shapes(adapters).items():
        if name not in stored:
            raise ConfigError(f"{path}: tensor {name} is missing; save the adapter again")
        if (found := stored[name].shape) != shape:
            required = f"r in {ADAPTER_CONFIG} and the model require {list(shape)}"
            raise ConfigError(
                f"{path}: tensor {name} is {list(found)}, but {required}; {_OTHER_MODEL}, or save it again"
            )
        if (dtype := stored[name].dtype) not in WEIGHT_DTYPES:
            dtypes = ", ".join(WEIGHT_DTYPES)
            raise ConfigError(f"{path}: tensor {name} is {dtype}, not one of {dtypes}; save the adapter unquantised")


def check_same(directory: str | Path, saved: ModelGeometry, wanted: ModelGeometry, field: str) -> None:
    """Compare a directory's adapters with the keys of ``field`` (``actor.lora``).

    Raises:
        ConfigError: layers, rank or scale differ.
    """
    assert saved.adapter is not None and wanted.adapter is not None
    theirs, ours = saved.adapter, wanted.adapter
    if hf_shapes(saved) != hf_shapes(wanted) or not math.isclose(theirs.scale, ours.scale):
        raise ConfigError(
            f"{directory}: its adapters have rank {theirs.rank}, a scale of {theirs.scale:g} and the targets "
            f"{join_first(theirs.targets, 8)}, but {field} asks for rank {ours.rank}, {ours.scale:g} and "
            f"{join_first(ours.targets, 8)}; set {field}.rank, alpha, targets, use_rslora and use_dora as {ADAPTER_CONFIG} has them"
        )


def start_problems(directory: str, wanted: ModelGeometry, field: str) -> Iterator[str]:
    """List reasons why training cannot start from a directory's adapters. ``field`` is its group, such as ``actor.lora``."""
    prefix = f"{field}.path={directory}"
    if not isdir(directory):
        where = "is not a directory" if exists(directory) else f"does not exist (looked from {Path.cwd()})"
        yield f"{prefix} {where}; give the directory of an adapter that PEFT saved{absent_hint(directory)}"
    elif not isfile(Path(directory) / ADAPTER_CONFIG):
        whole = " (it is a whole model, for model.path)" if isfile(Path(directory) / "config.json") else ""
        yield f"{prefix} has no {ADAPTER_CONFIG}{whole}; give the directory of an adapter that PEFT saved"
    else:
        try:
            check_same(directory, read_adapters(directory, replace(wanted, adapter=None)), wanted, field)
        except ConfigError as error:
            yield from (f"{field}.path: {problem}" for problem in error.problems)


def adapted_model(directory: str | Path, base: str | Path) -> ModelGeometry:
    """Return the geometry of the model in ``base``, with the head with which a directory's adapters were trained.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    return read_geometry(base, read_settings(directory).head)


def adapted_modules(adapters: ModelGeometry) -> list[str]:
    """Return the Hugging Face modules with an adapter, in network order."""
    return list(dict.fromkeys(hf_module(name) for name in hf_shapes(adapters) if name not in whole_tensors(adapters)))


def short_names(modules: Iterable[str], possible: Iterable[str]) -> tuple[str, ...]:
    """Return the last parts of the modules' names if they select the same modules among ``possible``, else whole names."""
    modules = set(modules)
    ends = {module.rpartition(".")[2] for module in modules}
    meant = {module for module in possible if module.rpartition(".")[2] in ends}
    return tuple(sorted(ends if meant == modules else modules))


def base_model(directory: str | Path, otherwise: str | None = None) -> str:
    """Return the base model's directory of adapters: the directory in their settings, or ``otherwise`` if it does not exist here.

    Raises:
        ConfigError: neither exists.
    """
    named = read_settings(directory).base
    here = local_model(named, "base_model_name_or_path", may_download=False) or named
    for path in filter(None, (here, otherwise)):
        if isdir(path) and isfile(Path(path) / "config.json"):
            return path
    absent = f"base_model_name_or_path={shorten(named, 500)!r}, which does not exist here"
    raise ConfigError(f"{Path(directory) / ADAPTER_CONFIG} has {absent}; copy the model there, or correct the path")
