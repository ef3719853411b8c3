"""Where metrics go: a line of JSON, tensorboard, or several places at once. All are ``protocols.Tracker``."""

from __future__ import annotations

import errno
import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import registering
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import LoggingConfig
from rlhf_mcore.observability.files import cut_unfinished_line, full_disk_named, json_line, write_atomically
from rlhf_mcore.own_files import open_own

if TYPE_CHECKING:
    from rlhf_mcore.observability.run_directory import RunDirectory
    from rlhf_mcore.protocols import Tracker

# Made with a directory of its own, and the last step of a run that is resumed (None: of a new one).
TrackerFactory = Callable[[Path, "int | None"], "Tracker"]
TRACKERS: dict[str, TrackerFactory] = {}
tracker = registering(
    TRACKERS, [field.name for field in fields(LoggingConfig)]
)  # a decorator: logging.<name> switches it on


def build_trackers(wanted: LoggingConfig, run: RunDirectory, last_step: int | None) -> MultiTracker:
    """``metrics.jsonl``, and every tracker that is switched on, which writes to the directory of its name in the run's."""
    made = [make(run.path / name, last_step) for name, make in TRACKERS.items() if getattr(wanted, name)]
    return MultiTracker([JsonlTracker(run.metrics_path), *made])


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
    """Writes every finite number as a tensorboard scalar under its own name; other values are left out."""

    def __init__(self, directory: Path, last_step: int | None = None) -> None:
        """``last_step``: of a resumed run; what the directory holds of later steps is dropped, for it will be made again."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"logging.tensorboard=true needs the tensorboard package ({error}); set it to false"
            ) from error
        if last_step is not None:
            for path in sorted(directory.glob("*tfevents*")):
                _cut_events(path, last_step)
        self._directory = directory
        self._writer = SummaryWriter(str(directory), flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        with full_disk_named(self._directory):
            for name, value in metrics.items():
                number = value.item() if hasattr(value, "item") else value
                if isinstance(number, int | float) and math.isfinite(number):
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


class MultiTracker:
    """Hands everything to each of several trackers."""

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
