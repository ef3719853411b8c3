"""Hugging Face Hub ids (``Qwen/Qwen3-1.7B``) instead of model directories and data files.

An id is looked up in the local cache, and downloaded if ``HF_HUB_OFFLINE`` is not 1. The path of a snapshot replaces it. The path
contains the commit, so a saved configuration records the revision. ``ORG/NAME@REVISION`` selects a revision. Code is never
downloaded, only safetensors, JSON, tokenizers, templates and data files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.settings import load_yaml, read_yaml_text
from rlhf_mcore.foreign import INDEX, read_json, shorten
from rlhf_mcore.readers.hub_ids import HubId, data_id, id_of_snapshot, model_id
from rlhf_mcore.readers.model_files import CHAT_TEMPLATE_FILES, INDEX_FILE, TOKENIZER_FILES, inspect_generator

_OTHER_MODELS = ("critic.path", "reference.path", "reward.model.path", "teacher.path")
MODEL_KEYS = ("model.path", "model.tokenizer_path", *_OTHER_MODELS, "evaluate.checkpoint", "evaluate.compare")
DATA_KEYS = ("data.train", "data.eval")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.")
_SMALL = ("*.json", "*.jinja", "merges.txt", *TOKENIZER_FILES, *CHAT_TEMPLATE_FILES)
_IGNORED = ("*/*", "consolidated*")  # files in folders, and copies in other formats
_SPLITS = {"data.train": ("train",), "data.eval": ("test", "validation", "valid", "dev", "val")}


def is_offline() -> bool:
    """Return whether the Hub must not be contacted (launch/env.sh sets this)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def localize(cfg: Config, keys: Sequence[str] = (*MODEL_KEYS, *DATA_KEYS), *, download: bool = True) -> dict[str, Any]:
    """Replace Hub ids in ``cfg`` with local paths. Return the new values by key.

    A resumed run keeps its revisions. An id that is neither cached nor may be downloaded is left unchanged.

    Raises:
        ConfigError: a download failed, a model is not supported, or a data set lacks the files.
    """
    models = {key: path for key in keys if key not in DATA_KEYS and (path := value_of(cfg, key)) and model_id(path)}
    files = {key: paths for key in keys if key in DATA_KEYS and any(map(data_id, paths := value_of(cfg, key)))}
    if not models and not files:
        return {}
    begun = {} if cfg.checkpoint.resume == "never" else _begun_with(cfg.run_directory)
    may_download = download and not is_offline()
    found = {key: local_model(path, key, begun, may_download=may_download) for key, path in models.items()}
    changes: dict[str, Any] = {key: path for key, path in found.items() if path is not None}
    for key, paths in files.items():
        resolved = [file for path in paths for file in _local_files(path, key, begun, may_download) or [path]]
        changes |= {key: resolved} if resolved != paths else {}
    for key, value in changes.items():
        owner, _, name = key.rpartition(".")
        setattr(value_of(cfg, owner), name, value)
    return changes


def notes_of(made: Mapping[str, Any]) -> list[str]:
    """Return a line for each id that ``localize`` replaced."""
    notes = []
    for key, value in made.items():
        ids = [id_of_snapshot(path) for path in (value if isinstance(value, list) else [value])]
        found = [one for one in dict.fromkeys(ids) if one is not None]
        notes += [f"{key}: {one.repo} at {one.revision[:12]}, from the hub's cache" for one in found]
    return notes


def _begun_with(run: Path) -> dict[tuple[str, str], str]:
    """Return the commits in a run directory's configuration, by kind and repository."""
    written = run / "config.yaml"
    if not written.is_file():
        return {}
    try:
        tree = load_yaml(read_yaml_text(written, "config file"), str(written))
    except ConfigError:  # the resume reports it
        return {}
    ids = (id_of_snapshot(text) for text in _texts(tree))
    return {(one.kind, one.repo): one.revision for one in ids if one is not None}


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [text for child in (value.values() if isinstance(value, dict) else value) for text in _texts(child)]
    return [value] if isinstance(value, str) else []


def _pin(wanted: HubId, begun: Mapping[tuple[str, str], str]) -> HubId:
    commit = begun.get((wanted.kind, wanted.repo)) if wanted.revision == "main" else None
    return wanted if commit is None else HubId(wanted.kind, wanted.repo, commit, wanted.config, wanted.split)


# ------------------------------------------------------------------------------------------------------------------ models
def local_model(
    path: str | None, key: str, begun: Mapping[tuple[str, str], str] = MappingProxyType({}), *, may_download: bool
) -> str | None:
    """Return the snapshot of a model id. Return None if ``path`` is not an id, or if it is neither cached nor may be downloaded.

    ``key`` names the model in messages. ``begun`` contains the commits of an earlier start.

    Raises:
        ConfigError: as ``localize``.
    """
    hub_id = model_id(path) if path is not None else None
    if hub_id is None:
        return None
    hub_id = _pin(hub_id, begun)
    is_whole = _has_tokenizer if key == "model.tokenizer_path" else _has_weights
    snapshot = hub_id.find_snapshot()
    if snapshot is not None and is_whole(snapshot):
        return str(snapshot)
    return str(_download_model(hub_id, key, needs_weights=is_whole is _has_weights)) if may_download else None


def _has_tokenizer(snapshot: Path) -> bool:
    return any((snapshot / name).is_file() for name in TOKENIZER_FILES)


def _has_weights(snapshot: Path) -> bool:
    if not (snapshot / "config.json").is_file():
        return False
    if not (snapshot / INDEX_FILE).is_file():
        return any(snapshot.glob("*.safetensors"))
    try:
        shards = set(read_json(snapshot / INDEX_FILE, limits=INDEX).table("weight_map").values())
    except ConfigError:
        return True  # reported with the model
    return all((snapshot / str(shard)).is_file() for shard in shards)


def _download_model(wanted: HubId, key: str, *, needs_weights: bool) -> Path:
    """Download the snapshot. Small files come first, so that a rejected model costs little time."""
    from huggingface_hub import snapshot_download

    def snapshot(revision: str, patterns: Sequence[str]) -> Path:
        call = lambda: snapshot_download(  # noqa: E731
            wanted.repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED)
        )
        return Path(_ask(call, wanted, key))

    folder = snapshot(wanted.revision, _SMALL)
    if not needs_weights:
        return folder
    _, problems = inspect_generator(str(folder), key, needs_weights=False)
    if problems:
        raise ConfigError.many([problem.replace(str(folder), wanted.repo) for problem in problems])
    return snapshot(folder.name, (*_SMALL, "*.safetensors"))


def _ask(call: Callable[[], Any], wanted: HubId, key: str) -> Any:
    """Return the result of a call to the Hub.

    Raises:
        ConfigError: the call failed; the message names key, id and reason.
    """
    try:
        return call()
    except Exception as error:  # the library, its HTTP client and the disk raise different errors
        reason = shorten(" ".join((str(error) or type(error).__name__).split()), 300)
        raise ConfigError(
            f"{key}={wanted.repo}: no such directory (looked from {Path.cwd()}), and the Hugging Face Hub did not return it "
            f"({type(error).__name__}: {reason}); correct the path or the id, or try `{wanted.command()}`"
        ) from error


# --------------------------------------------------------------------------------------------------------------- data sets
def _local_files(path: str, key: str, begun: Mapping[tuple[str, str], str], may_download: bool) -> list[str] | None:
    hub_id = data_id(path)
    if hub_id is None:
        return None
    hub_id = _pin(hub_id, begun)
    snapshot = hub_id.find_snapshot()
    if snapshot is not None:
        names = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*") if file.is_file()]
        chosen = _of_split(names, hub_id, key)
        if chosen and _are_all_shards(chosen):
            return [str(snapshot / name) for name in chosen]
    return _download_files(hub_id, path, key) if may_download else None


def _download_files(wanted: HubId, path: str, key: str) -> list[str]:
    from huggingface_hub import HfApi, snapshot_download

    info = _ask(lambda: HfApi().dataset_info(wanted.repo, revision=wanted.revision), wanted, key)
    names = sorted(one.rfilename for one in info.siblings or ())
    chosen = _of_split(names, wanted, key)
    if not chosen:
        there = [name for name in names if name.endswith((".parquet", ".jsonl"))] or names
        missing = (
            f"the data set has no .parquet or .jsonl file for the split {wanted.split or ' or '.join(_SPLITS[key])}"
        )
        remedy = f"name a split, as in {wanted.repo}:test, or create files with rlhf-mcore prepare-data"
        raise ConfigError(f"{key}={path}: {missing}; {remedy}. There are: {shorten(', '.join(there) or 'none', 300)}")
    call = lambda: snapshot_download(wanted.repo, repo_type="dataset", revision=wanted.revision, allow_patterns=chosen)  # noqa: E731
    folder = Path(_ask(call, wanted, key))
    return [str(folder / name) for name in chosen]


def _of_split(names: Sequence[str], wanted: HubId, key: str) -> list[str]:
    """Select the files of the wanted split by their names (``main/train-00000-of-00002.parquet``, ``test.jsonl``).

    Raises:
        ConfigError: several configurations of the data set contain the split.
    """
    files = sorted(name for name in names if name.endswith((".parquet", ".jsonl")))
    if wanted.config is not None:
        files = [name for name in files if f"/{wanted.config}/" in f"/{name}"]
    for split in [wanted.split] if wanted.split else _SPLITS[key]:
        in_split = [name for name in files if re.search(rf"(^|/){re.escape(split)}([-._/]|$)", name)]
        folders = sorted({name.rpartition("/")[0].partition(f"/{split}")[0] for name in in_split} - {split})
        if len(folders) > 1:
            several = f"the data set has several configurations with a split {split}"
            example = f"{wanted.repo}/{folders[0].rpartition('/')[2] or folders[-1]}:{split}"
            there = shorten(", ".join(folders), 300)
            raise ConfigError(f"{key}={wanted.repo}: {several}; name one, as in {example}. There are: {there}")
        if in_split:
            return in_split
    has_splits = any(re.search(r"(^|/)(train|test|valid|validation|dev|val)([-._/]|$)", name) for name in files)
    return files if wanted.split is None and key == "data.train" and not has_splits else []


def _are_all_shards(names: Sequence[str]) -> bool:
    """Return whether all shards exist, by the count in their names."""
    return all(len(names) >= int(match[1]) for name in names if (match := _SHARD.search(name)))
