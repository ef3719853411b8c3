"""Build the sandbox's walls in a separate interpreter, then fork a confined process for every program.

``rlhf_mcore.sandbox.run`` starts it and controls it over a socket. It is the first process of its pid namespace, or else it
adopts orphaned processes, so that no process outlives its program. When its starter ends, it kills all processes and ends
too. It imports the standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlhf_mcore.sandbox import kernel, programs
from rlhf_mcore.sandbox.usage import descendants, is_over, kill_below, make_scratch, remove, tasks_of

SCRATCH = "/scratch"
NOBODY = 65534
MAX_MESSAGE_BYTES = 2**16
STOP = b"stop"
_OLD = "/.old"
_LOOK_MS = 100  # interval between checks of the files that a program has written
_SYSTEM = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/alternatives",
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_FAILED = programs.CHANNEL + 1  # descriptor for the error of a program that could not be confined
# Stack of the main thread. Recursion through C needs more than the usual 8 MiB; 128 MiB of address space are kept free for it.
_STACK_BYTES = 64 * 2**20


@dataclass(slots=True)
class Walls:
    """The walls around a program."""

    isolated: bool  # in new namespaces
    readable: list[str]  # directories that it may read and execute
    sandbox: str  # name of the sandbox
    landlock: int = 0  # version of the Landlock interface; 0: not used
    filter: bytes = b""  # seccomp filter; empty: none
    nobody: bool = False  # the program runs as the user ``nobody``
    keeps: bool = False  # files of a program stay for the next program
    places: list[str] = field(default_factory=list)  # writable directories, located below ``SCRATCH``
    missing: list[str] = field(default_factory=list)  # walls that this machine does not support, with the reason


def main(descriptor: int, options: dict[str, Any]) -> None:
    """Build the walls, report them, and run programs until the socket ``descriptor`` is closed.

    ``options``: "level" to build (rlimits | filters | namespaces), "readable" (directories in addition to the interpreter's),
    "name" (of the sandbox, part of its directory names), "keeps" (files stay; namespaces only), "places" (see ``Walls``). The
    first message back is {"level", "walls", "missing"}, or {"failed": cause}.
    """
    control = socket.socket(fileno=descriptor)
    starter = os.pidfd_open(os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        walls = _build(options, control)
        control.send(json.dumps(_report(walls)).encode())
    except OSError as error:
        control.send(json.dumps({"failed": str(error.strerror or error)}).encode())
        return
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(starter, select.POLLIN)
    while starter not in [ready for ready, _ in poll.poll()]:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 8)
        if not data:
            return
        if data == STOP:  # late, for a program that has already ended
            continue
        try:
            with open(descriptors.pop(), "rb") as file:
                order = json.load(file)
            answer = _run(order, descriptors, walls, control, starter)
        except OSError as error:  # for example no space for a directory; not the program's fault
            answer = {"failed": f"{type(error).__name__}: {error}"}
        finally:
            for each in descriptors:
                with suppress(OSError):
                    os.close(each)
        if answer is None:
            return
        control.send(json.dumps(answer).encode())


def _report(walls: Walls) -> dict[str, Any]:
    names = ["user, mount, pid, network, ipc and uts namespaces"] if walls.isolated else []
    names += [f"Landlock {walls.landlock}"] if walls.landlock else []
    names += ["seccomp"] if walls.filter else []
    level = "namespaces" if walls.isolated else "filters" if walls.landlock and walls.filter else "rlimits"
    return {"level": level, "walls": [*names, "rlimits"], "missing": walls.missing}


def _build(options: dict[str, Any], control: socket.socket) -> Walls:
    """Build the walls. Raise OSError if requested namespaces are not available. Filters that are not available are skipped."""
    readable = sorted(
        {os.path.realpath(path) for path in [sys.base_prefix, sys.base_exec_prefix, *options["readable"]]}
    )
    walls = Walls(options["level"] == "namespaces", [*readable, *filter(os.path.exists, _SYSTEM)], options["name"])
    walls.keeps, walls.places = options["keeps"], options["places"]
    if walls.isolated:
        kernel.enter_namespaces()
        if (child := os.fork()) != 0:
            control.close()
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        kernel.end_with_parent()
        _build_root(readable, walls.places)
    else:
        kernel.adopt_orphans()
    kernel.hide_memory()
    walls.nobody = os.geteuid() == 0 and _can_be_nobody()
    if options["level"] == "rlimits":
        return walls
    walls.landlock = kernel.landlock_version()
    if not walls.landlock:
        walls.missing.append("Landlock: not in this kernel, or not switched on")
    may_signal = walls.isolated or walls.landlock >= 6
    # The kernel does not limit the number of root's processes, so root programs may not fork.
    may_fork = os.geteuid() != 0 or walls.nobody
    try:
        walls.filter = kernel.seccomp_filter(signals=may_signal, forks=may_fork, metadata=walls.isolated)
    except OSError as error:
        walls.missing.append(f"seccomp: {error}")
    return walls


def _build_root(readable: list[str], places: list[str]) -> None:
    """Build an in-memory root directory with the interpreter, system programs and a few devices, all read-only, and ``SCRATCH``.

    ``places`` become links to directories of the same names below ``SCRATCH``.
    """
    kernel.leave_shared_mounts()
    base = "/tmp"
    kernel.mount("tmpfs", base, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "size=1m,mode=0755")
    os.mkdir(base + _OLD)
    kernel.pivot_root(base, base + _OLD)
    os.chdir("/")
    for path in _SYSTEM:
        if os.path.islink(_OLD + path):  # /lib -> usr/lib
            os.symlink(os.readlink(_OLD + path), path)
        elif os.path.exists(_OLD + path):
            _show(path)
    for path in [*readable, *_DEVICES]:
        if not os.path.exists(path):
            _show(path)
    os.makedirs(SCRATCH)
    for path in ("/tmp", "/dev/shm"):
        if not os.path.exists(path):
            os.symlink(SCRATCH, path)
    for path in places:
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(SCRATCH + path, path)
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    kernel.make_read_only("/")


def _show(path: str) -> None:
    if os.path.isdir(_OLD + path):
        os.makedirs(path)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT, 0o644))
    if path in _DEVICES:
        kernel.bind(_OLD + path, path)
    else:
        kernel.bind_read_only(_OLD + path, path, _OLD + "/proc/self/mountinfo")


def _can_be_nobody() -> bool:
    """Return whether the user ``nobody`` exists and may read the interpreter's files."""
    if (child := os.fork()) == 0:
        with suppress(OSError):
            _become_nobody()
            with open(os.__file__, "rb"):
                os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


# --------------------------------------------------------------------------------------------------------- one program
def _run(
    order: dict[str, Any], descriptors: list[int], walls: Walls, control: socket.socket, starter: int
) -> dict[str, Any] | None:
    """Run a program until it ends or is stopped, and kill its remaining processes. Return None if the starter has ended.

    Return {"status", "cpu_s", "is_full": whether it wrote too much}, or {"failed": cause} if it could not be confined.
    """
    size = order["limits"]["scratch_bytes"]
    scratch = _make_scratch(walls, size)
    try:
        passed, failed = os.pipe()
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            _become(order, descriptors, walls, scratch, failed)
        os.close(failed)
        while descriptors:
            os.close(descriptors.pop())
        with open(passed, encoding="utf-8", errors="replace") as pipe:
            problem = pipe.read()  # returns when the program starts
        watched = None if walls.isolated else scratch  # an in-memory file system has its own size limit
        alive = _wait(child, control, starter, watched, size) if not problem else True
        is_full = watched is not None and is_over(watched, descendants(os.getpid()), size)
        _end_all(walls)
        _, status, usage = os.wait4(child, 0)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        if problem:
            return {"failed": problem}
        return {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime, "is_full": is_full} if alive else None
    finally:
        _remove_scratch(walls, scratch)


def _wait(child: int, control: socket.socket, starter: int, scratch: str | None, size: int) -> bool:
    """Wait until a program ends, is stopped, or exceeds ``size`` bytes in ``scratch``. Return False if the starter has ended."""
    program = os.pidfd_open(child)
    poll = select.poll()
    for each in (control, starter, program):
        poll.register(each, select.POLLIN)
    try:
        while not (ready := [descriptor for descriptor, _ in poll.poll(None if scratch is None else _LOOK_MS)]):
            assert scratch is not None
            if is_over(scratch, descendants(os.getpid()), size):
                return True
        if starter in ready:
            return False
        return control.fileno() not in ready or bool(control.recv(MAX_MESSAGE_BYTES))
    finally:
        os.close(program)


def _end_all(walls: Walls) -> None:
    if walls.isolated:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all processes of the pid namespace except this one, its first process
        return
    while any(not _is_dead(pid) for pid in descendants(os.getpid())):
        kill_below(os.getpid())


def _is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _make_scratch(walls: Walls, size: int) -> str:
    if walls.keeps and os.path.ismount(SCRATCH):
        return SCRATCH
    if walls.isolated:
        owner = f"uid={NOBODY},gid={NOBODY}" if walls.nobody else f"uid={os.geteuid()},gid={os.getegid()}"
        options = f"size={size},nr_inodes=4096,mode=0700,{owner}"
        kernel.mount("tmpfs", SCRATCH, "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, options)
        for place in walls.places:
            os.makedirs(SCRATCH + place, 0o777)
            if walls.nobody:
                os.chown(SCRATCH + place, NOBODY, NOBODY)
        return SCRATCH
    path = make_scratch(walls.sandbox)
    if walls.nobody:
        os.chown(path, NOBODY, NOBODY)
    return path


def _remove_scratch(walls: Walls, scratch: str) -> None:
    if walls.keeps:
        return  # the directory is removed with the namespace
    if walls.isolated:
        with suppress(OSError):
            kernel.unmount(scratch)
    else:
        remove(scratch)


def _become(order: dict[str, Any], descriptors: list[int], walls: Walls, scratch: str, failed: int) -> None:
    """Turn this forked process into the program. Never return."""
    code = 1
    try:
        try:
            _confine(order["limits"], walls, scratch, [*descriptors, failed])
        except BaseException as error:
            os.write(_FAILED, f"{type(error).__name__}: {error}".encode(errors="replace"))
            os._exit(1)
        os.close(_FAILED)
        code = programs.run(order)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _confine(limits: dict[str, int], walls: Walls, scratch: str, descriptors: list[int]) -> None:
    """Build the walls around this process. Move ``descriptors`` to 0, 1, ..., as ``programs`` and ``_FAILED`` number them."""
    os.setsid()
    kernel.end_with_parent()
    for number, descriptor in enumerate([fcntl.fcntl(each, fcntl.F_DUPFD, _FAILED + 1) for each in descriptors]):
        os.dup2(descriptor, number)
    os.closerange(_FAILED + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    os.chdir(scratch)
    os.umask(0o077)
    os.environ.pop("LD_LIBRARY_PATH", None)
    os.environ.update(HOME=scratch, TMPDIR=scratch)
    tempfile.tempdir = None  # forget an earlier lookup
    others = 2 if walls.isolated else 0  # the sandbox's own two processes in the user namespace
    if walls.nobody:
        _become_nobody()
        with suppress(OSError):  # the kernel counts processes per user and user namespace
            kernel.unshare(kernel.NEW_USERS)
            others = 0
        kernel.end_with_parent()  # set again, because the change of user id has reset it
    elif not walls.isolated:
        others = tasks_of(os.geteuid())
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["scratch_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_NPROC, limits["processes"] + others),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_STACK, _STACK_BYTES),
    ):
        kernel.limit(which, value)
    kernel.drop_privileges()
    if (
        walls.filter
    ):  # needed to count open deleted files; safe, because the filter rejects calls that inspect processes
        kernel.show_memory()
    if walls.landlock:
        kernel.landlock(walls.readable, [scratch, *filter(os.path.exists, _DEVICES)], walls.landlock)
    if walls.filter:
        kernel.load_seccomp(walls.filter)
