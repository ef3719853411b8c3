"""Fork ranks from the supervisor after its imports, because importing takes longer than the first steps of a small run.

Two forked ranks of the quickstart take 33 core-seconds for a run of one step; they take 71 if each rank imports for itself.
Ranks are forked only on a CPU, because a process that has initialised CUDA cannot be forked. They are forked only if the imports
have started no thread, because a fork copies only the thread that forks. In other cases, and if a module defines no ``preload``,
torch starts the ranks as usual.

This module uses private API, which a new version may change: ``elastic.multiprocessing.api.get_subprocess_handler`` and
``SubprocessHandler`` of torch, ``threading._shutdown`` and ``atexit._run_exitfuncs`` of Python.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NoReturn

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from rlhf_mcore.cli import rank

_POLL_S = 0.02
_OF_SUPERVISOR = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the supervisor handles these, a rank does not


def preload(module: str, arguments: Sequence[str]) -> bool:
    """Import the modules that the ranks of ``module`` need. Returns whether the ranks can be forked from this process.

    Errors in the arguments are ignored here, because the ranks report them.
    """
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        return False
    with contextlib.suppress(Exception, SystemExit):
        import_module(module).preload(arguments)
        return len(os.listdir("/proc/self/task")) == threading.active_count()
    return False


def fork_ranks() -> None:
    """Make torch fork ranks from this process from now on."""
    gc.collect()
    gc.freeze()  # a garbage collection would copy the memory that the ranks share
    api.get_subprocess_handler = ForkedRank  # type: ignore[assignment]


class ForkedRank(SubprocessHandler):
    """A forked rank. The module of its command ``python ... -m MODULE ARGUMENT...`` runs in the fork."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        start = args.index("-m") + 1
        module, arguments = import_module(args[start]), args[start + 1 :]
        sys.stdout.flush()
        sys.stderr.flush()
        with _block_signals():
            if pid := os.fork():
                return _Fork(pid)
            try:
                _become_rank(env, (self._stdout, self._stderr))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        _run(module, arguments)


class _Fork:
    """The part of ``subprocess.Popen`` that torch uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code killed the rank and waited for it
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(_POLL_S)
        return code


@contextlib.contextmanager
def _block_signals() -> Iterator[None]:
    """Block signals until both processes have installed their handlers. Signals are delivered after that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_rank(env: Mapping[str, str], streams: tuple[IO[str] | None, IO[str] | None]) -> None:
    """Set session, environment, streams and signal handlers as in a process that torch has started."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for stream, own, number in zip(streams, (sys.stdout, sys.stderr), (1, 2), strict=True):
        if stream is not None:
            os.dup2(stream.fileno(), number)
        own.reconfigure(write_through=True)  # type: ignore[union-attr]
    for number in _OF_SUPERVISOR:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):  # only a readable process name; some sandboxes do not support it
        Path("/proc/self/comm").write_text(f"rank {env['RANK']}", encoding="utf-8")


def _run(module: ModuleType, arguments: Sequence[str]) -> NoReturn:
    """Run the rank and end this process. The fork must not continue with the code of the supervisor."""
    code = 1
    try:
        sys.argv = [str(module.__file__), *arguments]
        code = rank.run(module.main)
    except BaseException:
        traceback.print_exc()
    finally:  # end as Python does, but without destructors, because the objects belong to the parent
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
