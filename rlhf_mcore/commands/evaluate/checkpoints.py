"""Find the model to evaluate, and check the configuration of the evaluation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import isdir, isfile
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import OtherModel, needs_answer, role_layouts
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.rules.data import data_problems
from rlhf_mcore.config.rules.layouts import engine_cut_problems, layout_problems, model_problems
from rlhf_mcore.config.rules.reward import reward_problems
from rlhf_mcore.config.rules.rollout import engine_keys, sharding_problems
from rlhf_mcore.config.rules.trainer import microbatch_problems
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import with_values
from rlhf_mcore.config.validate import sampling_problems
from rlhf_mcore.foreign import INDEX, read_json
from rlhf_mcore.readers.adapter_files import base_model, holds_adapter
from rlhf_mcore.readers.hub_ids import absent_hint
from rlhf_mcore.readers.model_files import INDEX_FILE, TOKENIZER_FILES, inspect_generator, tokenizer_problems
from rlhf_mcore.readers.tokenizer_match import token_problems, tokenizer_size

CANDIDATES = ("", "actor", "latest/actor")  # in a Hugging Face directory, one of our checkpoints, a run directory
COMPANIONS = "huggingface"  # trainers that save shards store config.json and the tokenizer in this folder
_FSDP_SHARD = re.compile(r"model_world_size_\d+_rank_\d+\.pt")
_MEGATRON = (".metadata", "latest_checkpointed_iteration.txt")


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """The directories of a model to evaluate."""

    format: str  # hf | adapter | fsdp | megatron
    weights: str  # directory of the weights, shards or adapters
    files: str  # directory of config.json and possibly of the tokenizer

    @classmethod
    def from_directory(cls, path: str) -> EvaluatedModel:
        """Return the model in a Hugging Face directory."""
        return cls("hf", path, path)

    @property
    def is_sharded(self) -> bool:
        """Return whether the weights are another trainer's shards."""
        return self.format in ("fsdp", "megatron")

    @property
    def subject(self) -> Path:
        """Return the directory that results are named after: for checkpoint-7/actor the checkpoint."""
        folder = Path(self.weights).resolve()
        return folder.parent if folder.name == "actor" else folder


def find_model(path: str, field: str, base: str) -> EvaluatedModel:
    """Find the model in ``path``: a Hugging Face directory, a checkpoint, a run directory, or another trainer's shards.

    ``base``: the Hugging Face model that was trained, for a directory without config.json.

    Raises:
        ConfigError: there is none, or there are shards, but no config.json for them.
    """
    folders = [Path(path, inside) for inside in CANDIDATES]
    for folder in folders:
        if holds_adapter(folder):
            return EvaluatedModel("adapter", str(folder), base_model(str(folder), base))
        if isfile(folder / "config.json"):
            break
    for folder in folders[:2]:
        if (kind := _shard_format(folder)) is None:
            continue
        for files in (folder, folder / COMPANIONS, folder.parent / COMPANIONS, Path(base)):
            if isfile(files / "config.json"):
                return EvaluatedModel(kind, str(folder), str(files))
        raise ConfigError(
            f"{field}={path} contains {kind} shards, but neither it nor model.path={base} contains a config.json; "
            f"copy the model's config.json to {folder / COMPANIONS}, or set model.path"
        )
    for folder in folders:
        if isfile(folder / "config.json"):
            return EvaluatedModel.from_directory(str(folder))
    problem = "contains no config.json" if isdir(path) else f"is not a directory (looked from {Path.cwd()})"
    raise ConfigError(
        f"{field}={path} {problem}; give a Hugging Face directory, a checkpoint (checkpoint-N), a run directory, or a directory "
        f"with shards of FSDP (model_world_size_X_rank_Y.pt) or Megatron (torch_dist){absent_hint(path)}"
    )


def _shard_format(folder: Path) -> str | None:
    """Return the format of the shards of another trainer in a directory, or None if it contains none."""
    names = {file.name for file in folder.iterdir()} if isdir(folder) else set()
    if any(name.endswith(".safetensors") for name in names):
        return None
    if any(map(_FSDP_SHARD.fullmatch, names)):
        return "fsdp"
    return "megatron" if names.intersection(_MEGATRON) else None


def default_checkpoint(cfg: Config) -> str | None:
    """Return the checkpoint of the configuration's own run, or None: the best if the run loads it at its end, else the latest."""
    run = cfg.run_directory
    for link in ("best", "latest") if cfg.checkpoint.load_best_model_at_end else ("latest",):
        actor = run / link / "actor"
        if isfile(actor / "config.json") or holds_adapter(actor):
            return str(run / link)
    return None


def checkpoint_config(cfg: Config, model: EvaluatedModel) -> Config:
    """Return the resolved configuration for a model, with the tokenizer of that model if it has one."""
    own = (
        place for place in (model.weights, model.files) if any(isfile(Path(place, name)) for name in TOKENIZER_FILES)
    )
    tokenizer = next(own, cfg.model.tokenizer_path or cfg.model.path)
    return resolve(with_values(cfg, {"model.path": model.files, "model.tokenizer_path": tokenizer}))


def validate_evaluation(cfg: Config, world_size: int | None = None) -> None:
    """Check the parts of a configuration that an evaluation needs. The configuration of a training run is always enough.

    Raises:
        ConfigError: the configuration is invalid; the message lists every problem.
    """
    problems = [*sampling_problems(cfg), *reward_problems(cfg)]
    if not cfg.data.eval:
        problems.append("data.eval=[] names no file; give a list of .parquet or .jsonl files")
    problems += data_problems(cfg.data, cfg.data.eval, "data.eval", needs_answer=needs_answer(cfg))
    problems += _world_problems(cfg, world_size)
    for field in ("checkpoint", "compare"):
        path = getattr(cfg.evaluate, field)
        if path is not None:
            problems += _checkpoint_problems(cfg, path, f"evaluate.{field}")
    if cfg.evaluate.checkpoint is None:
        run = cfg.run_directory
        problems.append(
            f"evaluate.checkpoint is not set, and the run of this configuration ({run}) has no checkpoint; "
            "name a model directory, as in evaluate.checkpoint=DIR"
        )
    if problems:
        raise ConfigError.many(problems)


def _world_problems(cfg: Config, world_size: int | None) -> Iterator[str]:
    layout = cfg.rollout.layout
    world = default_world_size(cfg, evaluates=True) if world_size is None else world_size
    if world % (size := layout.num_ranks):
        yield f"{engine_keys(layout)}={size} does not divide the number of processes {world}; use a multiple of {size} processes"
    for role in role_layouts(cfg):
        if role.name == "reward.model":
            yield from layout_problems(role, world, f"the number of processes={world}")
    yield from sharding_problems(cfg)


def _checkpoint_problems(cfg: Config, path: str, field: str) -> Iterator[str]:
    try:
        model = find_model(path, field, cfg.model.path)
        own = checkpoint_config(cfg, model)
    except ConfigError as error:
        yield str(error)
        return
    tokenizer = own.model.tokenizer_path or model.files
    # Only files in a checkpoint's manifest are loaded. An index file that was added later is ignored.
    needs_weights = model.format == "hf" and not _is_added(Path(model.files, INDEX_FILE))
    geometry, problems = inspect_generator(model.files, field, needs_weights=needs_weights)
    yield from [*problems, *tokenizer_problems(tokenizer, "model.tokenizer_path")]
    yield from token_problems(model.files, tokenizer_size(tokenizer), field, tokenizer)
    if geometry is None:
        return
    yield from engine_cut_problems(own.rollout, geometry, field)
    scorer = own.reward.model
    if scorer.path is not None:
        reward_model = OtherModel("reward.model", "reward.model.path", scorer.path, scorer.layout, ("sequence",))
        yield from model_problems(reward_model, geometry)
        yield from microbatch_problems(own)
    longest = own.rollout.max_model_len or 0
    if longest > geometry.max_positions:
        yield (
            f"{field}={path}: max_position_embeddings={geometry.max_positions} is less than the {longest} tokens of a prompt and "
            "its response; lower data.max_prompt_tokens, evaluate.max_new_tokens or rollout.sampling.max_new_tokens"
        )


def _is_added(file: Path) -> bool:
    """Return whether a file of a model directory is in a checkpoint whose manifest does not name it."""
    folder = Path(os.path.realpath(file.parent))
    manifest = folder.parent / "manifest.json"
    if not isfile(file) or not isfile(manifest):
        return False
    return f"{folder.name}/{file.name}" not in read_json(manifest, limits=INDEX).object("files")
