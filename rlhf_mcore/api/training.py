"""Training from Python, in one call or step by step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec

from rlhf_mcore.api import display
from rlhf_mcore.api.inputs import check, checked_list, checked_path, run_config
from rlhf_mcore.checkpoint.layout import BEST, LATEST
from rlhf_mcore.cli import rank
from rlhf_mcore.cli.preflight import check_engine
from rlhf_mcore.cli.rank import torchrun_world_size
from rlhf_mcore.cli.train import quiet
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.parallel.addresses import LOOPBACK
from rlhf_mcore.readers.hub import localize

if TYPE_CHECKING:
    from rlhf_mcore.cli.compose import OpenRun

P = ParamSpec("P")
# Called as f(data_source, solution_str, ground_truth, extra_info), by keyword if it has parameters with these names.
Reward = Callable[..., Any]
UserRollout = Callable[..., Coroutine[Any, Any, Any]]  # called as f(policy, prompt, ctx)
OnStep = Callable[[int, Mapping[str, Any]], None]  # receives a step, and its metrics with the names of metrics.jsonl
# Prompts, or rows with the columns that the configuration names, or data files.
Rows = str | os.PathLike[str] | Iterable[Any]


class Callback:
    """Methods that a run calls on the first rank. Override the methods that you need. An exception in a method ends the run."""

    def on_begin(self, directory: Path, step: int) -> None:
        """Handle the start, when models and engines are ready. ``step`` is the first step; it is above 1 if the run continues."""

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Handle the end of a step. ``metrics`` has the names of metrics.jsonl."""

    def on_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Handle an evaluation. This is called before ``on_step``, and for step 0.

        ``metrics`` contains ``evaluate/*``, or ``final/*`` at the end of some runs.
        """

    def on_rollouts(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Handle a step's scored responses. ``rollouts`` has the format of rollouts/step-*.jsonl, even if no such file is written."""

    def on_save(self, step: int, checkpoint: Path) -> None:
        """Handle a committed checkpoint. Its models are Hugging Face directories. Background saves commit some steps later."""

    def on_end(self, trained: Trained) -> None:
        """Handle the end of the run: after its last step, or after the save for a signal, an alarm or a time limit."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run. ``model`` is a Hugging Face directory.

    On the first rank, ``metrics`` contains a row for each step of the run, including steps before an interruption. You can pass it to
    ``pandas.DataFrame``.
    """

    finished: bool  # False if a signal, an alarm or a time limit ended the run after a save
    directory: Path
    model: Path
    metrics: list[dict[str, Any]]

    def _repr_html_(self) -> str:
        return display.of_run(self.finished, self.directory, self.model, self.metrics)


class Trainer:
    """A run step by step: ``with rm.Trainer(cfg) as trainer: metrics = trainer.step()``.

    Args:
        cfg: configuration from ``load_config`` or ``Config``; it is not changed. Without it, the other arguments are the
            configuration, and the run directory is named after a digest of the inputs, unless ``experiment`` is given.
        model: ``model.path``, a Hugging Face directory.
        prompts: texts, conversations or rows, which are written to ``data/`` in the run directory; or the path of a file. They replace
            ``data.train``.
        eval_prompts: the same for ``data.eval``.
        reward: function that scores a response, instead of ``reward.function``. It is called in this process and has no time limit.
            Or the name of a rule, such as "math"; or a list of functions and rules, each alone or as a pair with its weight; or a
            dict with the group ``reward``.
        rollout: coroutine function of (policy, prompt, ctx) that samples the turns of a rollout, instead of ``rollout.function``.
            It runs in this process and has no time limit. Or a dict with the group ``rollout``.
        algorithm: preset of the algorithm.
        num_steps: ``trainer.num_steps``.
        callbacks: ``Callback`` objects, or functions of a step and its metrics that are called after each step on the first rank.
        keys: further settings, as in ``Config``: ``actor={"optimizer": {"lr": 1e-6}}``, or ``**{"actor.optimizer.lr": 1e-6}``.

    Raises:
        ConfigError: an argument, the configuration, the data or the reward is invalid. The data and the models are loaded at the
            start of the ``with`` block.
    """

    def __init__(
        self,
        cfg: Config | None = None,
        *,
        model: str | Path | None = None,
        prompts: Rows | None = None,
        eval_prompts: Rows | None = None,
        reward: Reward | Sequence[Any] | Mapping[str, Any] | None = None,
        rollout: UserRollout | str | Mapping[str, Any] | None = None,
        algorithm: str | None = None,
        num_steps: int | None = None,
        callbacks: Sequence[Callback | OnStep] = (),
        **keys: Any,
    ) -> None:
        listeners = checked_list("callbacks", callbacks, "functions of (step, metrics)")
        self._steps = _Steps([_checked_callback(one) for one in listeners])
        named = {"model": model, "algorithm": algorithm, "trainer.num_steps": num_steps}
        settings = {name: value for name, value in named.items() if value is not None}
        inputs = {"reward": reward, "rollout": rollout, "prompts": prompts, "eval_prompts": eval_prompts}
        cfg = run_config(cfg, {**keys, **settings}, **inputs)
        localize(cfg)
        validate(cfg, checked_world_size(default_world_size(cfg)))
        check_engine(cfg)
        self.cfg = resolve(cfg)
        self._stack = ExitStack()
        self._run: OpenRun | None = None
        self._next, self._last = 1, self.cfg.trainer.num_steps
        self._ended = False

    def __enter__(self) -> Trainer:
        with ExitStack() as stack:
            stack.enter_context(one_process())
            from rlhf_mcore.cli.compose import open_run

            stack.enter_context(rank.forbid_early_exit())
            self._run = stack.enter_context(open_run(self.cfg, 0, [self._steps], partial(self._steps.call, "on_save")))
            listens = any(type(one).on_rollouts is not Callback.on_rollouts for one in self._steps.callbacks)
            self._run.record.listen(partial(self._steps.call, "on_rollouts") if listens else None)
            self._next = self._run.first_step
            if self._run.record.directory is not None:
                self._steps.recall(self._run.record.directory.records(), self._next)
            if self._run.trainer is not None:
                if self._run.record.directory is not None:
                    self._steps.call("on_begin", self._run.record.directory.path, self._next)
                self._run.trainer.begin(self._last, self._next)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._run = None
        return self._stack.__exit__(kind, error, trace)

    def _require_run(self) -> OpenRun:
        if self._run is None:
            raise RuntimeError("use a Trainer in a with block: `with rm.Trainer(cfg) as trainer:`")
        return self._run

    def step(self) -> dict[str, Any] | None:
        """Run the next step, and evaluate and save if they are due. Collective over the world.

        Returns the step's metrics on the first rank, {} on other ranks, and None if the run has ended: after the last step, or by a
        signal, an alarm or a time limit.
        """
        run = self._require_run()
        if self._ended or run.trainer is None or self._next > self._last:
            return None
        count = len(self._steps.own)
        self._ended = run.trainer.step(self._next, self._last)
        self._next += 1
        if self._next > self._last and not self._ended:
            run.trainer.end(self._last)
            run.record.close_profile()
            run.finish()
        if (self._ended or self._next > self._last) and run.record.directory is not None:
            self._steps.call("on_end", self.trained())
        return next(iter(self._steps.own[count:]), {})

    def save_checkpoint(self, directory: str | Path) -> Path:
        """Save ``<directory>/checkpoint-<step>`` between two steps, and return its path. Collective over the world.

        A relative directory is relative to the run directory.

        Raises:
            ConfigError: the run was finished before this process started, so no model is loaded.
        """
        place = checked_path("directory", directory)
        if (trainer := self._require_run().trainer) is None:
            raise ConfigError(f"the run is already finished; its last checkpoint is in {self.cfg.run_directory}")
        return trainer.save_checkpoint((self.cfg.run_directory / place).resolve())

    def trained(self) -> Trained:
        """Return the result of the run so far."""
        cfg = self.cfg
        directory = cfg.run_directory
        chosen = BEST if cfg.checkpoint.load_best_model_at_end else LATEST
        model = directory / chosen / run_kind(cfg).saved_as
        metrics = [*self._steps.earlier, *self._steps.own]
        return Trained(self._next > self._last and not self._ended, directory, model, metrics)


def _with_parameters_of(other: Callable[P, Any]) -> Callable[[Callable[..., Trained]], Callable[P, Trained]]:
    """Return a decorator that gives a function the signature of ``other``, for type checkers, help and editors."""

    def change(function: Callable[..., Trained]) -> Callable[P, Trained]:
        function.__signature__ = signature(other).replace(return_annotation="Trained")  # type: ignore[attr-defined]
        return function

    return change


@_with_parameters_of(Trainer)
def train(*given: Any, **settings: Any) -> Trained:
    """Train until ``trainer.num_steps``, and continue from the last checkpoint in the run directory if there is one.

    The arguments are the same as for ``Trainer``.

    Raises:
        ConfigError: as for ``Trainer``.
    """
    with Trainer(*given, **settings) as trainer:
        while trainer.step() is not None:
            pass
        return trainer.trained()


class _StepFunction(Callback):
    def __init__(self, function: OnStep) -> None:
        self._function = function

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._function(step, metrics)


def _checked_callback(value: Any) -> Callback:
    """Return a callback: an object of ``Callback``, or a function of a step and its metrics."""
    if isinstance(value, Callback):
        return value
    remedy = "give functions of (step, metrics), or objects of a subclass of rm.Callback"
    if isinstance(value, type):
        remedy += f": {value.__name__}() and not the class"
    is_function = callable(value) and not isinstance(value, type) and _accepts_step(value)
    return _StepFunction(check("callbacks", value, is_function, remedy))


def _accepts_step(function: Callable[..., Any]) -> bool:
    try:
        signature(function).bind(1, {})
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


@dataclass(slots=True)
class _Steps:
    """A tracker that stores the metrics of steps and calls the callbacks."""

    callbacks: Sequence[Callback]
    own: list[dict[str, Any]] = field(default_factory=list)
    earlier: list[dict[str, Any]] = field(default_factory=list)  # steps of the run before this process

    def recall(self, records: Iterable[Mapping[str, Any]], first_step: int) -> None:
        """Store the records of steps before ``first_step``."""
        self.earlier = [dict(row) for row in records if 0 < row["step"] < first_step and "final/step" not in row]

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        evaluation = {name: value for name, value in metrics.items() if name.startswith(("evaluate/", "final/"))}
        is_step = step > 0 and "final/step" not in metrics  # otherwise an evaluation without a step
        if is_step:
            self.own.append({"step": step, **metrics})
        if evaluation:
            self.call("on_evaluation", step, evaluation)
        if is_step:
            self.call("on_step", step, metrics)

    def call(self, method: str, *given: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            getattr(callback, method)(*given)

    def close(self) -> None:
        """Do nothing."""


def checked_world_size(needed: int) -> int:
    """Return torchrun's world size, or 1 without torchrun. ``needed``: number of processes that the layouts need.

    Raises:
        ConfigError: the layouts need several processes, but torchrun has not started this one.
    """
    world_size = torchrun_world_size()
    if world_size is None and needed != 1:
        raise ConfigError(
            f"the layouts of this configuration need {needed} processes, but there is only one; set actor.layout.tp=1 and "
            "trainer.world_size=1, or start the script with torchrun"
        )
    return world_size or 1


@contextmanager
def one_process() -> Iterator[None]:
    """Set the environment variables of a world of one process, unless under torchrun. Library warnings are off in the block."""
    names = {}
    if torchrun_world_size() is None:
        sizes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        names = {
            **sizes,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": "29500",  # never opened, see ``rendezvous.connect``
        }
    os.environ.update(names)
    try:
        with warnings.catch_warnings():
            quiet()
            yield
    finally:
        for name in names:
            os.environ.pop(name, None)
