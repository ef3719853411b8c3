"""The directory that contains all files of a run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from rlhf_mcore.config.choices import TRACKERS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import SMALL, read_bytes
from rlhf_mcore.observability.files import json_line, keep_steps, read_lines, write_atomically
from rlhf_mcore.own_files import open_own, own_directory, refuse_link
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.types import Score, Trajectory

METRICS = "metrics.jsonl"
LOCK = "run.lock"
ROLLOUTS = "rollouts"
LOGS = "logs"
PROFILE = "profile"
TRACKED_AS = "tracker_run_id"  # the run's id in trackers, stored in a file for a resume
MAX_METRICS_BYTES = 4 * 2**30  # about a million steps
_REMEDY = "move the file away; the run then starts a new record"
OTHER_TRACKERS = "trackers"  # one subdirectory per tracker of another package
_RECORDS = (ROLLOUTS, *TRACKERS, OTHER_TRACKERS)  # directories that are moved together with the metrics
OWN_DIRECTORIES = (*_RECORDS, LOGS, PROFILE, "archive", "quarantine", "pins")


class DirectoryLock:
    """Locks the directory of ``file`` until it is closed or the process ends, in any way. The file names the holder.

    It uses the kernel's flock. A forked child releases it, because a child that outlives a killed job would otherwise block
    the next job.

    Raises:
        ConfigError: another process holds the lock; ``remedy`` is the alternative to waiting.
        ConfigError: the file is a link.
        OSError: the file cannot be opened.
    """

    def __init__(self, file: Path, remedy: str) -> None:
        self._file = open_own(file, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError):  # for example a file system without locks
                self.close()
                raise
            holder = os.pread(self._file, 200, 0).decode("utf-8", "replace").strip() or "an unknown process"
            self.close()
            raise ConfigError(
                f"{file.parent} is in use by another run ({holder}); wait for it to end, or {remedy}"
            ) from error
        with contextlib.suppress(OSError):  # informational only; a full disk must not stop a run that may free space
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _drop_in_forked_children(self)

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _drop_in_forked_children(lock: DirectoryLock) -> None:
    reference = weakref.ref(lock)

    def drop() -> None:
        directory = reference()
        if directory is not None:
            directory.close()

    os.register_at_fork(after_in_child=drop)


class RunDirectory:
    """``<output_dir>/<project>/<experiment>``, locked by one run at a time.

    Only one rank of a job may create it.
    """

    def __init__(self, path: Path, lock: DirectoryLock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, output_dir: str, project: str, experiment: str) -> RunDirectory:
        """Create the directory, or use the existing one, and lock it.

        Raises:
            ConfigError: a name leads outside ``output_dir``, the directory is not writable, another run holds it, or one of
            the run's
                own entries is a link.
        """
        root = Path(output_dir).resolve()
        path = (root / project / experiment).resolve()
        if not project or not experiment or root not in path.parents:
            raise ConfigError(
                f"project={project!r} and experiment={experiment!r} must name a directory inside "
                f"output_dir={output_dir!r}; use plain names"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            for name in OWN_DIRECTORIES:
                refuse_link(path / name)
            tempfile.TemporaryFile(dir=path).close()
            lock = DirectoryLock(path / LOCK, "change experiment or output_dir")
        except OSError as error:
            raise ConfigError(
                f"output_dir={output_dir!r}: cannot write to {path} ({error.strerror}); choose another"
            ) from error
        return cls(path, lock)

    @property
    def metrics_path(self) -> Path:
        """``metrics.jsonl``, one object per step."""
        return self.path / METRICS

    def rollouts_path(self, step: int) -> Path:
        """``rollouts/step-000001.jsonl``. Its directory is created."""
        folder = self.path / ROLLOUTS
        return own_directory(folder) / f"step-{step:06d}.jsonl"

    def write_config(self, yaml_text: str, mode: int | None = None) -> None:
        """Write ``config.yaml`` atomically. ``mode`` sets its permissions."""
        write_atomically(self.path / "config.yaml", yaml_text.encode("utf-8"), mode)

    def set_aside_metrics(self) -> Path | None:
        """Move the records of an earlier run away: to ``metrics.<n>.jsonl``, ``rollouts.<n>``, ``tensorboard.<n>`` ...

        Return the new path of the metrics, or None if there were none. A start that ended before its first record leaves no
        files.
        """
        (self.path / TRACKED_AS).unlink(missing_ok=True)
        if self.metrics_path.exists() and not self.metrics_path.stat().st_size:
            self.metrics_path.unlink()
            for name in (*TRACKERS, OTHER_TRACKERS):
                shutil.rmtree(self.path / name, ignore_errors=True)
        names = ([f"metrics.{n}.jsonl", *(f"{folder}.{n}" for folder in _RECORDS)] for n in count(1))
        kept = ([self.path / name for name in group] for group in names)
        metrics, *set_aside = next(paths for paths in kept if not any(path.exists() for path in paths))
        for folder, aside in zip(_RECORDS, set_aside, strict=True):
            if (self.path / folder).is_dir():
                (self.path / folder).rename(aside)
        return self.metrics_path.rename(metrics) if self.metrics_path.exists() else None

    def cut_metrics(self, last_step: int) -> None:
        """Drop the records of steps after ``last_step``, which a resumed run repeats, and lines that are not valid records.

        Raises:
            ConfigError: the file is not a regular file with a run's metrics.
        """
        if os.path.lexists(self.metrics_path):
            lines = read_bytes(self.metrics_path, limit=MAX_METRICS_BYTES, remedy=_REMEDY)
            write_atomically(self.metrics_path, keep_steps(lines, last_step))

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the records of ``metrics.jsonl``, each with its step; nothing if the file does not exist.

        Raises:
            ConfigError: a line is not a valid record.
        """
        if os.path.lexists(self.metrics_path):
            for line in read_lines(self.metrics_path, _REMEDY):
                yield {**line.content, "step": line.integer("step")}

    def tracker_run_id(self) -> str:
        """Return the id of this run in trackers. It stays the same after a restart, and changes for a new run."""
        path = self.path / TRACKED_AS
        if os.path.lexists(path):
            text = read_bytes(path, limit=SMALL.num_bytes, remedy="remove it; trackers then start a new run").decode(
                "ascii", "replace"
            )
            if re.fullmatch("[0-9a-f]{32}", text.strip()):
                return text.strip()
        run_id = uuid.uuid4().hex
        write_atomically(path, f"{run_id}\n".encode())
        return run_id

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        self._lock.close()


def write_rollouts(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON line per record, in the given order, atomically."""
    write_atomically(path, b"".join(map(json_line, records)))


@dataclass(frozen=True, slots=True)
class EpisodeFiles:
    """Writes episodes next to rollout files. Rollout files contain no times, so that a repeated run writes the same files.

    ``episodes-<step>.jsonl`` contains all episodes of a step, with turns, calls and times. ``traces-<step>/<number>.json``
    contain the traces of the first ``num_traces`` episodes, built by ``trace_of`` (:func:`episode_files`).
    """

    num_traces: int = 0
    trace_of: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def __call__(self, rollouts: Path, records: list[dict[str, Any]]) -> None:
        """Write the episodes of a step, and remove them from its ``records``. ``rollouts`` is the file for the records."""
        played = [dict(record) for record in records if record["episode"] is not None]
        for record in records:
            del record["episode"]
        if not played:
            return
        lines = [{name: record[name] for name in ("prompt_id", "sample")} | record["episode"] for record in played]
        write_atomically(
            rollouts.with_name(rollouts.name.replace("step-", "episodes-")), b"".join(map(json_line, lines))
        )
        if self.trace_of is not None:
            folder = own_directory(rollouts.with_name(rollouts.stem.replace("step-", "traces-")))
            for number, record in enumerate(played[: self.num_traces]):
                write_atomically(folder / f"{number:04d}.json", json_line(self.trace_of(record)))


def episode_files(num_traces: int) -> EpisodeFiles:
    """Return the writer for the episodes of a run, with ``num_traces`` traces per step.

    Raises:
        ConfigError: traces are requested, but the plug-in is not installed.
    """
    if not num_traces:
        return EpisodeFiles()
    needed_by = f"logging.episode_traces={num_traces}"
    return EpisodeFiles(num_traces, load_plugin("traces", "opentelemetry", needed_by, package="traces"))


def rollout_record(trajectory: Trajectory, score: Score, step: int) -> dict[str, Any]:
    """Return the record of a trajectory. A turn in an environment contains its author, its text and its own reward.

    ``images`` contains digests of the prompt's images. A prompt without images has no such field.
    """
    turns: dict[str, Any] = {}
    if trajectory.sequences:
        turns["branches"] = len(trajectory.sequences)
    if trajectory.score is not None:
        after_prompt = [turn for turn in trajectory.turns if turn.writer != "prompt"]
        turns |= {"turns": [{"writer": t.writer, "text": t.text, "reward": t.reward} for t in after_prompt]}
    return {
        "step": step,
        "prompt_id": trajectory.prompt.prompt_id,
        "sample": trajectory.sample,
        "prompt": trajectory.prompt.text,
        "response": trajectory.response_text,
        "ground_truth": trajectory.prompt.ground_truth,
        "score": score.value,
        "parts": score.parts,
        "failure": score.failure,
        "num_tokens": trajectory.num_sampled,
        "finish_reason": trajectory.finish_reason,
        "policy_version": trajectory.policy_version,
        **({"images": list(trajectory.prompt.images)} if trajectory.prompt.images else {}),
        **turns,
    }
