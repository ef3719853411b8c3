"""The composition root of ``rlhf-mcore evaluate``: evaluate a checked configuration. Only a reward model needs Megatron."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlhf_mcore.checkpoint.delta import checked_model
from rlhf_mcore.checkpoint.layout import MANIFEST
from rlhf_mcore.checkpoint.manifest import Problem
from rlhf_mcore.cli import rank
from rlhf_mcore.cli.preflight import load_environment
from rlhf_mcore.cli.reward_pools import build_graders, reward_pools
from rlhf_mcore.cli.run_context import prompt_loader
from rlhf_mcore.cli.terminal import find_console, progress_bar, say, working
from rlhf_mcore.commands.evaluate.checkpoints import EvaluatedModel, checkpoint_config, find_model
from rlhf_mcore.commands.evaluate.results import EvaluationDirectory, PartFile, Sample
from rlhf_mcore.commands.evaluate.weights import (
    Engines,
    companion_digests,
    engine_adapters,
    weight_sketches,
)
from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.files import digest_of_file, digest_of_json, pretty_json, write_atomically
from rlhf_mcore.observability.rank_file import Watchdog
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.parallel.collectives import broadcast_json, gather_json, on_every_rank, world_group
from rlhf_mcore.platform import Platform
from rlhf_mcore.protocols import EngineRank, RewardFunction
from rlhf_mcore.readers.tokenizer_match import token_problems
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.redaction import redact
from rlhf_mcore.trainer.evaluation import (
    TOKENS,
    evaluation_sampling,
    grade,
    graded_of,
    missing_batches,
    prompts_per_batch,
    sample_record,
    score_records,
    with_tokens,
    without_score,
)
from rlhf_mcore.trainer.evaluation_results import (
    Table,
    comparison,
    comparison_table,
    results,
    results_table,
    sources_table,
)
from rlhf_mcore.trainer.inputs import own_files
from rlhf_mcore.trainer.model_reward import ModelReward
from rlhf_mcore.trainer.scores import OnError
from rlhf_mcore.trainer.statistics import Graded
from rlhf_mcore.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Engines work independently, and at the end wait for the slowest engine. If a rank dies, the whole job ends.
TIMEOUT = timedelta(days=2)
_HOW_TO_GRADE = (
    "pool",
    "ray",
    "workers",
    "timeout_s",
    "memory_gib",
    "env",
    "on_error",
    "max_error_share",
)  # these keys change how responses are scored, not the scores, so an evaluation with other values may continue
_SERVICES = ("remote", "judge")
_TOOLS, _OTHERS = "environment.options.tools[", ("environment.tools", "environment.options.corpus", "rollout.function")
MAX_SHOWN = 26  # letters of a name in the progress line
_HOW_TO_ASK = ("token_env", "batch_size", "concurrency", "timeout_s")


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The results of an evaluated checkpoint, on the first rank."""

    directory: Path  # with samples.jsonl and results.json
    content: dict[str, Any]  # the content of results.json
    samples: list[Sample]


@dataclass(slots=True)
class _Task:
    """A checkpoint to evaluate. ``cfg.model`` is that checkpoint."""

    cfg: Config
    given: str  # the name from the user
    subject: Path  # directory that the results are named after; by default they are written next to it
    model: EvaluatedModel
    prompts: list[Prompt]
    output: Path | None = None  # None: next to the checkpoint
    adds_adapters: bool = False  # whether the engine adds adapters to the weights of the base model
    settings: dict[str, Any] = field(default_factory=dict)  # on rank 0 only, like the directory
    directory: EvaluationDirectory | None = None


def run(cfg: Config) -> tuple[list[Evaluated], dict[str, Any]]:
    """Evaluate the checkpoints and compare them. Every rank of the world calls it, under torchrun.

    Returns the results of each checkpoint and the content of comparison.json ({} without a comparison). Ranks other than the first
    return empty results.

    Raises:
        ConfigError: the loaded data or models show an error; raised on every rank.
    """
    with rank.join_world(cfg, TIMEOUT) as process, ExitStack() as stack:
        watchdog = process.watchdog
        pools = reward_pools(cfg.reward)
        reward = on_every_rank(lambda: build_graders(cfg, pools))
        on_every_rank(lambda: load_environment(cfg) if dist.get_rank() == 0 else None)
        found = broadcast_json(on_every_rank(lambda: _find_models(cfg) if dist.get_rank() == 0 else None), 0)
        tasks = [_task(cfg, name, subject, EvaluatedModel(*model)) for name, subject, model in found]
        adapters = on_every_rank(lambda: engine_adapters(cfg, [task.model for task in tasks]))
        for task in tasks:
            task.adds_adapters = adapters is not None and task.model.weights in adapters.directories
        engines = stack.enter_context(closing(Engines(process.platform.dtype(cfg.model.dtype), adapters)))
        samples = [_evaluate(task, engines, reward, stack, watchdog) for task in tasks]
        if cfg.reward.model.path is not None:
            engines.close()  # the reward model needs its memory
            samples = _score_by_model(tasks, samples, process.platform)
        return _report(cfg, tasks, samples) if dist.get_rank() == 0 else ([], {})


def _find_models(cfg: Config) -> list[tuple[str, str, tuple[str, str, str]]]:
    """Return for each key of ``evaluate`` that names a model: the key, the directory to name results after, and the model.

    Checkpoints are verified. The weights of a delta are restored next to it.
    """
    models = []
    for name in ("checkpoint", "compare"):
        if (path := getattr(cfg.evaluate, name)) is None:
            continue
        model = find_model(path, f"evaluate.{name}", cfg.model.path)
        subject = model.subject
        if not model.is_sharded:
            folder = checked_folder(Path(model.weights), hashes=cfg.checkpoint.verify)
            model = replace(model, weights=folder, files=folder if model.files == model.weights else model.files)
        models.append((name, str(subject), astuple(model)))
    return models


def checked_folder(folder: Path, *, hashes: bool) -> str:
    """Return ``folder``, or for a checkpoint a directory that contains only the model files of its manifest.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    checkpoint = folder.resolve().parent
    if not (checkpoint / MANIFEST).is_file():
        return str(folder)

    def report(problems: Sequence[Problem]) -> None:
        names = join_first([problem.path for problem in problems], 3, ", ")
        say(f"{checkpoint}: not in the manifest, so not loaded: {names}", file=sys.stderr)

    return str(checked_model(checkpoint, folder.resolve().name, hashes=hashes, report=report))


def _task(cfg: Config, name: str, subject: str, model: EvaluatedModel) -> _Task:
    """Build the task for a model, with its prompts. Collective over the world."""
    own = on_every_rank(lambda: checkpoint_config(cfg, model))
    output = Path(cfg.evaluate.output_dir) if cfg.evaluate.output_dir else None
    if output is not None and name == "compare":
        output /= "compare"
    return _Task(own, getattr(cfg.evaluate, name), Path(subject), model, _load_prompts(own, f"evaluate.{name}"), output)


def _load_prompts(cfg: Config, field: str) -> list[Prompt]:
    """Load the prompts of ``data.eval`` with the model's tokenizer. Collective over the world."""
    where = cfg.model.tokenizer_path or cfg.model.path

    def read() -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(where)
        num_tokens = max(tokenizer.get_vocab().values()) + 1
        if problems := list(token_problems(cfg.model.path, num_tokens, field, where)):
            raise ConfigError.many(problems)
        return tokenizer

    def tell(text: str) -> None:
        if dist.get_rank() == 0:
            say(text, file=sys.stderr)

    load = prompt_loader(cfg, on_every_rank(read), tell, world_group())
    return load(cfg.data.eval, "data.eval")[: cfg.evaluate.max_prompts]


def _evaluate(
    task: _Task, engines: Engines, reward: RewardFunction, stack: ExitStack, watchdog: Watchdog
) -> list[Sample]:
    """Score the prompts that are not scored yet. Returns all samples on rank 0, [] on the others. Collective."""
    cfg = task.cfg
    path, done = broadcast_json(on_every_rank(lambda: _open(task, engines.dtype, stack)), 0)
    causes: list[str] = []  # reasons for responses without a score, on this rank
    if len(done) < len(task.prompts):
        watchdog.progress("start_engine")
        with working(f"{task.given}: starting the engine", console=find_console(cfg.logging.console)):
            sampler = engines.start(cfg, task.model, watchdog.beat)
        sampling = evaluation_sampling(cfg.evaluate, cfg.rollout.sampling.max_new_tokens, cfg.seed)
        engine, size = sampler.rank, prompts_per_batch(cfg.evaluate.samples, cfg.rollout.slots)
        part = PartFile(Path(path), engine.engine_index, engine.num_engines) if engine.is_lead else None
        console, name = find_console(cfg.logging.console), task.given
        shown = f"…{name[1 - MAX_SHOWN :]}" if len(name) > MAX_SHOWN else name
        line = progress_bar(console, shown, len(task.prompts), "prompts")
        with nullcontext() if part is None else closing(part), line as advance:
            advance(len(done))
            for prompts in missing_batches(task.prompts, engine, size, set(done)):
                watchdog.progress("generate")
                rows = grade(sampler, reward, sampling, prompts)
                failures = [score.cause or score.failure for _, score, _ in rows if score.failure is not None]
                OnError.of(cfg.reward).refuse_too_many(len(failures), len(rows), "".join(failures[:1]))
                causes += failures
                if part is not None:
                    part.append([_record(cfg, *row) for row in rows])
                    advance(len(prompts) * engine.num_engines)  # all engines get equal shares
    watchdog.pause()  # waiting for slower engines is not a stall
    dist.barrier()
    watchdog.progress("report")
    parts = gather_json([len(causes), causes[:1]])
    if without := sum(count for count, _ in parts):
        say(without_score(task.given, without, [first for _, first in parts]), file=sys.stderr)
    return task.directory.samples() if task.directory is not None else []


def _record(cfg: Config, trajectory: Trajectory, score: Score, row: Graded) -> Sample:
    """Return the record of a response, with its tokens if a reward model will score it."""
    record = sample_record(trajectory, score, row)
    return record if cfg.reward.model.path is None else with_tokens(record, trajectory)


def _score_by_model(tasks: Sequence[_Task], samples: Sequence[list[Sample]], platform: Platform) -> list[list[Sample]]:
    """Add the reward model's scores to the samples on rank 0, and keep their order. Collective."""
    waiting = broadcast_json([any(TOKENS in sample for sample in own) for own in samples], 0)
    if not any(waiting):
        return list(samples)
    from rlhf_mcore.cli.models import ModelBuilder  # imports Megatron

    cfg = tasks[0].cfg
    model = ModelBuilder(cfg, platform).reward_model()

    def add_model(graders: RewardFunction) -> RewardFunction:
        return ModelReward(graders, model.compute_scores, cfg.reward.model.weight)

    engine = EngineRank.of(dist.get_rank(), dist.get_world_size(), cfg.rollout.layout.num_ranks)
    finished = []
    for task, own, waits in zip(tasks, samples, waiting, strict=True):
        if waits:
            records, size = broadcast_json(own, 0), prompts_per_batch(cfg.evaluate.samples, cfg.rollout.slots)
            parts = gather_json(score_records(task.prompts, records, engine, size, add_model))
            own = sorted((sample for part in parts for sample in part), key=lambda s: (s["index"], s["sample"]))
        finished.append(own)
    return finished


def _open(task: _Task, dtype: str, stack: ExitStack) -> tuple[str, list[int]] | None:
    """Open and lock the results directory on rank 0. Returns its path and the indices of the scored prompts."""
    if dist.get_rank() != 0:
        return None
    task.settings = _settings(task, dtype)
    name = f"{task.subject.name}-{digest_of_json(task.settings)[:8]}"
    output = task.output or task.subject.parent / "evaluations" / name
    task.directory = stack.enter_context(closing(EvaluationDirectory(output, task.settings)))
    return str(output), sorted({sample["index"] for sample in task.directory.samples()})


def _settings(task: _Task, dtype: str) -> dict[str, Any]:
    """Return all settings that the samples depend on."""
    cfg = task.cfg
    reward = {key: value for key, value in to_dict(cfg.reward).items() if key not in (*_HOW_TO_GRADE, *_SERVICES)}
    if not cfg.reward.functions:
        del reward["functions"]  # compatible with settings.json of releases that have no such key
    for name in _SERVICES:
        service = to_dict(cfg.reward)[name]
        if service["url"] is not None:
            reward[name] = {key: value for key, value in service.items() if key not in _HOW_TO_ASK}
    if "judge" in reward:  # compatible with settings.json of releases with two keys
        file = cfg.reward.judge.rubric_file
        text = None if file is not None else cfg.reward.judge.rubric
        reward["judge"] |= {"rubric": text, "rubric_file": file and digest_of_file(Path(file))}
    function = cfg.reward.function
    if isinstance(function, OwnFunction):
        code: str | None = function.fingerprint()
    else:
        code = function and digest_of_file(Path(function.rpartition(":")[0]))
    functions = {key: entry["content"] for key, entry in own_files(cfg).items() if key.startswith("reward.functions[")}
    environment = None
    if cfg.environment.function is not None:
        file = cfg.environment.function.rpartition(":")[0]
        described = {key: value for key, value in to_dict(cfg.environment).items() if key not in _HOW_TO_GRADE}
        others = {
            key: entry["content"] for key, entry in own_files(cfg).items() if key in _OTHERS or key.startswith(_TOOLS)
        }
        environment = {**described, "code": digest_of_file(Path(file)) if file else None, **others}
    path = cfg.reward.model.path
    scorer = [] if path is None else weight_sketches(EvaluatedModel.from_directory(path))
    return {
        **({} if environment is None else {"environment": redact(environment)}),
        **({"functions": functions} if functions else {}),
        "model": {
            "weights": weight_sketches(task.model),
            "files": companion_digests(cfg.model.path),
            "tokenizer": companion_digests(cfg.model.tokenizer_path or cfg.model.path),
        },
        "data": {
            "files": [digest_of_file(Path(file)) for file in cfg.data.eval],
            **({} if cfg.data.image_pixels is None else {"image_pixels": cfg.data.image_pixels}),
            "max_prompts": cfg.evaluate.max_prompts,
            **{
                key: getattr(cfg.data, key)
                for key in (
                    "prompt_key",
                    "answer_key",
                    "eval_prompt_key",
                    "eval_answer_key",
                    "apply_chat_template",
                    "transform",
                    "max_prompt_tokens",
                    "overlong_prompts",
                )
            },
        },
        "sampling": asdict(evaluation_sampling(cfg.evaluate, cfg.rollout.sampling.max_new_tokens, cfg.seed)),
        "reward": {**redact(reward), "code": code, "weights": scorer},
        "engine": {
            "name": cfg.rollout.engine,
            "dtype": dtype,
            "max_model_len": cfg.rollout.max_model_len,
            "prompts_per_batch": prompts_per_batch(cfg.evaluate.samples, cfg.rollout.slots),
            **({"adds_adapters": True} if task.adds_adapters else {}),
        },
    }


def _report(
    cfg: Config, tasks: Sequence[_Task], samples: Sequence[list[Sample]]
) -> tuple[list[Evaluated], dict[str, Any]]:
    """Write, print and return the results."""
    evaluated, compared = [], {}
    console = Console(cfg.logging.console, 0, "evaluate")
    graded = [[graded_of(sample) for sample in own] for own in samples]
    for task, own, rows in zip(tasks, samples, graded, strict=True):
        assert task.directory is not None and len(rows) == len(task.prompts) * cfg.evaluate.samples
        content = results(task.given, task.settings, rows, cfg.seed)
        task.directory.finish(own, content)
        evaluated.append(Evaluated(task.directory.path, content, own))
        _show(console, f"{task.given} on {', '.join(cfg.data.eval)}", results_table(content))
        if (by_source := sources_table(content))[1]:
            _show(console, "by data source", by_source)
        console.note(f"results   {shown_path(task.directory.path)}")
    if len(tasks) == 2:
        ours, other = tasks
        assert ours.directory is not None
        # The evaluated model comes second, so that a positive difference means that it is better than the other model.
        compared = comparison((other.given, ours.given), graded[1], graded[0], cfg.seed)
        file = ours.directory.path / f"comparison-{other.subject.name}.json"
        write_atomically(file, pretty_json(compared))
        _show(console, f"{ours.given} against {other.given}", comparison_table(compared))
        console.note(f"written   {shown_path(file)}")
    return evaluated, compared


def _show(console: Console, title: str, table: Table) -> None:
    header, rows = table
    console.summary(title, rows, header, [])
