"""Fork ranks from torchrun's process after its imports: importing takes longer than the first steps of a small run.

Two ranks of the quickstart take 33 s of a core for a run of one step, and 71 s if each imports for itself. On a CPU only,
since a process that has touched CUDA cannot be forked; and only if importing has started no thread, since a fork has none but the one
that forks. Otherwise, and if a module has no ``preload``, ranks are started as torchrun starts them.

This uses private API, which a new version may change: of torch ``elastic.multiprocessing.api.get_subprocess_handler`` with
``SubprocessHandler``, of Python ``threading._shutdown`` and ``atexit._run_exitfuncs``.
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
_OF_THE_AGENT = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # which it handles, and a rank does not


def preload(module: str, arguments: Sequence[str]) -> bool:
    """Have ``module`` import what its ranks will. Returns whether they can be forks of this process.

    What is wrong with the arguments is not told here: the ranks tell it.
    """
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
        return False
    with contextlib.suppress(Exception, SystemExit):
        import_module(module).preload(arguments)
        return len(os.listdir("/proc/self/task")) == threading.active_count()
    return False


def fork_ranks() -> None:
    """Make torchrun's ranks forks of this process from now on."""
    gc.collect()
    gc.freeze()  # a collection would copy the memory that ranks share
    api.get_subprocess_handler = ForkedRank  # type: ignore[assignment]


class ForkedRank(SubprocessHandler):
    """A rank for torchrun. Its command is ``python ... -m MODULE ARGUMENT...``, and is not run."""

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
    """As much of a ``subprocess.Popen`` as torchrun uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # it was killed and waited for elsewhere
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
    """Block signals until both processes have their handlers. One that comes meanwhile waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_rank(env: Mapping[str, str], streams: tuple[IO[str] | None, IO[str] | None]) -> None:
    """Take a session, an environment, streams and signals like a process that torchrun has started."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for stream, own, number in zip(streams, (sys.stdout, sys.stderr), (1, 2), strict=True):
        if stream is not None:
            os.dup2(stream.fileno(), number)
        own.reconfigure(write_through=True)  # type: ignore[union-attr]
    for number in _OF_THE_AGENT:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):  # a name for people: there are sandboxes without it
        Path("/proc/self/comm").write_text(f"rank {env['RANK']}", encoding="utf-8")


def _run(module: ModuleType, arguments: Sequence[str]) -> NoReturn:
    """Run the rank, from here to its end. Code that follows in torchrun's process does not follow here."""
    code = 1
    try:
        sys.argv = [str(module.__file__), *arguments]
        code = rank.run(module.main)
    except BaseException:
        traceback.print_exc()
    finally:  # as Python ends a process, without the destructors of what is the parent's
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
