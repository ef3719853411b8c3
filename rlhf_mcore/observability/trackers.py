"""Where metrics go: a line of JSON, and trackers, which can neither stop a run nor keep it waiting. All are ``protocols.Tracker``."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import TRACKERS as DECLARED
from rlhf_mcore.config.choices import registering
from rlhf_mcore.config.keys import leaves
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.run import wanted_trackers
from rlhf_mcore.config.show import redact, without_secrets
from rlhf_mcore.observability.files import cut_unfinished_line, full_disk_named, json_line, write_atomically
from rlhf_mcore.own_files import open_own

if TYPE_CHECKING:
    from rlhf_mcore.observability.run_directory import RunDirectory
    from rlhf_mcore.protocols import Tracker

MAX_WAITING = 10_000  # steps that a slow tracker may be behind
HANGS_S = 120.0  # a tracker that takes longer for one step hangs
CLOSE_S = 30.0  # that trackers get to bring the last steps away at the end


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker knows of its run.

    ``directory`` is the tracker's own, inside the run's. ``id``: the same after a restart. ``last_step``: of a resumed run, the step
    that it continues after; None: of a new one. ``config``: key with dots -> value, without secrets.
    """

    directory: Path
    last_step: int | None = None
    id: str = "0" * 32
    project: str = "rlhf_mcore"
    experiment: str = "default"
    config: Mapping[str, Any] = field(default_factory=dict)
    offline: bool = False


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {}
tracker = registering(TRACKERS, DECLARED)  # a decorator: @tracker("name") of a class that is made with a TrackedRun


def build_trackers(cfg: Config, run: RunDirectory, last_step: int | None, warn: Callable[[str], None]) -> MultiTracker:
    """``metrics.jsonl``, and the trackers that are wanted, each in a thread of its own. ``warn`` tells that one of them has failed."""
    names = wanted_trackers(cfg.logging)
    config = {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in leaves(redact(asdict(cfg)))
    }
    run_id = run.tracker_run_id() if names else ""
    made = [
        BackgroundTracker(
            name,
            TrackedRun(run.path / name, last_step, run_id, cfg.project, cfg.experiment, config, cfg.logging.offline),
            warn,
        )
        for name in names
    ]
    return MultiTracker([JsonlTracker(run.metrics_path), *made])


class BackgroundTracker:
    """Gives a tracker its metrics in a thread. An exception or a hang of it becomes one warning, and the run continues without it."""

    def __init__(
        self,
        name: str,
        run: TrackedRun,
        warn: Callable[[str], None],
        hangs_s: float = HANGS_S,
        close_s: float = CLOSE_S,
    ) -> None:
        self._name, self._run, self._warn, self._hangs_s, self._close_s = name, run, warn, hangs_s, close_s
        self._waiting: Queue[tuple[int, dict[str, float]] | None] = Queue(MAX_WAITING)
        self._given_up = Event()
        self._given = self._done = 0  # steps
        self._since = time.monotonic()  # the thread has been busy with one thing
        try:  # here, for two threads that import the same packages may find halves of them
            if (declared := DECLARED[name]).package:
                import_module(declared.module or declared.package)
        except Exception as error:
            self._give_up(error)
        self._thread = Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Returns at once. What is no finite number is left out."""
        if self._given_up.is_set():
            return
        now = time.monotonic()
        if self._given == self._done:
            self._since = now
        elif now - self._since > self._hangs_s:
            self._give_up(f"it has not answered for {self._hangs_s:.0f} s")
            return
        try:
            self._waiting.put_nowait((step, _numbers(metrics)))
            self._given += 1
        except Full:
            self._give_up(f"it is {MAX_WAITING:,} steps behind")

    def close(self) -> None:
        """Wait for the last steps to be brought away, but not for long. A second call does nothing."""
        with suppress(Full):
            self._waiting.put_nowait(None)
        end = time.monotonic() + self._close_s
        while self._thread.is_alive() and not self._given_up.is_set() and time.monotonic() < end:
            self._thread.join(0.05)
        if self._thread.is_alive():
            self._give_up(f"it has not finished within {self._close_s:.0f} s")

    def _work(self) -> None:
        try:
            if self._given_up.is_set():
                return
            made = TRACKERS[self._name](self._run)
            while (item := self._waiting.get()) is not None and not self._given_up.is_set():
                made.log(*item)
                self._done, self._since = self._done + 1, time.monotonic()
            made.close()
        except BaseException as error:  # a library's sys.exit is one
            self._give_up(error)

    def _give_up(self, problem: BaseException | str) -> None:
        """Once: the first problem is told, and nothing is given to the tracker any more."""
        if not self._given_up.is_set():
            self._given_up.set()
            first = (str(problem).strip().splitlines() or [""])[0]
            why = without_secrets(first if isinstance(problem, str) else f"{type(problem).__name__}: {first}")[:300]
            self._warn(
                f"warning: the tracker {self._name} gets no more metrics ({why}); the run continues, and metrics.jsonl has them all"
            )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {
        name: float(value) for name, value in plain.items() if isinstance(value, int | float) and math.isfinite(value)
    }


class JsonlTracker:
    """Appends one JSON object per call, "step" first, each in a single write, so that a reader never sees half a line.

    NaN and infinities are written as null (``files.json_line``). A last line that a crash cut short is removed when the
    file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_own(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        cut_unfinished_line(self._file, path)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line.

        Raises:
            FullDiskError: the line does not fit on the disk.
        """
        assert "step" not in metrics, "the step is an argument of its own"
        line = json_line({"step": step, **metrics})
        with full_disk_named(self._path, len(line)):
            if os.write(self._file, line) != len(line):  # the rest is removed when the file is opened again
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@tracker("tensorboard")
class TensorboardTracker:
    """TensorBoard events. What the directory holds of steps after the last one of a resumed run is dropped: it will be made again."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if run.last_step is not None:
            for path in sorted(run.directory.glob("*tfevents*")):
                _cut_events(path, run.last_step)
        self._directory = run.directory
        self._writer = SummaryWriter(str(run.directory), flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with full_disk_named(self._directory):
            for name, number in metrics.items():
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        with full_disk_named(self._directory):
            self._writer.close()


def _cut_events(path: Path, last_step: int) -> None:
    """Drop the events of steps after ``last_step`` from a file, and one that was cut short; a file that then has no numbers goes."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    kept, numbers = io.BytesIO(), 0
    writer = RecordWriter(kept)
    for data in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(data)
        if event.HasField("file_version") or event.step <= last_step:
            writer.write(data)
            numbers += event.HasField("summary")
    if numbers:
        write_atomically(path, kept.getvalue())
    else:
        path.unlink()


@tracker("wandb")
class WandbTracker:
    """Weights & Biases. A resumed run continues the same one; steps that it makes again are there twice, on the axis "step"."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run.directory.mkdir(exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=run.id,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            mode="offline" if run.offline else None,
            # Of its own accord it would send the command line, which may hold a password, source code and git's remotes.
            settings=wandb.Settings(
                silent=True, console="off", x_disable_meta=True, save_code=False, disable_code=True, disable_git=True
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


@tracker("mlflow")
class MlflowTracker:
    """MLflow: the server of MLFLOW_TRACKING_URI, else ``mlflow/mlflow.db`` in the run's directory. A run is found by a tag."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        logging.getLogger("alembic").setLevel(logging.ERROR)  # it reports each table of a new file
        if not (address := os.environ.get("MLFLOW_TRACKING_URI")):
            run.directory.mkdir(exist_ok=True)
            address = f"sqlite:///{run.directory.resolve()}/mlflow.db"
        self._client = MlflowClient(tracking_uri=address)
        experiment = self._client.get_experiment_by_name(run.project)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(run.project)
        if found := self._client.search_runs([place], f"tags.`rlhf_mcore.run` = '{run.id}'"):
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"rlhf_mcore.run": run.id}
            self._id = self._client.create_run(place, run_name=run.experiment, tags=tags).info.run_id
            for key, value in run.config.items():
                self._client.log_param(self._id, re.sub(r"[^\w\-. /]", "_", key), str(value)[:500])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        made = [Metric(re.sub(r"[^\w\-. /]", "_", name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=made)

    def close(self) -> None:
        self._client.set_terminated(self._id)


@tracker("trackio")
class TrackioTracker:
    """Trackio, on this machine (TRACKIO_DIR, else its cache): ``trackio show``."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = f"{run.experiment}-{run.id[:6]}"
        self._run = trackio.init(project=run.project, name=name, resume="allow", config=dict(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


@tracker("comet")
class CometTracker:
    """Comet, or an archive in the run's directory that ``comet upload`` brings there."""

    def __init__(self, run: TrackedRun) -> None:
        import comet_ml

        run.directory.mkdir(exist_ok=True)
        logging.getLogger("comet_ml").setLevel(logging.WARNING)  # its summary would be printed over the display
        # What it would read besides: source code, the command line, what is printed, versions of git.
        names = ["log_code", "log_graph", "parse_args", "log_git_metadata", "log_git_patch"]
        names += ["auto_output_logging", "auto_param_logging", "auto_metric_logging", "auto_log_co2"]
        settings = comet_ml.ExperimentConfig(
            offline_directory=str(run.directory),
            name=run.experiment,
            display_summary_level=0,
            **dict.fromkeys(names, False),
        )
        self._run = comet_ml.start(
            project_name=run.project,
            experiment_key=run.id,
            mode="get_or_create",
            online=not run.offline,
            experiment_config=settings,
        )
        self._run.log_parameters(dict(run.config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._run.end()


@tracker("swanlab")
class SwanlabTracker:
    """SwanLab, or its log in the run's directory that ``swanlab sync`` brings there."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        run.directory.mkdir(exist_ok=True)
        # It asks nobody for a key, and reads neither what is printed nor the command line.
        terminal, probe = swanlab.Settings.Terminal(proxy_type="none"), swanlab.Settings.Probe(runtime=False, git=False)
        self._run = swanlab.init(
            project=run.project,
            name=run.experiment,
            id=run.id[:21],
            resume="allow",
            log_dir=str(run.directory),
            config=dict(run.config),
            mode="offline" if run.offline else "online",
            settings=swanlab.Settings(interactive=False, terminal=terminal, probe=probe),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class MultiTracker:
    """Gives everything to each of several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        """Close all, also when one of them fails to."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)
