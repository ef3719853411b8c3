"""The commands from Python, in a notebook or a script: ``import rlhf_mcore as rm``.

    cfg = rm.load_config("configs/quickstart/grpo.yaml", ["actor.layout.tp=1", "trainer.num_steps=5"])
    trained = rm.train(cfg, reward=lambda data_source, solution_str, ground_truth, extra_info: float("7" in solution_str))

It is what ``rlhf-mcore train`` does: the same checks, run directory, checkpoints and resume; ``evaluate``, ``convert`` and ``plan``
likewise. Without torchrun a run has one process, this one; a script that torchrun starts in several processes trains in all of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rlhf_mcore.cli import rank
from rlhf_mcore.cli.preflight import check_engine, check_packages
from rlhf_mcore.cli.rendezvous import torchrun_world_size
from rlhf_mcore.cli.train import quiet
from rlhf_mcore.config.derive import default_world_size, resolve
from rlhf_mcore.config.errors import ConfigError as ConfigError
from rlhf_mcore.config.hub import MODEL_KEYS, localize
from rlhf_mcore.config.load import load_config as load_config
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.user_functions import OwnFunction
from rlhf_mcore.config.validate import validate
from rlhf_mcore.foreign import shorten
from rlhf_mcore.observability.files import FullDiskError, json_line, write_atomically
from rlhf_mcore.parallel.addresses import LOOPBACK, free_port

if TYPE_CHECKING:
    from rlhf_mcore.cli.compose import OpenRun
    from rlhf_mcore.cli.conversion import Converted
    from rlhf_mcore.planning.plan import RunPlan

# Called as f(data_source, solution_str, ground_truth, extra_info); by keyword, where it has parameters of these names.
Reward = Callable[..., "float | dict[str, float]"]
OnStep = Callable[[int, Mapping[str, Any]], None]  # a step, and its metrics under the names of metrics.jsonl
Rows = Iterable["str | Mapping[str, Any]"]  # prompts, or rows with the columns that the configuration names


class Callback:
    """What a run calls on its way, on the first rank. Override what is wanted; what is raised ends the run."""

    def on_begin(self, directory: Path, step: int) -> None:
        """Models and engines are ready. ``step`` is the first that will be made; above 1 where the run continues."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step was made. ``metrics`` have the names of metrics.jsonl."""

    def on_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The held-out prompts were scored: ``evaluate/*``, of step 0 too, before ``on_step``; ``final/*`` at the end of some runs."""

    def on_rollouts(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """A step's responses were scored. ``rollouts`` are as in rollouts/step-*.jsonl, whether that is written or not."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """A checkpoint is whole, with its models as Hugging Face directories; of a save in the background some steps later."""

    def on_end(self, trained: Trained) -> None:
        """The last step was made, or a signal, an alarm or a time limit has ended the run after a save."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run has come to. ``model`` is a Hugging Face directory; ``metrics`` are of the steps made here, on the first rank."""

    finished: bool  # or it was ended by a signal, an alarm or a time limit, after a save
    directory: Path
    model: Path
    metrics: list[dict[str, Any]]


def train(
    cfg: Config,
    *,
    reward: Reward | None = None,
    prompts: Rows | None = None,
    eval_prompts: Rows | None = None,
    callbacks: Sequence[Callback | OnStep] = (),
) -> Trained:
    """Train to ``trainer.num_steps``, from the last checkpoint of the run directory if there is one.

    Args:
        cfg: as ``load_config`` returns it; it is not changed.
        reward: scores a response, in the place of ``reward.function``. It is called in this process and has no deadline.
        prompts: texts, or rows, in the place of ``data.train``; they are written to ``data/`` in the run directory.
        eval_prompts: likewise, in the place of ``data.eval``.
        callbacks: functions of a step and its metrics, called after each step on the first rank, or ``Callback`` objects.

    Raises:
        ConfigError: a mistake in the configuration, the data or the reward.
    """
    with Trainer(cfg, reward=reward, prompts=prompts, eval_prompts=eval_prompts, callbacks=callbacks) as trainer:
        while trainer.step() is not None:
            pass
        return trainer.trained()


class Trainer:
    """A run step by step: ``with rm.Trainer(cfg) as trainer: metrics = trainer.step()``. Arguments as of ``train``.

    Raises:
        ConfigError: as ``train``; the data and the models are loaded when the block begins.
    """

    def __init__(
        self,
        cfg: Config,
        *,
        reward: Reward | None = None,
        prompts: Rows | None = None,
        eval_prompts: Rows | None = None,
        callbacks: Sequence[Callback | OnStep] = (),
    ) -> None:
        cfg = _with_given(cfg, reward, prompts, eval_prompts)
        localize(cfg)
        validate(cfg, _world_size(cfg))
        check_packages(cfg)
        check_engine(cfg)
        self.cfg = resolve(cfg)
        self._steps = _Steps([one if isinstance(one, Callback) else _StepFunction(one) for one in callbacks])
        self._stack = ExitStack()
        self._run: OpenRun | None = None
        self._next, self._last = 1, self.cfg.trainer.num_steps
        self._ended = False

    def __enter__(self) -> Trainer:
        with ExitStack() as stack:
            stack.enter_context(_one_process())
            from rlhf_mcore.cli.compose import opened

            stack.enter_context(rank.no_early_exit())
            self._run = stack.enter_context(opened(self.cfg, 0, [self._steps], self._steps.saved))
            listens = any(type(one).on_rollouts is not Callback.on_rollouts for one in self._steps.callbacks)
            self._run.record.listen(self._steps.rollouts if listens else None)
            self._next = self._run.first_step
            if self._run.trainer is not None:
                if self._run.record.directory is not None:
                    self._steps.begins(self._run.record.directory.path, self._next)
                self._run.trainer.begin(self._last, self._next)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._run = None
        return self._stack.__exit__(kind, error, trace)

    def _opened(self) -> OpenRun:
        if self._run is None:
            raise RuntimeError("a Trainer makes steps within its block: `with rm.Trainer(cfg) as trainer:`")
        return self._run

    def step(self) -> dict[str, Any] | None:
        """Make the next step, evaluate and save where that is due. Collective over the world.

        Returns its metrics, on the first rank; {} on others. None after the last step, or where a signal, an alarm or a time limit
        has ended the run.
        """
        run = self._opened()
        if self._ended or run.trainer is None or self._next > self._last:
            return None
        made = len(self._steps.made)
        self._ended = run.trainer.step(self._next, self._last)
        self._next += 1
        if self._next > self._last and not self._ended:
            run.trainer.end(self._last)
            run.record.close_profile()
            run.finish()
        if (self._ended or self._next > self._last) and run.record.directory is not None:
            for callback in self._steps.callbacks:
                callback.on_end(self.trained())
        return next(iter(self._steps.made[made:]), {})

    def save_checkpoint(self, directory: str | Path) -> Path:
        """Save ``<directory>/checkpoint-<step>`` between two steps, and return its path. Collective over the world.

        Raises:
            ConfigError: the run had made its last step before, so that no model is loaded.
        """
        if (trainer := self._opened().trainer) is None:
            raise ConfigError(f"the run has made all its steps; its last checkpoint is in {_directory(self.cfg)}")
        return trainer.save_checkpoint(Path(directory).resolve())

    def trained(self) -> Trained:
        """What the run has come to so far."""
        from rlhf_mcore.checkpoint.layout import BEST, LATEST

        cfg = self.cfg
        directory = _directory(cfg)
        chosen = BEST if cfg.checkpoint.load_best_model_at_end else LATEST
        model = directory / chosen / run_kind(cfg).saved_as
        return Trained(self._next > self._last and not self._ended, directory, model, list(self._steps.made))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation has come to, on the first rank; empty on others.

    ``results`` are figures over all prompts: a number, or a dict of ``value``, ``low`` and ``high`` (95 % interval). ``samples`` are
    the graded responses. ``comparison`` is that with ``evaluate.compare``, as in comparison.json. ``directory`` holds all of it.
    """

    results: dict[str, Any]
    samples: list[dict[str, Any]]
    comparison: dict[str, Any]
    directory: Path | None


def evaluate(
    cfg: Config,
    checkpoint: str | Path | None = None,
    compare: str | Path | None = None,
    *,
    reward: Reward | None = None,
    prompts: Rows | None = None,
) -> Evaluation:
    """Score a model on held-out prompts, as ``rlhf-mcore evaluate`` does. Collective over the world.

    Args:
        cfg: of the training run, or a shorter one; it is not changed.
        checkpoint: in the place of ``evaluate.checkpoint``; without both the latest checkpoint of the configuration's own run.
        compare: in the place of ``evaluate.compare``: an improvement on it is positive.
        reward: as of ``train``. Responses that it has scored are scored again where its name or its code has changed.
        prompts: texts, or rows, in the place of ``data.eval``.

    Raises:
        ConfigError: a mistake in the configuration, the data, the reward or the checkpoint.
    """
    from rlhf_mcore.config.evaluation import default_checkpoint, validate_evaluation

    cfg = _with_given(cfg, reward, None, prompts)
    cfg.evaluate.checkpoint = str(checkpoint) if checkpoint else cfg.evaluate.checkpoint or default_checkpoint(cfg)
    cfg.evaluate.compare = str(compare) if compare else cfg.evaluate.compare
    localize(cfg, (*MODEL_KEYS, "data.eval"))
    validate_evaluation(cfg, _world_size(cfg))
    check_packages(cfg)
    check_engine(cfg)
    with _one_process():
        from rlhf_mcore.cli.evaluation import run

        with rank.no_early_exit():
            made, comparison = run(cfg)
    if not made:
        return Evaluation({}, [], {}, None)
    return Evaluation(made[0].content["results"]["all"], made[0].samples, comparison, made[0].directory)


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    source_format: str = "checkpoint",
    target_format: str = "hf",
    role: str = "actor",
    dtype: str | None = None,
    hf_config: str | Path | None = None,
    average: Sequence[str | Path] = (),
    shard_size: str = "4GiB",
    verify: bool = False,
    overwrite: bool = False,
) -> Converted:
    """Convert a model between formats, as ``rlhf-mcore convert`` does with options of these names, in this process.

    Raises:
        ConfigError: the source is not a whole, safe model of a known family, or the destination cannot be made.
    """
    from rlhf_mcore.cli.conversion import Conversion, run
    from rlhf_mcore.cli.convert import DTYPES, FORMATS, ROLES, TARGETS, check_destination, num_bytes

    allowed = {"source_format": FORMATS, "target_format": TARGETS, "role": ROLES, "dtype": (None, *DTYPES)}
    given = {"source_format": source_format, "target_format": target_format, "role": role, "dtype": dtype}
    for name, choices in allowed.items():
        if given[name] not in choices:
            raise ConfigError(f"{name}={given[name]!r} is not a choice; there are: {', '.join(map(str, choices))}")
    check_destination(Path(destination), Path(source), may_exist=overwrite)
    made = run(
        Conversion(
            source_format=source_format,
            target_format=target_format,
            source=Path(source),
            destination=Path(destination),
            role=role,
            dtype=dtype,
            shard_bytes=num_bytes(shard_size),
            average=list(map(Path, average)),
            hf_config=Path(hf_config) if hf_config else None,
            verify=verify,
            overwrite=overwrite,
        )
    )
    assert made is not None, "this is no dry run"
    return made


def plan(cfg: Config, world_size: int | None = None, gpu: str = "H100") -> RunPlan:
    """Memory, traffic and time of a run, as ``rlhf-mcore plan`` shows them; ``fits`` tells whether it can be.

    Raises:
        ConfigError: a mistake in the configuration, or there is no such device.
    """
    from rlhf_mcore.cli.plan import device_and_assumptions
    from rlhf_mcore.planning.inputs import GPUS
    from rlhf_mcore.planning.plan import make_plan

    if gpu not in GPUS:
        raise ConfigError(f"gpu={gpu!r} is not known; there are: {', '.join(GPUS)}")
    size = world_size or default_world_size(cfg)
    validate(cfg, size, check_files=False)
    return make_plan(resolve(cfg), size, *device_and_assumptions(gpu, []))


class _StepFunction(Callback):
    def __init__(self, function: OnStep) -> None:
        self._function = function

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._function(step, metrics)


@dataclass(slots=True)
class _Steps:
    """A tracker that keeps what it is given, and tells the callbacks."""

    callbacks: Sequence[Callback]
    made: list[dict[str, Any]] = field(default_factory=list)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        evaluation = {name: value for name, value in metrics.items() if name.startswith(("evaluate/", "final/"))}
        is_step = step > 0 and "final/step" not in metrics  # and not an evaluation that belongs to none
        if is_step:
            self.made.append({"step": step, **metrics})
        for callback in self.callbacks:
            if evaluation:
                callback.on_evaluation(step, evaluation)
            if is_step:
                callback.on_step(step, metrics)

    def rollouts(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        for callback in self.callbacks:
            callback.on_rollouts(step, rollouts)

    def saved(self, step: int, checkpoint: Path) -> None:
        for callback in self.callbacks:
            callback.on_save(step, checkpoint)

    def begins(self, directory: Path, step: int) -> None:
        for callback in self.callbacks:
            callback.on_begin(directory, step)

    def close(self) -> None:
        """Nothing is open."""


def _with_given(cfg: Config, reward: Reward | None, prompts: Rows | None, eval_prompts: Rows | None) -> Config:
    cfg = deepcopy(cfg)
    if reward is not None:
        cfg.reward.function = OwnFunction(reward)
    for name, rows in (("train", prompts), ("eval", eval_prompts)):
        if rows is not None:
            setattr(cfg.data, name, [_written(rows, _directory(cfg) / "data" / f"{name}.jsonl", cfg.data.prompt_key)])
    return cfg


def _world_size(cfg: Config) -> int:
    """torchrun's, else one.

    Raises:
        ConfigError: the configuration needs more than this process.
    """
    world_size = torchrun_world_size()
    if world_size is None and default_world_size(cfg) != 1:
        raise ConfigError(
            f"the layouts of this configuration need {default_world_size(cfg)} processes, and this is one; set actor.layout.tp=1 and "
            "trainer.world_size=1, or start the script with torchrun"
        )
    return world_size or 1


def _written(rows: Rows, path: Path, prompt_key: Any) -> str:
    """The path of a file with rows. Ranks write the same content, each whole.

    Raises:
        ConfigError: these are no rows, or the run directory cannot be made.
    """
    wanted = "give a list of texts, or of dicts with the columns that data names"
    if isinstance(rows, str | Mapping):
        raise ConfigError(f"prompts={shorten(repr(rows))} is one prompt; {wanted}")
    key, given = prompt_key if isinstance(prompt_key, str) else "prompt", list(rows)
    if wrong := [row for row in given if not isinstance(row, str | Mapping)]:
        raise ConfigError(f"prompts: {shorten(repr(wrong[0]))} is no prompt; {wanted}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, b"".join(json_line({key: row} if isinstance(row, str) else row) for row in given))
    except FullDiskError:
        raise
    except OSError as error:
        raise ConfigError(f"output_dir: {path.parent}: {error.strerror}; choose another output_dir") from error
    return os.path.relpath(path)


def _directory(cfg: Config) -> Path:
    return Path(cfg.output_dir) / cfg.project / cfg.experiment


@contextmanager
def _one_process() -> Iterator[None]:
    """What torchrun would have set for a world of one process; under torchrun nothing is changed. Libraries do not warn meanwhile."""
    names = {}
    if torchrun_world_size() is None:
        sizes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        names = {**sizes, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port(LOOPBACK))}
    os.environ.update(names)
    try:
        with warnings.catch_warnings():
            quiet()
            yield
    finally:
        for name in names:
            os.environ.pop(name, None)
