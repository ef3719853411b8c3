"""Write metrics: a line of JSON, and trackers, which can neither stop a run nor delay it. All are ``protocols.Tracker``."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import TRACKERS
from rlhf_mcore.config.keys import leaves
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.run import wanted_trackers
from rlhf_mcore.config.show import redact
from rlhf_mcore.observability.files import cut_unfinished_line, full_disk_named, json_line
from rlhf_mcore.observability.run_directory import OTHER_TRACKERS, RunDirectory
from rlhf_mcore.own_files import open_own, own_directory

if TYPE_CHECKING:
    from rlhf_mcore.protocols import Tracker


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """Hold what a tracker knows of its run.

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


def build_trackers(cfg: Config, run: RunDirectory, last_step: int | None, warn: Callable[[str], None]) -> MultiTracker:
    """``metrics.jsonl``, and the trackers that are wanted, each in a thread of its own. ``warn`` tells that one of them has failed."""
    names = wanted_trackers(cfg.logging)
    trackers: list[Tracker] = [JsonlTracker(run.metrics_path)]
    if names:
        trackers += _begin_trackers(names, cfg, run, last_step, warn)
    return MultiTracker(trackers)


def _begin_trackers(
    names: Sequence[str], cfg: Config, run: RunDirectory, last_step: int | None, warn: Callable[[str], None]
) -> Iterator[Tracker]:
    from rlhf_mcore.observability.background_tracker import BackgroundTracker

    config = {
        key: value if isinstance(value, bool | int | float) else str(value)
        for key, value in leaves(redact(asdict(cfg)))
    }
    run_id = run.tracker_run_id()
    for name in names:
        folder = run.path if name in TRACKERS else own_directory(run.path / OTHER_TRACKERS)
        tracked = TrackedRun(folder / name, last_step, run_id, cfg.project, cfg.experiment, config, cfg.logging.offline)
        yield BackgroundTracker(name, tracked, warn)


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
