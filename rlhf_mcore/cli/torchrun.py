"""torchrun, with the exit code of the worker that failed first instead of 1, and no traceback for a user's mistake."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_mcore.cli.exit_codes import USER_ERROR, of_process

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """Run torchrun with ``argv``. Returns 0, the exit code of the first worker that failed, or 128 + N after signal N."""
    _end_with_parent()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(list(argv)))
    except SignalException as ended:  # the workers have been ended with the same signal
        return of_process(-ended.sigval)
    except ChildFailedError as error:
        return _report(error)
    return 0


def _report(error: ChildFailedError) -> int:
    rank, failure = error.get_first_failure()
    if failure.exitcode != USER_ERROR:
        print(error, file=sys.stderr, flush=True)
    elif 0 not in error.failures or not error.failures[0].error_file_data.get(
        "timestamp"
    ):  # or rank 0 has printed its own
        print(f"error on rank {rank}: {failure.message}", file=sys.stderr, flush=True)
    return of_process(failure.exitcode)


def _end_with_parent() -> None:
    """Be told when the process that started us is killed, so that no worker goes on writing into the run directory."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
