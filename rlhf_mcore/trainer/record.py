"""The record of a run: metrics, rollouts, timing and display. Every rank creates a record; only the first rank writes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.observability.alarms import AlarmBell, RewardAlarm
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.rank_file import Watchdog
from rlhf_mcore.observability.run_directory import RunDirectory, rollout_record, write_rollouts
from rlhf_mcore.observability.throughput import Throughput, Timers, seconds_beside
from rlhf_mcore.parallel.collectives import broadcast_json, gather_json
from rlhf_mcore.protocols import Tracker
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.trainer.batches import Rollout
from rlhf_mcore.types import Score

if TYPE_CHECKING:
    from rlhf_mcore.observability.prometheus import PrometheusExporter
    from rlhf_mcore.trainer.profiler import StepProfiler
    from rlhf_mcore.types import TrainBatch

MAX_WARNINGS = 5  # shown warnings per rank and step
SAMPLES_EVERY = 10  # interval in steps between responses in the live display
RECENT = 100  # steps whose figures a checkpoint stores
# Loss of the trained model; each kind of run logs exactly one of these
LOSSES = ("loss/total", "loss/sft", "loss/reward_model", "loss/dpo")
CLOCK, SPEED = "timing/unix_time", "timing/tokens_per_s"


@dataclass(slots=True)
class RunRecord:
    """Timing on every rank; files and display on the rank with a directory."""

    timers: Timers
    rollouts_every: int
    directory: RunDirectory | None = None
    tracker: Tracker | None = None
    exporter: PrometheusExporter | None = None
    console: Console | None = None
    watchdog: Watchdog | None = None
    memory: DeviceSharing | None = None
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> its evaluate/* metrics
    rewards: list[float] = field(default_factory=list)  # reward/mean of each step
    losses: list[float] = field(default_factory=list)  # loss per step, in a run without rewards
    all_zero: bool = False  # every response of the run so far got score 0
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))  # step, time, loss, reward
    wall_clock: Callable[[], float] = time.time
    alarm: RewardAlarm | None = None
    bell: AlarmBell | None = None  # on the first rank
    throughput: Throughput | None = None
    without_score: str = "count as 0"  # message: the treatment of responses without a score
    profiler: StepProfiler | None = None
    mark: Callable[[str], AbstractContextManager[None]] | None = None  # names the phase in the device's profiler
    heard: list[str] = field(default_factory=list)  # warnings on this rank that the first rank has not shown yet
    # Moves the episode data from the rollout records to a separate file next to the rollouts file.
    episodes: Callable[[Path, list[dict[str, Any]]], None] | None = None
    samples_every: int = 0  # interval in steps between responses in the display; 0: none
    # Receives every step's rollouts on the first rank. All ranks must set it, or none: see ``listen``.
    on_rollouts: Callable[[int, Sequence[Mapping[str, Any]]], None] | None = None
    on_save: Callable[[int, Path], None] | None = None  # receives the step and directory of a complete checkpoint
    phase_name: str = ""  # the most recently started phase
    _tokens: float = 0.0  # tokens trained on before the current step

    def listen(self, listener: Callable[[int, Sequence[Mapping[str, Any]]], None] | None) -> None:
        """Pass every step's rollouts, gathered from all ranks, to the first rank's ``listener``. Collective."""
        self.on_rollouts = (
            (listener or (lambda step, records: None)) if broadcast_json(listener is not None, 0) else None
        )

    def note(self, text: str) -> None:
        """Show a line that is not a metric."""
        if self.console is not None:
            self.console.note(text)

    def acknowledge(self, text: str) -> None:
        """Show immediately that a signal has arrived. The signal handler calls this method."""
        if self.console is not None:
            self.console.acknowledge(text)

    def begin_step(self, step: int) -> None:
        """Start profiling if ``step`` is a profiled step. Collective."""
        if self.profiler is not None:
            self.profiler.begin(step)

    @contextmanager
    def phase(self, name: str, *, of_step: bool = True) -> Iterator[None]:
        """Time and show a phase. The start of a phase counts as progress for the watchdog, on every rank.

        ``of_step``: also include the phase in the step's ``memory/*`` metrics. Work after a step is excluded, because a resumed
        run does not repeat it.
        """
        self.phase_name = name
        if self.watchdog is not None:
            self.watchdog.progress(name)
        if self.console is not None:
            self.console.phase(name)
        with ExitStack() as stack:
            if self.mark is not None:
                stack.enter_context(self.mark(name))
            if self.profiler is not None:
                stack.enter_context(self.profiler.range(name))
            stack.enter_context(self.timers(name))
            if self.memory is not None and of_step:
                stack.enter_context(self.memory.phase(name))
            yield

    def beat(self) -> None:
        """Report progress within a phase to the watchdog."""
        if self.watchdog is not None:
            self.watchdog.beat()

    def progress(self, text: str) -> None:
        """Show the progress of the current phase."""
        if self.console is not None:
            self.console.progress(text)

    def rollouts(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Show the number of responses without a score, and write the step's rollouts if due. Collective."""
        self._note_failures(step, [each.score for each in rollouts])
        if self.console is not None and rollouts and self.samples_every and (step - 1) % self.samples_every == 0:
            shown = rollouts[step % len(rollouts)]
            trajectory = shown.trajectory
            self.console.sample(step, trajectory.prompt.text, trajectory.response_text, shown.score.value)
        is_due = self.rollouts_every > 0 and step % self.rollouts_every == 0
        if not is_due and self.on_rollouts is None:
            return
        mine = [rollout_record(each.trajectory, each.score, step) for each in rollouts]
        if is_due and self.episodes is not None:
            mine = [{**record, "episode": each.trajectory.record} for record, each in zip(mine, rollouts, strict=True)]
        gathered = gather_json(mine)
        if self.directory is not None:
            records = [record for part in gathered for record in part]
            records.sort(key=lambda record: (record["prompt_id"], record["sample"]))
            if is_due:
                path = self.directory.rollouts_path(step)
                if self.episodes is not None:
                    self.episodes(path, records)
                write_rollouts(path, records)
            if self.on_rollouts is not None:
                self.on_rollouts(step, records)

    def _note_failures(self, step: int, scores: Sequence[Score]) -> None:
        """Show one line for all ranks, with the first cause from the lowest rank that reports one."""
        causes = [score.cause or score.failure for score in scores if score.failure is not None]
        parts = gather_json([len(scores), len(causes), causes[:1]])
        if first := [part[2][0] for part in parts if part[2]]:
            without, total = sum(part[1] for part in parts), sum(part[0] for part in parts)
            self.note(
                f"step {step}: {without} of {total} responses got no score and {self.without_score}; the first: {first[0]}"
            )

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Restore the history of a resumed run from its recorded metrics. A null value replaces a number that was not finite."""
        for record in records:
            metrics = {name: value for name, value in record.items() if _finite(value) is not None}
            self._remember(record["step"], metrics)
            list(self._alarms(metrics))
            if self.bell is not None:
                self.bell.recall(metrics | {name: math.nan for name, value in record.items() if value is None})

    def _remember(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._remember_evaluation(step, metrics)
        loss = next((metrics[name] for name in LOSSES if name in metrics), None)
        if "reward/mean" in metrics:
            was_zero = self.all_zero or not self.rewards
            self.all_zero = was_zero and metrics.get("reward/share_zero") == 1
            self.rewards.append(metrics["reward/mean"])
        elif loss is not None:
            self.losses.append(loss)
        self._tokens = metrics.get("progress/tokens", self._tokens)
        values = {"time": metrics.get(CLOCK), "loss": loss, "reward": metrics.get("reward/mean")}
        if step:
            self.recent.append({"step": step} | {name: _finite(value) for name, value in values.items()})

    def _remember_evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        evaluation = {name: value for name, value in metrics.items() if name.startswith("evaluate/")}
        if evaluation:
            self.evaluations[step] = evaluation

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show a step's metrics and the time of each phase. Collective.

        ``timing/unix_time``: end of the step, in seconds since the epoch. ``timing/tokens_per_s``: trained response tokens of all
        ranks per second of the step. This time excludes evaluation and saving. ``throughput/*``: see :class:`Throughput`.
        """
        if self.profiler is not None:
            self.profiler.end()
        self._show_heard()
        timing = self.timers.pop()
        timing["timing/step_s"] = sum(timing.values())
        made_in = timing["timing/step_s"] - seconds_beside(timing)
        if "progress/tokens" in metrics and made_in > 0:
            timing[SPEED] = (metrics["progress/tokens"] - self._tokens) / made_in
        if self.throughput is not None:
            timing |= self.throughput.pop(timing)
        timing[CLOCK] = self.wall_clock()
        everything = {**metrics, **timing, **(self.memory.pop() if self.memory is not None else {})}
        self._remember(step, everything)
        if self.tracker is not None:
            self.tracker.log(step, everything)
        if self.console is not None:
            self.console.step(step, everything)
        for line in self._alarms(everything):
            self.note(f"step {step}: {line}")
        if self.bell is not None:
            self.bell.check(step, everything)

    def _show_heard(self) -> None:
        """Show the warnings of other ranks."""
        texts_here, self.heard[:] = self.heard[:MAX_WARNINGS], []
        for rank, texts in enumerate(gather_json(texts_here)):
            for text in texts:
                if self.console is not None:
                    self.console.warning(rank, text)

    def _alarms(self, metrics: Mapping[str, float]) -> Iterable[str]:
        return self.alarm.lines(metrics) if self.alarm is not None else ()

    def close_profile(self) -> None:
        """End the profile at the end of the run, even before all steps of its window are profiled. Collective."""
        if self.profiler is not None:
            self.profiler.end(is_last=True)

    def final(self, last_step: int, step: int, metrics: Mapping[str, float]) -> None:
        """Log the evaluation of the run's final model as ``final/*`` of the last step. This model comes from an earlier ``step``."""
        self.timers.pop()
        self._remember_evaluation(last_step, metrics)
        renamed = {name.replace("evaluate/", "final/", 1): value for name, value in metrics.items()}
        if self.tracker is not None:
            self.tracker.log(last_step, {"final/step": step, **renamed})
        shown = ", ".join(f"{name.removeprefix('final/')} {value:.4g}" for name, value in renamed.items())
        self.note(f"the run ends with the model of checkpoint-{step}, the best one{': ' + shown if shown else ''}")


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Writes ``rollouts/tokens-<step>.jsonl`` for the first ``num_responses`` rows of every ``every``-th step.

    ``decode`` converts each token list to its own text. ``directory`` is set on the first rank only.
    """

    num_responses: int
    every: int
    decode: Callable[[list[list[int]]], list[str]]
    directory: RunDirectory | None

    def write(self, step: int, batch: TrainBatch) -> None:
        """Write the record of a batch, which must contain advantages and old logprobs. Collective over the world."""
        if not self.every or step % self.every:
            return
        gathered = gather_json(list(self._records(batch)))
        if self.directory is not None:
            records = sorted((record for part in gathered for record in part), key=lambda record: record["row"])
            path = self.directory.rollouts_path(step)
            write_rollouts(path.with_name(path.name.replace("step-", "tokens-")), records)

    def _records(self, batch: TrainBatch) -> Iterator[dict[str, Any]]:
        """Yield the records of the rows that this rank owns."""
        assert batch.old_logprobs is not None and batch.advantages is not None and batch.prompts is not None
        groups, stop = batch.group_ids.tolist(), 0
        for row, length in zip(batch.rows.tolist(), batch.lengths[batch.rows].tolist(), strict=True):
            start, stop = stop, stop + length
            if row >= self.num_responses:
                return
            kept = batch.loss_mask[start:stop]
            ids = batch.token_ids[start:stop][kept].tolist()
            difference = (batch.old_logprobs[start:stop] - batch.rollout_logprobs[start:stop])[kept]
            yield {
                "row": row,
                "prompt_id": batch.prompts[groups[row]].prompt_id,
                "sample": row - groups.index(groups[row]),
                "tokens": self.decode([[token] for token in ids]),
                "advantages": _short(batch.advantages[start:stop][kept].tolist()),
                "logprob_differences": _short(difference.tolist()),
            }


def _finite(value: Any) -> float | None:
    """Return a finite number unchanged, and None for any other value, because JSON cannot represent it."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]
