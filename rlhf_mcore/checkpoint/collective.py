"""Commit checkpoints of all ranks: every rank writes its files, and the first rank names and seals the checkpoint.

No rank waits for a failed rank. After each part the ranks exchange their errors, and an error on any rank is
raised on all ranks.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from rlhf_mcore.checkpoint.commit import Permissions, prepare, publish, seal, seal_files
from rlhf_mcore.checkpoint.disk import TRANSIENT, Disk, SaveError
from rlhf_mcore.checkpoint.housekeeping import remove_partials
from rlhf_mcore.checkpoint.manifest import DELTA, Base, CheckpointInfo
from rlhf_mcore.checkpoint.triggers import Decision, SignalRequests, Triggers
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.files import FULL
from rlhf_mcore.parallel.collectives import broadcast_json, gather_failures, gather_json, reduce_sums

Entries = Mapping[str, Mapping[str, Any]]
ATTEMPTS = 3
UNTOUCHED = " Earlier checkpoints are untouched."


class DeltaHook(Protocol):
    """Write delta saves: the plug-in ``deltas``, or another plug-in of the group ``rlhf_mcore.checkpoint_hooks``."""

    def choose_base(self, run: Path, full_every: int) -> Base | None:
        """Return the full checkpoint that the next save is a difference to, or None if a full save is due.

        First rank only.
        """
        ...

    def encode(self, directory: Path, paths: Iterable[str | Path], base: Path) -> list[Path]:
        """Replace this rank's weight files by differences to ``base``, and return the paths of all its files.

        This call is local.
        """
        ...


class CheckpointWriter:
    """Commit checkpoints to a run directory that all ranks share. All ranks must build and call it.

    Args:
        run: the run directory, locked and recovered.
        disk: performs the changes of files.
        attempts: maximum number of attempts per save if the storage of any rank fails temporarily.
        deltas: writes delta saves; None: every save is full.
        full_every: with ``deltas``, the interval in saves between full saves.
        permissions: modes of the written files.
    """

    def __init__(
        self,
        run: Path,
        disk: Disk | None = None,
        attempts: int = ATTEMPTS,
        deltas: DeltaHook | None = None,
        full_every: int = 1,
        permissions: Permissions | None = None,
    ):
        self.run = run
        self._disk = disk or Disk()
        self._attempts = attempts
        self._deltas, self._full_every = deltas, full_every
        self.permissions = permissions or Permissions()
        # Size of the current save, summed over the ranks.
        self._num_bytes = 0

    def next_info(self, step: int, metrics: Mapping[str, float]) -> CheckpointInfo:
        """Return the manifest entries of the next save: its kind (full or delta), and a delta's base.

        This is a collective call.
        """
        if self._deltas is None:
            return CheckpointInfo(step, metrics=metrics)
        chosen = self._deltas.choose_base(self.run, self._full_every) if _is_first() else None
        answer = broadcast_json(asdict(chosen) if chosen else None, 0)
        return CheckpointInfo(step, DELTA, Base(**answer), metrics) if answer else CheckpointInfo(step, metrics=metrics)

    def save(self, info: CheckpointInfo, write: Callable[[Path], Iterable[str | Path]], num_bytes: int = 0) -> Path:
        """Write and commit the checkpoint of ``info.step``, and return its directory. This is a collective call.

        ``write(directory)`` writes this rank's files and returns their paths. It is called again after a transient
        error. If it is collective, it must complete on every rank even if this rank's files fail, and raise the
        error afterwards. ``num_bytes`` is as in ``begin``.

        Raises:
            SaveError: on every rank, if any rank failed. Earlier checkpoints are unchanged.
        """
        for attempt in range(1, self._attempts + 1):
            partial = self.begin(info.step, num_bytes)
            entries, error = self.attempt(partial, write, info.base)
            try:
                return self.finish(info, partial, entries, error)
            except TransientSaveError:
                if attempt == self._attempts:
                    raise
        raise AssertionError("attempts is at least 1")

    def begin(self, step: int, num_bytes: int = 0) -> Path:
        """Make the directory for a step's files. This is a collective call.

        Args:
            step: the step to save.
            num_bytes: number of bytes that this rank will write.

        Raises:
            SaveError: on every rank, if the files of all ranks do not fit on the disk, or no directory can be
                made.
        """
        self._num_bytes = int(reduce_sums({"num_bytes": float(num_bytes)})["num_bytes"])
        token = broadcast_json(secrets.token_hex(4) if dist.get_rank() == 0 else None, 0)
        partial: Path | None = None

        def make() -> None:
            nonlocal partial
            self._make_room()
            partial = prepare(self.run, step, token, self._disk)
            self.permissions.begin(partial)

        error = _catch(make) if _is_first() else None
        try:
            _agree(step, error)
        except SaveError as failure:
            raise self._give_up(failure, partial) from failure
        return Path(broadcast_json(str(partial) if _is_first() else None, 0))

    def _make_room(self) -> None:
        """Remove the files of failed saves if the disk has not enough space otherwise.

        Raises:
            OSError: the space does not suffice even then.
        """
        if self._fits():
            return
        remove_partials(self.run, self._disk)
        if not self._fits():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _fits(self) -> bool:
        free = self._disk.free_bytes(self.run)
        return free is None or self._num_bytes <= free

    def _give_up(self, failure: SaveError, partial: Path | None) -> SaveError:
        """Remove the written files and return ``failure``.

        If the disk is full, add required and free bytes. This is a collective call.
        """
        room = ""
        if _is_first():
            if partial is not None:
                # On a full disk these files block all other writes. The next run removes files that cannot be
                # removed now.
                _catch(lambda: self._disk.remove_tree(partial))
            free = self._disk.free_bytes(self.run) if isinstance(failure, DiskFullError) else None
            if free is not None and self._num_bytes:
                room = f" {self.run} needs {self._num_bytes:,} bytes for it, {free:,} bytes are free."
        room = broadcast_json(room, 0)
        return type(failure)(str(failure).removesuffix(UNTOUCHED) + room + UNTOUCHED)

    def attempt(
        self, partial: Path, write: Callable[[Path], Iterable[str | Path]], base: Base | None = None
    ) -> tuple[dict[str, dict[str, Any]], Exception | None]:
        """Write, fsync and hash this rank's files. Return their entries and the error, if any. Never raise.

        The call is local if ``write`` is local, so it may run in the background. With a ``base``, weights are
        stored as differences to it.
        """
        try:
            paths = write(partial)
            if base is not None:
                assert self._deltas is not None, "next_info names a base only with deltas"
                paths = self._deltas.encode(partial, paths, self.run / base.name)
            self.permissions.grant(partial, paths := [partial / path for path in paths])
            return seal_files(partial, paths, self._disk), None
        except Exception as error:
            return {}, error

    def finish(self, info: CheckpointInfo, partial: Path, entries: Entries, error: Exception | None = None) -> Path:
        """Commit the files of all ranks, or raise any rank's errors on all ranks. This is a collective call.

        Raises:
            SaveError: on every rank; the partial directory is removed.
        """
        try:
            _agree(info.step, error)
            files = _merge(gather_json(entries))
            _agree(info.step, _catch(lambda: self._commit(info, partial, files)) if _is_first() else None)
        except SaveError as failure:
            raise self._give_up(failure, partial) from failure
        return self.run / f"checkpoint-{info.step}"

    def _commit(self, info: CheckpointInfo, partial: Path, files: Entries) -> None:
        seal(partial, files, info, self._disk)
        self.permissions.finish(partial)
        publish(self.run, info.step, partial, self._disk)


def decide_together(
    triggers: Triggers | None, requests: SignalRequests, step: int, metrics: Mapping[str, float]
) -> Decision:
    """Decide for all ranks what to do after a step. A signal counts on any rank. This is a collective call.

    Args:
        triggers: on the first rank; None on the others.
        requests: requests of this process. Its request to save is consumed.
        step: the step that was just finished.
        metrics: evaluation metrics at this step, or empty.

    Raises:
        ConfigError: on every rank, see ``Triggers.decide``.
    """
    asked = reduce_sums({"save_max": float(requests.take_save()), "stop_max": float(requests.stop_requested)})
    answer: dict[str, Any] = {}
    if triggers is not None:
        try:
            answer = triggers.decide(
                step, metrics, save_requested=asked["save_max"] > 0, stop_requested=asked["stop_max"] > 0
            ).to_json()
        except ConfigError as error:
            answer = {"error": str(error)}
    answer = broadcast_json(answer, 0)
    if "error" in answer:
        raise ConfigError(answer["error"])
    return Decision.from_json(answer)


class TransientSaveError(SaveError):
    """A save failed on storage that may recover soon."""


class DiskFullError(SaveError):
    """A save failed because the disk or a quota is full."""


def _is_first() -> bool:
    return dist.get_rank() == 0


def _catch(action: Callable[[], object]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def _merge(parts: list[Entries]) -> dict[str, Mapping[str, Any]]:
    merged: dict[str, Mapping[str, Any]] = {}
    for part in parts:
        assert not merged.keys() & part.keys(), f"two ranks wrote {sorted(merged.keys() & part.keys())}"
        merged.update(part)
    return merged


def _agree(step: int, error: Exception | None) -> None:
    """Raise an error on every rank if any rank has an error."""
    failures = gather_failures(error)
    if failures:
        kind = SaveError
        if all(failure.errno in TRANSIENT for failure in failures):
            kind = TransientSaveError
        elif any(failure.errno in FULL for failure in failures):
            kind = DiskFullError
        text = "; ".join(str(failure) for failure in failures)
        raise kind(f"checkpoint-{step} was not saved: {text}.{UNTOUCHED}") from error
