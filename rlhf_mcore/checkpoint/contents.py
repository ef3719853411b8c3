"""Check that a manifest names all required files. Otherwise it is rejected, even if the named files are intact."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rlhf_mcore.checkpoint.config_changes import further_models
from rlhf_mcore.checkpoint.layout import CONFIG, DELTA_DATA, DELTA_INDEX, DOCUMENTS, MANIFEST, TRAINING
from rlhf_mcore.checkpoint.manifest import Problem
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, SMALL, read_json, read_text
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlhf_mcore.readers.model_files import INDEX_FILE

SINGLE_FILE = "model.safetensors"


def lacking(checkpoint: Path, named: Collection[str]) -> list[Problem]:
    """Return a problem for each required file that is missing in ``named``, the files of a manifest.

    A checkpoint requires the documents of the run and the models of its configuration, at least one. A model
    requires its configuration, all weights or its adapters, and after training the whole optimizer state. Indexes
    are read to get the files that they name.
    """
    models = model_names(named)
    problems = [
        Problem(name, "absent", "the manifest does not name it, but every checkpoint requires it")
        for name in DOCUMENTS
        if name not in named
    ]
    if not models:
        problems.append(Problem(MANIFEST, "absent", "the manifest names no model"))
    elif CONFIG in named:
        try:
            needed = further_models(read_text(checkpoint / CONFIG, limit=SMALL.num_bytes))
        except ConfigError:
            # Damaged: the hash comparison or the reading code reports it.
            needed = []
        problems += [
            Problem(model, "absent", f"the manifest does not name it, but {CONFIG} requires it")
            for model in needed
            if model not in models
        ]
    for model in models:
        try:
            problems += [
                Problem(name, "absent", f"the manifest does not name it, but {model} requires it")
                for name in _list_required(checkpoint, model, named)
                if not (name in named or {name + DELTA_DATA, name + DELTA_INDEX} <= set(named))
            ]
        except ConfigError as error:
            problems.append(Problem(model, "unreadable", str(error)))
    return problems


def model_names(named: Collection[str]) -> list[str]:
    """Return the models of a checkpoint whose manifest names these files."""
    return sorted({name.split("/")[0] for name in named if "/" in name})


def model_files(named: Collection[str], model: str) -> list[str]:
    """Return the files of a model's Hugging Face directory, relative to it, without the training state."""
    inside = (name.removeprefix(f"{model}/") for name in named if name.startswith(f"{model}/"))
    return [name for name in inside if "/" not in name]


def _list_required(checkpoint: Path, model: str, named: Collection[str]) -> Iterator[str]:
    if f"{model}/{ADAPTER_CONFIG}" in named:
        yield f"{model}/{ADAPTER_WEIGHTS}"
    elif f"{model}/{INDEX_FILE}" in named:
        yield f"{model}/config.json"
        index = read_json(checkpoint / model / INDEX_FILE, limits=INDEX, remedy="choose another checkpoint")
        yield from sorted({f"{model}/{shard}" for shard in index.table("weight_map").values()})
    else:
        yield f"{model}/config.json"
        yield f"{model}/{SINGLE_FILE}"
    state = f"{model}/{TRAINING}/index.json"
    if state in named:
        index = read_json(checkpoint / state, limits=INDEX, remedy="choose another checkpoint")
        yield from (f"{model}/{TRAINING}/{name}" for name in index.texts("files"))
    elif any(name.startswith(f"{model}/{TRAINING}/") for name in named):
        yield state
