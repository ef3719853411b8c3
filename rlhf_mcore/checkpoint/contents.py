"""What every checkpoint holds: a manifest that does not name it all is refused, however intact the files are that it names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rlhf_mcore.checkpoint.layout import CONFIG, DELTA_DATA, DELTA_INDEX, DOCUMENTS, MANIFEST, TRAINING
from rlhf_mcore.checkpoint.manifest import Problem
from rlhf_mcore.config.differences import further_models
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.model_files import INDEX_FILE
from rlhf_mcore.foreign import INDEX, SMALL, read_json, read_text

SINGLE_FILE = "model.safetensors"


def lacking(checkpoint: Path, named: Collection[str]) -> list[Problem]:
    """What a manifest that names the files ``named`` leaves out; [] if it is all there.

    A checkpoint has the documents of the run and the models of its configuration, at least one; a model has its configuration, all
    weights, and where it was trained the whole state of its optimizer. Indexes are read for the files that they name.
    """
    models = model_names(named)
    found = [name for name in DOCUMENTS if name not in named]
    problems = [
        Problem(name, "absent", "the manifest does not name it, and no checkpoint is without") for name in found
    ]
    if not models:
        problems.append(Problem(MANIFEST, "absent", "the manifest names no model"))
    elif CONFIG in named:
        try:
            needed = further_models(read_text(checkpoint / CONFIG, limit=SMALL.num_bytes))
        except ConfigError:
            needed = []  # damaged: reported by the comparison of hashes, or by who reads it
        problems += [
            Problem(model, "absent", f"the manifest does not name it, and the run of {CONFIG} has it")
            for model in needed
            if model not in models
        ]
    for model in models:
        try:
            problems += [
                Problem(name, "absent", f"the manifest does not name it, and {model} needs it")
                for name in _needed(checkpoint, model, named)
                if not (name in named or {name + DELTA_DATA, name + DELTA_INDEX} <= set(named))
            ]
        except ConfigError as error:
            problems.append(Problem(model, "unreadable", str(error)))
    return problems


def model_names(named: Collection[str]) -> list[str]:
    """The models of a checkpoint whose manifest names these files."""
    return sorted({name.split("/")[0] for name in named if "/" in name})


def model_files(named: Collection[str], model: str) -> list[str]:
    """What makes a model's Hugging Face directory, relative to it: everything but its training state."""
    inside = (name.removeprefix(f"{model}/") for name in named if name.startswith(f"{model}/"))
    return [name for name in inside if "/" not in name]


def _needed(checkpoint: Path, model: str, named: Collection[str]) -> Iterator[str]:
    yield f"{model}/config.json"
    if f"{model}/{INDEX_FILE}" in named:
        index = read_json(checkpoint / model / INDEX_FILE, limits=INDEX, remedy="choose another checkpoint")
        yield from sorted({f"{model}/{shard}" for shard in index.table("weight_map").values()})
    else:
        yield f"{model}/{SINGLE_FILE}"
    state = f"{model}/{TRAINING}/index.json"
    if state in named:
        index = read_json(checkpoint / state, limits=INDEX, remedy="choose another checkpoint")
        yield from (f"{model}/{TRAINING}/{name}" for name in index.texts("files"))
    elif any(name.startswith(f"{model}/{TRAINING}/") for name in named):
        yield state
