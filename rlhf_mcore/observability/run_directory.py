"""The directory that holds everything a run leaves behind."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import weakref
from itertools import count
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.files import write_atomically


class RunDirectory:
    """``<output_dir>/<project>/<experiment>``, held by one run at a time.

    The lock is the kernel's (flock): it goes with the process, however that ends. Only one rank of a job may create it.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        _drop_in_forked_children(self)

    @classmethod
    def create(cls, output_dir: str, project: str, experiment: str) -> RunDirectory:
        """Make the directory, or take up the existing one, and lock it.

        Raises:
            ConfigError: a name leads out of ``output_dir``, the directory is not writable, or another run holds it.
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
            tempfile.TemporaryFile(dir=path).close()
            lock = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"output_dir={output_dir!r}: cannot write to {path} ({error.strerror}); choose another"
            ) from error
        _take_lock(lock, path)
        return cls(path, lock)

    @property
    def metrics_path(self) -> Path:
        """``metrics.jsonl``, one object per step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        """Where tensorboard's event files go."""
        return self.path / "tensorboard"

    def rollouts_path(self, step: int) -> Path:
        """``rollouts/step-000001.jsonl``; its folder is made."""
        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        return folder / f"step-{step:06d}.jsonl"

    def write_config(self, yaml_text: str) -> None:
        """Write ``config.yaml``, whole or not at all."""
        write_atomically(self.path / "config.yaml", yaml_text.encode("utf-8"))

    def set_aside_metrics(self) -> Path | None:
        """Move the metrics of an earlier run out of the way, to ``metrics.<n>.jsonl``; returns where they went."""
        if not self.metrics_path.exists():
            return None
        number = next(n for n in count(1) if not (self.path / f"metrics.{n}.jsonl").exists())
        return self.metrics_path.rename(self.path / f"metrics.{number}.jsonl")

    def close(self) -> None:
        """Let go of the lock. A second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _take_lock(lock: int, path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 200, 0).decode("utf-8", "replace").strip() or "an unknown process"
        os.close(lock)
        raise ConfigError(
            f"{path} is in use by another run ({holder}); wait for it to end, or change experiment or output_dir"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _drop_in_forked_children(directory: RunDirectory) -> None:
    """A forked child shares the lock, and one that outlives a killed run would keep the next run out."""
    reference = weakref.ref(directory)

    def drop() -> None:
        held = reference()
        if held is not None:
            held.close()

    os.register_at_fork(after_in_child=drop)
