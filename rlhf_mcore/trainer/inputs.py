"""Fingerprint the content of a run's inputs: data, the user's code, tokenizer, chat template, models.

A checkpoint stores the fingerprints, and a resumed run compares them with its own. Paths alone are not enough: the content at
a path may have changed, and another path may contain the same content.
"""

from __future__ import annotations

import ast
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from rlhf_mcore.checkpoint.manifest import hash_file
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import leaves, value_of
from rlhf_mcore.config.questions import function_name, grades, rule_tables, scores_alone
from rlhf_mcore.config.schema import Config, RewardConfig, RuleConfig
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.foreign import INDEX, MissingFile, open_file, read_json
from rlhf_mcore.observability.files import sketch_of_file
from rlhf_mcore.readers.model_files import CHAT_TEMPLATE_FILES, COMPANIONS, PROCESSOR_FILES
from rlhf_mcore.readers.user_functions import OwnFunction, is_file_spec, parse_file
from rlhf_mcore.rewards.reward import scoring_keys

Inputs = Mapping[str, Mapping[str, str]]  # input name, such as "data.train[0]" -> its path and a digest of its content

_MODEL_KEYS = ("model.path", "critic.path", "reference.path", "reward.model.path", "teacher.path")
# Text files, and the limit in bytes for each.
_TEXTS: dict[str, float] = {"reward.judge.rubric_file": INDEX.num_bytes, "environment.tools": INDEX.num_bytes}
_TEXTS |= {"environment.options.corpus": math.inf}
# Keys of ``reward``. _SCORING: values that change scores. _NAMING: locations of functions, servers and models, which may move.
_SCORING = (
    "model.weight",
    "judge.model",
    "judge.weight",
    "judge.rubric",
    "judge.parse",
    "judge.max_score",
    "judge.max_tokens",
)
_NAMING = ("function", "remote.url", "judge.url", "model.path")
_DEFAULTS = dict(leaves(to_dict(RewardConfig())))
_OTHERS = ("config.json", "generation_config.json", *CHAT_TEMPLATE_FILES, *PROCESSOR_FILES)
_TOKENIZER = tuple(name for name in COMPANIONS if name not in _OTHERS)
# Keys that every save of transformers writes. They do not change the model's results in our dtype.
_IDLE = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
# Larger weight files are hashed by samples. Reading 140 GB would take minutes at each start. Training or merging changes every
# tensor, so samples detect it.
WHOLE_BYTES = 256 * 2**20
_MAX_HEADER_BYTES = 100 * 2**20


def fingerprints(cfg: Config) -> Inputs:
    """Return the fingerprints of all inputs that a resolved configuration names.

    Files are hashed completely. For weight files above 256 MiB, the hash covers the header, the size and 257 blocks spread over
    the file.

    Raises:
        ConfigError: a file does not exist or cannot be read.
    """
    inputs: dict[str, Mapping[str, str]] = {}
    for key, files in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        for number, file in enumerate(files):
            inputs[f"{key}[{number}]"] = _entry(file, _file_digest(Path(file), math.inf))
    inputs |= own_files(cfg)
    if run_kind(cfg).generates and grades(cfg):
        inputs["reward"] = scored_by(cfg.reward)
    models = {key: value_of(cfg, key) for key in _MODEL_KEYS}
    models |= {f"teacher.sources[{source}]": path for source, path in (cfg.teacher.sources or {}).items()}
    for key, directory in models.items():
        if directory is not None:
            inputs |= {f"{key} ({part})": _entry(directory, digest) for part, digest in _model(Path(directory)).items()}
    tokenizer = Path(cfg.model.tokenizer_path or cfg.model.path)
    inputs["tokenizer"] = _entry(tokenizer, _digest([_companion(tokenizer / name) for name in _TOKENIZER]))
    templates = [_without_idle(tokenizer / "tokenizer_config.json").get("chat_template")]
    templates += [_companion(tokenizer / name) for name in CHAT_TEMPLATE_FILES]
    inputs["chat template"] = _entry(tokenizer, _digest(templates))
    processor = [Path(cfg.model.path, name) for name in PROCESSOR_FILES]
    if any(file.is_file() for file in processor):
        inputs["image processor"] = _entry(
            cfg.model.path, _digest([*map(_companion, processor), cfg.data.image_pixels])
        )
    return inputs


def scored_by(cfg: RewardConfig) -> Mapping[str, str]:
    """Fingerprint the score sources and their weights. For functions, models and servers, it only records whether any is set."""
    tree = dict(leaves(to_dict(cfg)))
    if cfg.judge.rubric_file is not None:  # its content is among the user's files
        tree["judge.rubric"] = None
    parts: dict[str, Any] = {name: tree[name] for name in _SCORING if tree[name] != _DEFAULTS[name]}
    parts |= {name: tree[name] is not None for name in _NAMING}
    if cfg.functions:
        parts["functions"] = [[function_name(one), one.weight] for one in cfg.functions]
    if not scores_alone(cfg):
        tables = rule_tables(cfg).items()
        parts["rules"] = {name: [_changed_from_default(rule) for rule in rules] for name, rules in tables}
    return {"path": scoring_keys(cfg), "content": _digest(parts)}


def _changed_from_default(rule: RuleConfig) -> dict[str, Any]:
    """Return the options that differ from the defaults, so that a new option in a later release keeps the fingerprint."""
    default = to_dict(RuleConfig(name=rule.name))
    return {"name": rule.name} | {name: value for name, value in to_dict(rule).items() if value != default[name]}


def own_files(cfg: Config) -> Inputs:
    """Return the fingerprints of functions, tools and texts that the user wrote.

    Raises:
        ConfigError: a file does not exist or cannot be read.
    """
    entries: dict[str, Mapping[str, str]] = {}
    values = dict(leaves(to_dict(cfg)))
    listed = {
        f"{key}[{n}]": spec for key, held in values.items() if isinstance(held, list) for n, spec in enumerate(held)
    }
    functions = {f"reward.functions[{n}].path": one.path for n, one in enumerate(cfg.reward.functions)}
    for key, spec in (values | listed | functions).items():
        if isinstance(spec, OwnFunction):  # passed from Python, possibly without a file
            entries[key] = _entry(spec, spec.fingerprint())
        elif isinstance(spec, str) and is_file_spec(spec) and Path(spec.rpartition(":")[0]).expanduser().is_file():
            entries[key] = _entry(spec, _code_digest(spec))
    values["reward.judge.rubric_file"] = cfg.reward.judge.rubric_file
    for key, limit in _TEXTS.items():
        if isinstance(path := values.get(key), str):
            entries[key] = _entry(path, _file_digest(Path(path), limit))
    return entries


def _entry(path: str | Path, digest: str) -> Mapping[str, str]:
    return {"path": str(path), "content": digest}


def _file_digest(file: Path, limit: float = INDEX.num_bytes) -> str:
    """Hash a regular file of at most ``limit`` bytes. The default limit equals the limit of the code that loads such files."""
    with open_file(file) as content:
        if (size := os.fstat(content.fileno()).st_size) > limit:
            raise ConfigError(
                f"{file}: {size:,} bytes, but at most {limit:,} are read of such a file; correct the path"
            )
        return hash_file(file).xxh3_128


def _digest(content: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def _model(directory: Path) -> dict[str, str]:
    """Return a digest per part of a Hugging Face model."""
    return {
        "config.json": _digest(_without_idle(directory / "config.json")),
        "generation_config.json": _digest(_without_idle(directory / "generation_config.json")),
        "weights": _digest([_weights_digest(file) for file in sorted(directory.glob("*.safetensors"))]),
    }


def _without_idle(file: Path) -> dict[str, Any]:
    try:
        content = read_json(file).content
    except MissingFile:
        return {}
    return {key: value for key, value in content.items() if key not in _IDLE}


def _weights_digest(file: Path) -> list[str]:
    with open_file(file) as content:
        if file.stat().st_size <= WHOLE_BYTES:
            return [hash_file(file).xxh3_128]
        size = int.from_bytes(content.read(8), "little")
        header = xxhash.xxh3_128_hexdigest(content.read(min(size, _MAX_HEADER_BYTES)))
    return [header, sketch_of_file(file)]


def _companion(file: Path) -> Any:
    """Return the digest of a tokenizer's companion file, or None if it does not exist.

    For tokenizer_config.json, return the content without the chat template.
    """
    if file.name == "tokenizer_config.json":
        return {key: value for key, value in _without_idle(file).items() if key != "chat_template"}
    return _file_digest(file) if file.is_file() else None


def _code_digest(spec: str) -> str:
    """Hash a user's function: its name, its file, and the modules that the file imports.

    Modules count if they are in the file's directory or in the working directory.
    """
    path, _, function = spec.rpartition(":")
    first = Path(path).expanduser().resolve()
    digests = {file: _file_digest(file) for file in imported_files(first, [first.parent, Path.cwd()])}
    others = sorted({(file.name, digest) for file, digest in digests.items() if file != first})
    return _digest([function, digests[first], others])


def imported_files(first: Path, roots: Sequence[Path]) -> set[Path]:
    """Return the file ``first`` and all files below ``roots`` that it imports, directly or indirectly."""
    files, waiting = set[Path](), [first]
    while waiting:
        if (file := waiting.pop()) not in files:
            files.add(file)
            waiting += _imports_of(file, roots)
    return files


def _imports_of(file: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files below ``roots`` that a file imports by name."""
    try:
        tree = parse_file(file)
    except ConfigError:
        return  # another check rejects it, or it is never imported
    for node in ast.walk(tree):
        names: list[str] = []
        places = list(roots)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
            if node.level:
                places = [file.parents[min(node.level, len(file.parents)) - 1]]
        for name in filter(None, names):
            if name.partition(".")[0] != "rlhf_mcore":
                yield from _module_files(name.split("."), places)


def _module_files(parts: Sequence[str], places: Sequence[Path]) -> Iterator[Path]:
    """Yield the file of a module and the ``__init__.py`` files of its parent packages."""
    for place in places:
        for length in range(1, len(parts) + 1):
            path = place.joinpath(*parts[:length])
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()
