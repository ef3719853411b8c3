"""torchrun, with the exit code of the worker that failed first instead of 1, and no traceback for a user's mistake.

Signals that ask a run to save (SIGUSR1, SIGUSR2, SIGTERM) go to the workers, which answer them between steps; others end the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rlhf_mcore.cli.exit_codes import REQUEUE, USER_ERROR, of_process

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

HELD = (signal.SIGUSR1, signal.SIGUSR2)
HANDED_ON = (*HELD, signal.SIGTERM)
LINES = 20  # of a failed rank's log
ENDING = ("SIGINT", "SIGHUP", "SIGQUIT")

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run torchrun with ``argv``. Returns 0, the exit code of the first worker that failed, or 128 + N after signal N."""
    _end_with_parent()
    signal.signal(signal.SIGTERM, _hand_on)
    hand_on_held()
    from rlhf_mcore.cli import bound_rendezvous

    bound_rendezvous.register()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # It reports the end of every worker as an error, the one that was asked for too. Failures are printed here, with their ranks.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    args = parse_args([f"--signals-to-handle={','.join(ENDING)}", *argv])
    try:
        run(args)
    except SignalException as ended:  # the workers have been ended with the same signal
        return of_process(-ended.sigval)
    except ChildFailedError as error:
        return _report(error, args.log_dir)
    return 0


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The worker that failed first, with its rank. Those that torchrun ended because of it (by SIGTERM) are not the cause."""
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM}
    return min((causes or failures).items(), key=lambda item: item[1].timestamp)


def hand_on_held() -> None:
    """Hand SIGUSR1 and SIGUSR2 on to the workers from now on.

    They are blocked here, and a worker inherits that: a signal that comes while it is still starting waits until the
    worker listens, instead of ending it. SIGTERM is not blocked, because torchrun ends workers with it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)

    def wait() -> None:
        while True:
            _hand_on(signal.sigwait(HELD), None)

    threading.Thread(target=wait, daemon=True).start()


def _report(error: ChildFailedError, log_dir: str | None) -> int:
    rank, failure = first_failure(error.failures)
    if failure.exitcode not in (USER_ERROR, REQUEUE):
        print(f"{error}\nrank {rank} failed first: {_how(failure.exitcode)}", file=sys.stderr, flush=True)
        if log_dir:
            print(tail_of_log(Path(log_dir), rank, failure.local_rank), file=sys.stderr, flush=True)
    elif failure.exitcode == USER_ERROR and (
        0 not in error.failures or not error.failures[0].error_file_data.get("timestamp")
    ):  # or rank 0 has printed its own
        print(f"error on rank {rank}: {failure.message}", file=sys.stderr, flush=True)
    return of_process(failure.exitcode)


def _how(exitcode: int) -> str:
    return f"ended by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"


def tail_of_log(logs: Path, rank: int, local_rank: int) -> str:
    """The end of what a rank has written to stderr, with the file's name."""
    found = sorted(logs.glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    if not found:
        return f"rank {rank} has left no log in {logs}"
    lines = found[-1].read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"rank {rank}, the end of {found[-1]}:", *(f"    {line}" for line in lines[-LINES:])])


def _hand_on(number: int, _frame: FrameType | None) -> None:
    for child in children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


def children() -> Iterator[int]:
    """Ids of the processes that this one has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            # pid (name) state parent ...; the name may hold anything
            parent = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                yield int(folder.name)


def _end_with_parent() -> None:
    """Be told when the process that started us is killed, so that no worker goes on writing into the run directory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
