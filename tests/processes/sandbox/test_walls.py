"""Run programs that try to escape the sandbox, fill the machine or outlive it, as real processes on every level of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_mcore.own_processes import has_ended
from rlhf_mcore.sandbox import run
from rlhf_mcore.sandbox.run import LEVELS, Limits, Program, Reason, Result, Sandbox, machine_level, run_python
from rlhf_mcore.sandbox.usage import descendants
from tests.commands import wait_for

ROOT = Path(__file__).resolve().parents[3]
DEAF = "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
QUICK = Limits(cpu_s=1, wall_s=20, memory_bytes=256 * 2**20, scratch_bytes=2**20, output_bytes=2**16, processes=8)
SHORT = replace(QUICK, wall_s=0.2)  # for programs that never end


def _of_this_machine(names: tuple[str, ...]) -> list[str]:
    best = LEVELS.index(machine_level().name)
    return [name for name in names if LEVELS.index(name) <= best]


@pytest.fixture(scope="module", params=_of_this_machine(LEVELS))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(request.param) as made:
        yield made


@pytest.fixture(scope="module", params=_of_this_machine(LEVELS[1:]))
def walled_sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Yield sandboxes of the levels that block files, network and other processes."""
    with Sandbox(request.param) as made:
        yield made


def attack(sandbox: Sandbox, code: str, limits: Limits = QUICK, stdin: bytes = b"") -> Result:
    result = sandbox.run(Program(code), limits, stdin=stdin)
    left = set(descendants(sandbox._process.pid)) - sandbox._own
    assert not left, f"{left} are still there after {code!r}"
    return result


# ----------------------------------------------------------------------------------------------------- ordinary programs
def test_a_program_reads_writes_and_exits(sandbox: Sandbox) -> None:
    code = "import sys\nname = input()\nprint('hello', name)\nprint('oops', file=sys.stderr)\nsys.exit(3)"
    result = attack(sandbox, code, stdin=b"you\nmore")
    assert (result.reason, result.exit_code, result.stdout, result.stderr) == (Reason.WRONG, 3, "hello you\n", "oops\n")


def test_what_the_end_of_an_interpreter_does_is_done(sandbox: Sandbox) -> None:
    code = """
import atexit, threading, time
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
print("main", end=" ")
"""
    assert attack(sandbox, code).stdout == "main thread\nregistered\n"


def test_a_traceback_shows_the_program_alone(sandbox: Sandbox) -> None:
    assert attack(sandbox, "def f():\n    return 1 / 0\nf()").stderr == (
        "Traceback (most recent call last):\n"
        '  File "solution.py", line 3, in <module>\n    f()\n'
        '  File "solution.py", line 2, in f\n    return 1 / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero\n"
    )


def test_a_command_runs_and_the_next_one_finds_an_empty_directory(sandbox: Sandbox) -> None:
    write = Program(kind="command", argv=("/bin/sh", "-c", "read x; echo $x > note; echo *; exit 7"))
    result = sandbox.run(write, QUICK, stdin=b"text\n")
    assert (result.exit_code, result.stdout) == (7, "note\n")
    assert sandbox.run(Program(kind="command", argv=("/bin/ls", "-A")), QUICK).stdout == ""


def test_runs_know_nothing_of_each_other(sandbox: Sandbox) -> None:
    attack(sandbox, "import math, os\nmath.pi = 3\nos.environ['NOTE'] = '1'\nopen('note', 'w').close()")
    code = "import math, os\nprint(math.pi, os.environ.get('NOTE'), os.listdir())"
    assert attack(sandbox, code).stdout == "3.141592653589793 None []\n"


def test_the_environment_and_the_descriptors_of_the_trainer_are_not_there(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with Sandbox(sandbox.level.name) as fresh:
        result = attack(
            fresh,
            "import os\nprint(dict(os.environ))\nfor n in range(5, 64):\n    try: os.fstat(n); print(n)\n    except OSError: pass",
        )
    assert "secret" not in result.stdout
    assert result.stdout.count("\n") == 1


# ------------------------------------------------------------------------------------------------ using up the machine
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: pass", Reason.TIMEOUT),
        ("import time\ntime.sleep(100)", Reason.TIMEOUT),
        (DEAF + "while True: pass", Reason.TIMEOUT),
        ("x = bytearray(100 * 10**9)", Reason.MEMORY),
        ("x = []\nwhile True: x.append(bytearray(10**7))", Reason.MEMORY),
        ("while True: print('x' * 10**4)", Reason.OUTPUT_LIMIT),
        ("import os\nwhile True: os.write(2, b'x' * 10**4)", Reason.OUTPUT_LIMIT),
        ("def f(n): return f(n + 1)\nf(0)", Reason.WRONG),
        ("import ctypes\nctypes.string_at(0)", Reason.KILLED),
        ("import os\nos.abort()", Reason.KILLED),
        ("import os\nos._exit(0)", Reason.OK),
        ("x = 1\n" * 3 + "x ===", Reason.WRONG),
        ("\0", Reason.WRONG),
    ],
    ids=lambda value: value.value if isinstance(value, Reason) else None,
)  # fmt: skip
def test_fault_24_how_a_program_ends(sandbox: Sandbox, code: str, reason: Reason) -> None:
    assert attack(sandbox, code, SHORT if reason is Reason.TIMEOUT else QUICK).reason is reason
    assert attack(sandbox, "print(1)").stdout == "1\n"


def test_fault_24_a_fork_bomb_ends_with_its_sandbox(sandbox: Sandbox) -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert attack(sandbox, code, SHORT).reason in (Reason.TIMEOUT, Reason.MEMORY)
    assert attack(sandbox, "print(1)").stdout == "1\n"


def test_fault_24_recursion_without_a_limit(sandbox: Sandbox) -> None:
    code = "import functools, sys\nsys.setrecursionlimit(10**9)\n@functools.lru_cache(None)\ndef f(n): return f(n + 1)\nf(0)"
    assert attack(sandbox, code).reason is Reason.KILLED


def test_fault_24_many_processes_have_no_more_memory_than_one(sandbox: Sandbox) -> None:
    code = """
import os, sys, time
for _ in range(6):
    try:
        if os.fork() == 0: break
    except OSError: sys.exit("alone")
x = bytearray(100 * 2**20)
for i in range(0, len(x), 4096): x[i] = 1
time.sleep(100)
"""
    result = attack(sandbox, code)
    assert result.reason is Reason.MEMORY or result.stderr == "alone\n"


def test_fault_24_a_daemon_does_not_outlive_its_program(sandbox: Sandbox, tmp_path: Path) -> None:
    code = """
import os, signal, time
def child():
    for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(n, signal.SIG_IGN)
    time.sleep(1000)
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: child()
        os._exit(0)
    os.wait()
except OSError as error: print(error)
print("done")
"""
    assert attack(sandbox, code).stdout.endswith("done\n")


def test_files_are_limited(sandbox: Sandbox) -> None:
    code = "import os\nwith open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(2**20))"
    result = attack(sandbox, code)
    assert result.reason is Reason.WRONG
    assert "Errno" in result.stderr  # File too large, or No space left on device


WRITES = """
for n in range({files}):
    f = open(f'f{{n}}', 'wb')
    {after}
    for _ in range(8): f.write(bytes(2**16))
    f.flush(); kept.append(f)
"""


@pytest.mark.parametrize("after", ["pass", "os.unlink(f.name)"])
def test_all_files_of_a_program_together_are_limited(sandbox: Sandbox, after: str) -> None:
    code = "import os, time\nkept = []\n" + WRITES + "time.sleep(0.5)"
    full = (
        Reason.WRONG if sandbox.level.name == "namespaces" else Reason.OUTPUT_LIMIT
    )  # no space is left, or the program is killed
    assert attack(sandbox, code.format(files=1, after=after)).reason is Reason.OK
    if after == "pass" or os.geteuid() == 0 or sandbox.level.name != "rlimits":
        assert attack(sandbox, code.format(files=4, after=after)).reason is full


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')\nos.chdir('/')\nwhile True: pass",
        "for n in range(10_000): open(str(n), 'w').close()",
        "import os\nos.mkdir('a'); open('a/f', 'w').close()\ntry: os.chmod('a', 0)\nexcept OSError: pass",
    ],
    ids=["nested and endless", "many", "closed"],
)
def test_fault_39_no_directory_ends_the_sandbox_or_stays(
    sandbox: Sandbox, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Sandbox(sandbox.level.name) as fresh:
        first = fresh._process.pid
        attack(fresh, code, replace(QUICK, wall_s=5))
        assert [attack(fresh, "print(1)").stdout for _ in range(5)] == ["1\n"] * 5
        assert fresh._process.pid == first
        assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------- getting out
def test_files_of_the_machine_cannot_be_read_or_written(walled_sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    tmp_path.chmod(0o777)
    paths = [
        str(secret),
        "/etc/passwd",
        "/etc/hostname",
        "/proc/1/environ",
        f"/proc/{os.getpid()}/environ",
        str(ROOT / "setup.py"),
    ]
    code = f"""
import os
for path in {paths!r}:
    for what in (lambda: print(open(path).read()), lambda: open(path, "a"), lambda: os.listdir(os.path.dirname(path))):
        try: what(); print("reached", path)
        except OSError: pass
for path in ({str(tmp_path / "new")!r}, os.__file__, "/usr/bin/new", "/new", "/dev/new", "/tmp/../new"):
    try: open(path, "w"); print("wrote", path)
    except OSError: pass
"""
    result = attack(walled_sandbox, code)
    assert (result.stdout, result.stderr) == ("", "")
    assert sorted(os.listdir(tmp_path)) == ["secret.txt"]


def test_files_of_the_machine_cannot_be_changed_without_being_opened(walled_sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    tmp_path.chmod(0o777)
    before = os.stat(secret)
    code = f"""
import ctypes, os
path, libc = {str(secret)!r}, ctypes.CDLL(None)
for name, what in (
    ("chmod", lambda path: os.chmod(path, 0o777)),
    ("chown", lambda path: os.chown(path, os.getuid(), os.getgid())),
    ("utime", lambda path: os.utime(path, (1, 1))),
    ("truncate", lambda path: os.truncate(path, 0)),
    ("attribute", lambda path: os.setxattr(path, "user.x", b"x")),
    ("unlink", os.unlink),
    ("rename", lambda path: os.rename(path, path + "2")),
    ("link", lambda path: os.link(path, "here")),
    ("directory", lambda path: os.mkdir(path + "3")),
    ("pipe", lambda path: os.mkfifo(path + "4")),
    ("watch", lambda path: libc.inotify_add_watch(libc.inotify_init(), path.encode(), 2) >= 0 or os.stat("/absent")),
):
    for each in (path, os.__file__):
        try: what(each); print(name, each)
        except OSError: pass
"""
    assert attack(walled_sandbox, code).stdout == (
        "watch " + os.__file__ + "\n" if walled_sandbox.level.name == "namespaces" else ""
    )
    after = os.stat(secret)
    assert (after.st_mode, after.st_uid, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    assert (secret.read_text(), os.listdir(tmp_path)) == ("secret", ["secret.txt"])


def test_there_is_no_network(walled_sandbox: Sandbox, tmp_path: Path) -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("127.0.0.1", 0))
        local.bind(str(tmp_path / "s"))
        abstract.bind(f"\0rlhf_mcore-test-{os.getpid()}")
        for each in (server, local, abstract):
            each.listen()
        code = f"""
import socket
for address in ({server.getsockname()!r}, {str(tmp_path / "s")!r}, {abstract.getsockname().decode()!r}):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, kind).connect(address)
            print("connected", address)
        except OSError: pass
try: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print("datagrams")
except OSError: pass
a, b = socket.socketpair(); a.send(b"x"); print(b.recv(1))  # asyncio has one
"""  # fmt: skip
        assert attack(walled_sandbox, code).stdout == "b'x'\n"


def test_other_processes_cannot_be_seen_traced_signalled_or_slowed(walled_sandbox: Sandbox) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        code = f"""
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
for pid in ({victim.pid}, {os.getpid()}, {walled_sandbox._process.pid}, os.getppid(), 1):
    tries = {{
        "trace": lambda: libc.ptrace(16, pid, 0, 0) == 0 or 1 / 0,
        "read": lambda: libc.process_vm_readv(pid, 0, 0, 0, 0, 0) == 0 or 1 / 0,
        "limit": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 0)),
        "affinity": lambda: os.sched_setaffinity(pid, [0]),
        "descriptor": lambda: libc.syscall(438, os.pidfd_open(pid), 0, 0) >= 0 or 1 / 0,
        "environment": lambda: open(f"/proc/{{pid}}/environ").read(),
    }}
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        tries[f"signal {{number}}"] = lambda: os.kill(pid, number)
    for name, what in tries.items():
        try: what(); print(name, pid)
        except (OSError, ZeroDivisionError, OverflowError): pass
"""
        result = attack(walled_sandbox, code)
        alive = victim.poll() is None
        victim.communicate(b"\n")
    # Signals to the first process of a pid namespace are delivered without effect.
    reached = [line for line in result.stdout.splitlines() if not (line.startswith("signal") and line.endswith(" 1"))]
    reached = [
        line for line in reached if not (line.startswith("signal") and walled_sandbox.level.name == "namespaces")
    ]
    assert (reached, result.stderr, alive) == ([], "", True)
    assert attack(walled_sandbox, "print(1)").stdout == "1\n"


def test_privileges_cannot_be_had_again(walled_sandbox: Sandbox) -> None:
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, status in (
    ("mount", libc.mount(b"tmpfs", b"/usr", b"tmpfs", 0, None)),
    ("unmount", libc.umount2(b"/usr", 2)),
    ("user namespace", libc.unshare(0x10000000)),
    ("network namespace", libc.unshare(0x40000000)),
    ("clone", libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)),
    ("chroot", libc.chroot(b"/")),
    ("no_new_privs", libc.prctl(39, 0, 0, 0, 0) - 1),
    ("memfd", libc.memfd_create(b"x", 0)),
    ("host name", libc.sethostname(b"x", 1)),
    ("keyring", libc.syscall(250, 0, -1, 0, 0)),
    ("shared memory", libc.shmget(1234, 4096, 0o1777)),
):
    if status >= 0: print(name, status)
for user in (0, 1000):
    try: os.setuid(user); print("became", user) if user != os.getuid() or user == 1000 else None
    except OSError: pass
"""
    assert attack(walled_sandbox, code).stdout == "no_new_privs 0\n"


# ------------------------------------------------------------------------------------------------------ who starts it
def test_a_sandbox_ends_with_its_starter(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs a program in the sandbox gets kill -9. All sandbox processes end a moment later."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    starter = f"""
import sys
from rlhf_mcore.sandbox.run import Limits, Program, Sandbox
code = "import os, time\\ntry: os.fork()\\nexcept OSError: pass\\ntime.sleep(1000)"
sandbox = Sandbox({sandbox.level.name!r})
print(sandbox._process.pid, flush=True)
sandbox.run(Program(code), Limits(cpu_s=100, wall_s=300))
"""
    with subprocess.Popen([sys.executable, "-c", starter], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        top = int(process.stdout.readline())
        wait_for(lambda: len(descendants(top)) >= (2 if sandbox.level.name == "namespaces" else 1))
        started = [top, *descendants(top)]
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: all(map(has_ended, started)), 10)
    assert os.listdir(tmp_path) == []


def test_a_sandbox_whose_interpreter_was_killed_starts_again(sandbox: Sandbox) -> None:
    os.kill(sandbox._process.pid, signal.SIGKILL)
    sandbox._process.wait()
    assert attack(sandbox, "print(1)").stdout == "1\n"


def test_fault_39_a_sandbox_that_ends_scores_nobody(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with Sandbox(sandbox.level.name) as fresh, Sandbox(sandbox.level.name) as tester:
        for _ in range(3):
            os.kill(fresh._process.pid, signal.SIGKILL)  # without waiting for its end
            assert fresh.run(Program("print(1)"), QUICK).stdout == "1\n"
        with kills(fresh, 1):
            assert fresh.run(Program("import time\ntime.sleep(0.3)\nprint(2)"), QUICK).stdout == "2\n"
        code, test = (
            Program("import time\ndef f(x): time.sleep(0.3); return x", "serve"),
            Program("assert f(1) == 1", "test"),
        )
        for each in (fresh, tester):
            with kills(each, 1):
                assert fresh.test(code, test, tester, QUICK).reason is Reason.OK
        with kills(fresh, run.TRIES):  # like a program that kills every sandbox
            assert fresh.run(Program("import time\ntime.sleep(0.3)\nprint(3)"), QUICK).reason is Reason.KILLED
        assert fresh.run(Program("print(4)"), QUICK).stdout == "4\n"
    assert os.listdir(tmp_path) == []


@contextmanager
def kills(sandbox: Sandbox, times: int) -> Iterator[None]:
    """Kill the interpreter of a sandbox while it runs a program, ``times`` times."""

    def kill() -> None:
        for _ in range(times):
            wait_for(lambda: not sandbox._has_ended and set(descendants(sandbox._process.pid)) - sandbox._own)
            process = sandbox._process
            os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda process=process: sandbox._has_ended or sandbox._process is not process)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()


def test_a_sandbox_that_cannot_be_started_again_scores_nobody(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sandbox(sandbox.level.name) as fresh:
        os.kill(fresh._process.pid, signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            result = fresh.run(Program("print(1)"), QUICK)
            assert result.reason is Reason.REFUSED and "cannot be started again" in result.detail
        assert fresh.run(Program("print(1)"), QUICK).stdout == "1\n"


def test_fault_39_a_machine_without_room_for_a_directory_is_no_programs_fault(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sandbox.level.name == "namespaces":
        pytest.skip("its directory is in memory")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with Sandbox(sandbox.level.name) as fresh:
        assert attack(fresh, "print(1)").reason is Reason.OK
        (tmp_path / "temporary").rmdir()
        result = attack(fresh, "print(1)")
        assert result.reason is Reason.REFUSED and "FileNotFoundError" in result.detail
        (tmp_path / "temporary").mkdir()
        assert attack(fresh, "print(1)").reason is Reason.OK


def test_several_threads_may_use_one(sandbox: Sandbox) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda n=n: found.append(attack_text(sandbox, n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["0\n", "1\n", "2\n", "3\n"]


def attack_text(sandbox: Sandbox, number: int) -> str:
    return sandbox.run(Program(f"print({number})"), QUICK).stdout


def test_less_isolation_than_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "machine_level", lambda: run.Level("rlimits", ("rlimits",)))
    result = run_python("print(1)")
    assert (result.reason, result.stdout, result.detail) == (
        Reason.REFUSED,
        "",
        "isolation is rlimits, but filters is required",
    )


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="becoming another user needs root and setpriv"
)
def test_an_ordinary_user_has_the_same_walls(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Repeat the checks as the user ``nobody``, with an interpreter that this user may read.

    The package is copied to a readable folder, because the clone may be in a directory that only its owner may enter.
    """
    python = "/usr/bin/python3"
    if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"], check=False).returncode:
        pytest.skip("no system Python of 3.10 or later")
    readable = Path(tempfile.mkdtemp(dir="/tmp", prefix="rlhf-walls-"))
    request.addfinalizer(lambda: shutil.rmtree(readable))
    shutil.copytree(ROOT / "rlhf_mcore", readable / "rlhf_mcore", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "a+rX", str(readable)], check=True)
    program = f"""
import sys
sys.path.insert(0, {str(readable)!r})
from rlhf_mcore.sandbox.run import *
for name in LEVELS[1:]:
    with Sandbox(name) as sandbox:
        code = '''
import os, socket
for path in ({str(tmp_path)!r}, "/etc/passwd", "/proc/self/environ"):
    try: open(path); print(path)
    except OSError: pass
try: socket.socket(); print("socket")
except OSError: pass
for pid in (os.getppid(), {os.getpid()}):
    try: os.kill(pid, 9); print("killed", pid) if pid != os.getppid() else None
    except OSError: pass
print(os.getuid())
'''
        result = sandbox.run(Program(code))
        print(sandbox.level.name, result.reason.value, result.stdout.split(), result.stderr)
        bomb = "import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass"
        print(sandbox.run(Program(bomb), Limits(wall_s=0.2)).reason.value)
"""
    command = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--bounding-set=-all",
        python,
        "-c",
        program,
    ]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["filters ok ['65534'] ", "timeout", "namespaces ok ['65534'] ", "timeout", ""], (
        done.stderr
    )


def test_ctrl_c_leaves_no_program_and_no_answer_to_the_next_one(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    sandbox.close()
    sandbox._start()
    started, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        started.wait()
        wait_for(lambda: set(descendants(sandbox._process.pid)) - sandbox._own)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    started.set()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run(Program("import time\ntime.sleep(100)"), Limits(wall_s=60))
    thread.join()
    assert os.listdir(tmp_path) == []
    assert attack(sandbox, "import os\nprint(os.environ['TMPDIR'] == os.getcwd())").stdout == "True\n"


def test_a_machine_on_which_nothing_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    machine_level.cache_clear()
    try:
        level = machine_level()
        assert (level.name, len(level.missing), level.reaches("rlimits")) == ("none", 3, False)
        assert run_python("print(1)", minimum="rlimits").reason is Reason.REFUSED
    finally:
        machine_level.cache_clear()


@pytest.mark.skipif(not _of_this_machine(("filters",)), reason="this machine has no filters to lose")
@pytest.mark.parametrize(
    ("refused", "level"),
    [
        (["unshare", "mount", "pivot_root"], "filters"),  # as in a Docker or Podman container
        (["mount"], "filters"),  # as under Docker's AppArmor profile
        (["unshare", "landlock_create_ruleset"], "rlimits"),
    ],
)
def test_what_a_machine_gives_is_found_by_building_it(refused: list[str], level: str) -> None:
    program = f"""
import ctypes, os
library = ctypes.CDLL("libseccomp.so.2")
library.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(0x7FFF0000)))
for name in {refused!r}:
    number = library.seccomp_syscall_resolve_name(name.encode())
    assert library.seccomp_rule_add_array(context, ctypes.c_uint32(0x50001), number, 0, None) == 0
assert library.seccomp_load(context) == 0
from rlhf_mcore.sandbox.run import *
found = machine_level()
print(found.name, *[missing.partition(":")[0] for missing in found.missing])
print(run_python("print(6 * 7)", minimum=found.name).stdout, end="")
print(run_python("print(6 * 7)", minimum="namespaces").reason.value)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    missing = {"filters": "namespaces", "rlimits": "namespaces filters"}[level]
    assert done.stdout == f"{level} {missing}\n42\nrefused\n", done.stderr
