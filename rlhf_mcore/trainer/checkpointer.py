"""Save checkpoints of a run when a save is due, in the foreground or in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import torch.distributed as dist
from rich.filesize import decimal

from rlhf_mcore.checkpoint.collective import CheckpointWriter, Entries, TransientSaveError, decide_together
from rlhf_mcore.checkpoint.disk import SaveError
from rlhf_mcore.checkpoint.manifest import CheckpointInfo
from rlhf_mcore.checkpoint.triggers import END, MEASURE, MINUTES, REASONS, REQUEST, Decision, SignalRequests, Triggers
from rlhf_mcore.parallel.collectives import all_gather_json, reduce_sums
from rlhf_mcore.trainer.divergence import refuse_not_finite

if TYPE_CHECKING:
    from rlhf_mcore.roles.role_files import RoleFiles

Write = Callable[[Path], list[Path]]
SmallFiles = Mapping[str, bytes]  # content by file name on the first rank; empty on other ranks


@dataclass(slots=True)
class RunCheckpointer:
    """Saves after each step for which a save is due, and decides when the run stops.

    With ``in_background``, a save copies the data and returns; a thread writes the copy. The commit is collective, so it runs
    after a later step. At most one save is in flight. The next save waits for it, so a copy never changes during the write.
    """

    writer: CheckpointWriter
    parts: Sequence[RoleFiles]
    small_files: Callable[[int], SmallFiles]  # collective
    triggers: Triggers | None  # on the first rank
    requests: SignalRequests
    after_commit: Callable[[int], None]  # receives the step, on the first rank
    note: Callable[[str], None]
    in_background: bool = False
    stop_on_failure: bool = True
    at_end: Callable[[], None] = lambda: None  # called after the last commit of a completed run, on the first rank
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()  # times and shows a phase
    progress: Callable[[str], None] = lambda text: None  # shows the progress within a phase
    load_best: Callable[[], int | None] = lambda: None  # see ``end``; collective
    room: Callable[[], AbstractContextManager[None]] = nullcontext  # frees device memory for the save; collective
    _flush: _Flush | None = field(default=None, init=False)

    def begin(self) -> None:
        """Start counting time and steps. Call it when the first step begins."""
        self.requests.begin()
        if self.triggers is not None:
            self.triggers.begin()

    def after_step(self, step: int, evaluation: Mapping[str, float]) -> bool:
        """Save if a save is due. Returns whether the run must stop now. Collective over the world.

        ``evaluation``: metrics of the evaluation after the step; empty if there was no evaluation.

        Raises:
            SaveError: on every rank, if a save failed on any rank and ``stop_on_failure`` is set or the run ends.
        """
        decision = decide_together(self.triggers, self.requests, step, evaluation)
        if self._flush is not None:
            done = reduce_sums({"ranks": float(self._flush.is_done())})
            if done["ranks"] == dist.get_world_size():
                self.drain()
        # The save in flight already serves these triggers: they stay due until a checkpoint exists.
        is_served = self._flush is not None and set(decision.reasons) <= {MINUTES, MEASURE, REQUEST}
        if decision.save and not is_served:
            self.save(step, evaluation, decision)
        if decision.stop:
            self.drain()
        return decision.stop

    def save(self, step: int, evaluation: Mapping[str, float], decision: Decision) -> None:
        """Save now. Collective over the world.

        Raises:
            DivergedError: on every rank, if a model is not finite on any rank, regardless of ``stop_on_failure``.
        """
        self.drain()
        with self.phase("save"), self.room():
            self._save(step, evaluation, decision)

    def _save(self, step: int, evaluation: Mapping[str, float], decision: Decision) -> None:
        self._refuse_not_finite(step)
        started = time.monotonic()
        # Other tools use the final ``latest`` and ``best`` checkpoints, so these are saved in full.
        whole = END in decision.reasons or decision.best
        info = CheckpointInfo(step, metrics=evaluation) if whole else self.writer.next_info(step, evaluation)
        try:
            if self.in_background:
                self._start(info, decision)
            else:
                small_files = self.small_files(step)
                self.writer.save(info, partial(self._write, small_files), self._num_bytes(small_files))
                self._report_commit(step, time.monotonic() - started, decision)
        except SaveError as error:
            self._report_failure(error, decision)

    def save_to(self, directory: Path, step: int) -> Path:
        """Save ``<directory>/checkpoint-<step>`` regardless of the triggers, and return its path. Collective over the world.

        Raises:
            SaveError: on every rank, if the save failed on any rank.
            DivergedError: on every rank, if a model is not finite on any rank.
        """
        self.drain()
        with self.room():
            self._refuse_not_finite(step)
            small_files = self.small_files(step)
            write = partial(self._write, small_files)
            return CheckpointWriter(directory, permissions=self.writer.permissions).save(
                CheckpointInfo(step), write, self._num_bytes(small_files)
            )

    def drain(self) -> None:
        """Wait for the save in flight, if any, and commit it. Collective over the world."""
        if self._flush is None:
            return
        flush, self._flush = self._flush, None
        with self.phase("save"):
            self._finish(flush)

    def _finish(self, flush: _Flush) -> None:
        entries, error = flush.wait()
        try:
            try:
                self.writer.finish(flush.info, flush.directory, entries, error)
            except TransientSaveError:
                self.writer.save(flush.info, flush.write, flush.num_bytes)  # the copy is still there
            self._report_commit(flush.info.step, flush.seconds, flush.decision)
        except SaveError as failure:
            self._report_failure(failure, flush.decision)

    def end(self) -> int | None:
        """Finish the save in flight after the last step. Collective over the world.

        Returns the step of the checkpoint that was loaded into the run's models; None if the models keep their weights.
        """
        self.drain()
        if self.triggers is not None:
            self.at_end()
        return self.load_best()

    def _refuse_not_finite(self, step: int) -> None:
        mine = [part.name for part in self.parts if not part.is_finite()]
        everyones = [name for names in all_gather_json(mine) for name in names]
        refuse_not_finite(everyones, f"checkpoint-{step} is not written")

    def _start(self, info: CheckpointInfo, decision: Decision) -> None:
        small_files = self.small_files(info.step)
        directory = self.writer.begin(info.step, num_bytes := self._num_bytes(small_files))
        writes = []
        for part in self.parts:
            self.progress(f"copy of {part.name}, {decimal(part.num_bytes())} of this rank")
            writes.append(part.snapshot())
        write = partial(_write_copies, writes, small_files)
        self._flush = _Flush(info, decision, directory, write, num_bytes, self.writer)

    def _num_bytes(self, small_files: SmallFiles) -> int:
        """Return the number of bytes that this rank writes."""
        return sum(part.num_bytes() for part in self.parts) + sum(map(len, small_files.values()))

    def _write(self, small_files: SmallFiles, directory: Path) -> list[Path]:
        """Write every part, even after an error in one of them, because the writes are collective."""
        paths, first_error = [], None
        for part in self.parts:
            self.progress(f"{part.name}, {decimal(part.num_bytes())} of this rank")
            try:
                paths += part.write(directory)
            except OSError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        return paths + _write_small_files(directory, small_files)

    def _report_commit(self, step: int, seconds: float, decision: Decision) -> None:
        if self.triggers is None:
            return
        self.triggers.record_save(step, seconds)
        self.note(f"saved checkpoint-{step} ({', '.join(REASONS[reason] for reason in decision.reasons)})")
        self.after_commit(step)

    def _report_failure(self, error: SaveError, decision: Decision) -> None:
        # If the run ends now, no later save can replace this one.
        if self.stop_on_failure or decision.stop or END in decision.reasons:
            raise error
        if self.triggers is not None:
            self.triggers.not_saved(decision)
        self.note(str(error))


class _Flush:
    """A save that a thread is writing."""

    def __init__(
        self,
        info: CheckpointInfo,
        decision: Decision,
        directory: Path,
        write: Write,
        num_bytes: int,
        writer: CheckpointWriter,
    ):
        self.info, self.decision, self.directory = info, decision, directory
        self.write, self.num_bytes = write, num_bytes
        self.seconds = 0.0
        self._outcome: tuple[Entries, Exception | None] = {}, RuntimeError("the thread that writes has died")
        self._thread = Thread(target=self._run, args=(writer,), name=f"save-{info.step}", daemon=True)
        self._thread.start()

    def _run(self, writer: CheckpointWriter) -> None:
        started = time.monotonic()
        self._outcome = writer.attempt(self.directory, self.write, self.info.base)
        self.seconds = time.monotonic() - started

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> tuple[Entries, Exception | None]:
        self._thread.join()
        return self._outcome


def _write_copies(writes: Sequence[Write], small_files: SmallFiles, directory: Path) -> list[Path]:
    return [path for write in writes for path in write(directory)] + _write_small_files(directory, small_files)


def _write_small_files(directory: Path, small_files: SmallFiles) -> list[Path]:
    for name, content in small_files.items():
        (directory / name).write_bytes(content)
    return [directory / name for name in small_files]
