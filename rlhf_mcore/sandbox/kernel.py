"""Linux features that confine a process, called through ctypes: namespaces, mounts, capabilities, Landlock and seccomp.

Functions raise OSError if the kernel, or a container around this process, refuses. The numbers are from the kernel's headers.
Only the standard library is imported, because this runs in the sandbox's own interpreter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import struct
from collections.abc import Iterable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USERS, NEW_PIDS, NEW_NETWORK = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _RECURSIVE, _SLAVE, _NO_ATIME, _NO_DIR_ATIME, _REL_ATIME = (
    32,
    4096,
    16384,
    1 << 19,
    1024,
    2048,
    1 << 21,
)
_ST_RELATIME = 4096
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_SET_SECCOMP, _SECCOMP_FILTER = 22, 2
_CAPABILITY_VERSION = 0x20080522
MAX_CAPABILITIES = 64


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _prctl(option: int, *arguments: Any) -> None:
    padded = [*(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments), *[ctypes.c_ulong(0)] * 4][:4]
    _check(_libc.prctl(option, *padded), f"prctl({option})")


def end_with_parent() -> None:
    """Make the kernel kill this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def hide_memory() -> None:
    """Prevent other processes of the same user from tracing this process or reading its memory."""
    _prctl(_PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Allow processes of the same user to inspect /proc/PID of this process again, within other walls."""
    _prctl(_PR_SET_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant."""
    _prctl(_PR_SET_SUBREAPER, 1)


# --------------------------------------------------------------------------------------------------------- namespaces
def unshare(flags: int) -> None:
    """Move this process (for NEW_PIDS: its children) to new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def enter_namespaces() -> None:
    """Enter new mount, pid, network, ipc and uts namespaces. Enter a user namespace too, if this process needs it."""
    flags = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NETWORK
    if os.geteuid() == 0:
        try:
            return unshare(flags)
        except OSError:  # root in a container may be allowed to do it as a user
            pass
    user, group = os.geteuid(), os.getegid()
    unshare(flags | NEW_USERS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def mount(source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount. It disappears when it is no longer in use."""
    _check(_libc.umount2(os.fsencode(target), _DETACH), f"unmount {target}")


def leave_shared_mounts() -> None:
    """Hide mounts that are made from now on from other namespaces."""
    mount(None, "/", None, _RECURSIVE | _SLAVE)


def bind(source: str, target: str) -> None:
    """Bind ``source``, including its submounts, to ``target``."""
    mount(source, target, None, _BIND | _RECURSIVE)


def bind_read_only(source: str, target: str, mounts: str) -> None:
    """Bind ``source`` read-only, without devices and set-user-id programs. ``mounts`` is the path of /proc/self/mountinfo."""
    bind(source, target)
    with open(mounts, encoding="utf-8", errors="surrogateescape") as file:  # blanks in paths are written as \\040
        points = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), line.split(" ")[4]) for line in file]
    for point in points:
        if point == target or point.startswith(target + "/"):
            make_read_only(point)


def make_read_only(point: str) -> None:
    """Remount with the existing flags, which a user namespace must keep, plus read-only, no-suid and no-devices."""
    flags = os.statvfs(point).f_flag
    kept = flags & (NO_EXEC | _NO_ATIME | _NO_DIR_ATIME) | (_REL_ATIME if flags & _ST_RELATIME else 0)
    mount(None, point, None, _REMOUNT | _BIND | READ_ONLY | NO_SUID | NO_DEVICES | kept)


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root directory, and move the previous root to ``old``."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root on {os.uname().machine}: not known")
    _check(_libc.syscall(number, os.fsencode(new), os.fsencode(old)), "pivot_root")


# -------------------------------------------------------------------------------------------------------- privileges
def drop_privileges() -> None:
    """Drop all capabilities of this process, and prevent it from gaining any."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(MAX_CAPABILITIES):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:  # beyond the kernel's last capability, or not allowed for an unprivileged process
            break
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def limit(which: int, value: int) -> None:
    """Set a resource limit permanently, at most at the current hard limit."""
    _, most = resource.getrlimit(which)
    least = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(which, (least, least))


# ----------------------------------------------------------------------------------------------------------- Landlock
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ = 1 | 4 | 8  # execute, read a file, read a directory
_OF_FILES = 1 | 2 | 4 | 1 << 14 | 1 << 15
# The rights that each version of the interface governs: for files, for TCP, and scopes confined to the domain.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0: none. From version 6 on, signals stay within a domain."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def landlock(readable: Iterable[str], writable: Iterable[str], version: int) -> None:
    """Restrict this process: read and execute below ``readable``, and full file access below ``writable``.

    It may also not bind or connect TCP sockets (version 4), nor reach abstract sockets or send signals outside its domain
    (version 6).
    """
    rights = _FILE_RIGHTS[max(v for v in _FILE_RIGHTS if v <= version)]
    attributes = struct.pack("=QQQ", rights, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _check(
        _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset"
    )
    try:
        for allowed, paths in ((_READ, readable), (rights, writable)):
            for path in paths:
                _allow(ruleset, path, allowed & rights)
        _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights &= -1 if os.path.isdir(path) else _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        _check(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------ seccomp
# Calls that inspect other processes, change the machine, create namespaces, or bypass the other walls.
# fmt: off
DENIED = [
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd",
    "mount", "umount", "umount2", "move_mount", "open_tree", "fsopen", "fsmount",
    "fsconfig", "fspick", "mount_setattr", "pivot_root", "chroot", "unshare", "setns",
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "fanotify_init",
    "keyctl", "add_key", "request_key", "open_by_handle_at", "name_to_handle_at", "memfd_create", "memfd_secret",
    "personality", "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot",
    "swapon", "swapoff", "acct", "quotactl", "syslog", "settimeofday", "clock_settime",
    "clock_adjtime", "adjtimex", "iopl", "ioperm", "vhangup", "shmget", "shmat",
    "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd",
    "msgrcv", "msgctl", "mq_open", "socket", "connect", "bind", "listen",
    "accept", "accept4", "setpriority", "ioprio_set", "sched_setaffinity", "sched_setscheduler", "sched_setparam",
    "sched_setattr", "migrate_pages", "move_pages",
]
# fmt: on
# Calls that Landlock allows: changes to modes, owners, times and attributes of files by path, and watches for changes.
# fmt: off
METADATA = [
    "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "truncate",
    "utime", "utimes", "utimensat", "futimesat", "inotify_add_watch", "mq_unlink", "file_setattr",
    "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
]
# fmt: on
SIGNALS = ["kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"]
_ALLOW, _ERROR, _NO_SUCH_CALL = 0x7FFF0000, 0x00050000, -1
_NOT_EQUAL, _EQUAL, _MASKED_EQUAL = 1, 4, 7
_THREAD, _TIOCSTI = 0x00010000, 0x5412
_NAMESPACES = (NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USERS, NEW_PIDS, NEW_NETWORK, 0x02000000)


class _Comparison(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def seccomp_filter(*, signals: bool, forks: bool, metadata: bool) -> bytes:
    """Compile a filter that rejects ``DENIED``, and all sockets except stream pairs. libseccomp maps call names to numbers.

    Args:
        signals: whether signals may be sent.
        forks: whether processes may be created, in addition to threads.
        metadata: whether modes, owners and times of files may be changed.

    Raises:
        OSError: libseccomp is not installed.
    """
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))

    def deny(name: str, *comparisons: tuple[int, int, int, int], error: int = errno.EPERM) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        # Newer than the library; except clone3, these need privileges that are already dropped.
        if number == _NO_SUCH_CALL:
            return
        compared = (_Comparison * len(comparisons))(*(_Comparison(*each) for each in comparisons))
        action = ctypes.c_uint32(_ERROR | error)
        status = library.seccomp_rule_add_array(context, action, number, len(comparisons), compared)
        if status < 0 and -status != errno.EDOM:  # the call does not exist on this machine
            raise OSError(-status, f"seccomp: no rule for {name}: {os.strerror(-status)}")

    try:
        for name in [*DENIED, *([] if signals else SIGNALS), *([] if metadata else METADATA)]:
            deny(name)
        deny("clone3", error=errno.ENOSYS)  # a filter cannot see its flags; the C library falls back to clone
        for flag in _NAMESPACES:
            deny("clone", (0, _MASKED_EQUAL, flag, flag))
        if not forks:
            deny("clone", (0, _MASKED_EQUAL, _THREAD, 0), error=errno.EAGAIN)
            for name in ("fork", "vfork"):
                deny(name, error=errno.EAGAIN)
        deny("prctl", (0, _EQUAL, _PR_SET_DUMPABLE, 0))
        deny("socketpair", (0, _NOT_EQUAL, 1, 0))
        for kind in (2, 5):  # datagram and packet sockets can send to other sockets
            deny("socketpair", (1, _MASKED_EQUAL, 0xF, kind))
        deny("prlimit64", (0, _NOT_EQUAL, 0, 0))
        deny("ioctl", (1, _MASKED_EQUAL, 0xFFFFFFFF, _TIOCSTI))
        descriptor = os.memfd_create("filter")
        try:
            if status := library.seccomp_export_bpf(context, descriptor):
                raise OSError(-status, f"seccomp_export_bpf: {os.strerror(-status)}")
            return os.pread(descriptor, 2**20, 0)
        finally:
            os.close(descriptor)
    finally:
        library.seccomp_release(context)


def load_seccomp(filter_: bytes) -> None:
    """Apply a filter to this process and all its future children."""
    program = _Program(len(filter_) // 8, filter_)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program))
