"""The tracker ``tensorboard``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from rlhf_mcore.observability.files import full_disk_named, write_atomically
from rlhf_mcore.observability.trackers import TrackedRun


class TensorboardTracker:
    """TensorBoard events. For a resumed run, events of steps after its last step are dropped, because it repeats these steps."""

    def __init__(self, run: TrackedRun) -> None:
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
    """Drop the events of steps after ``last_step``, and an incomplete event. Delete a file without remaining numbers."""
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
