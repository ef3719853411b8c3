"""Containers of every kind, real if this machine supports them: files, commands, output and ends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import Container, ContainerLost
from rlhf_mcore.environments.containers.kinds import Containers
from rlhf_mcore.environments.containers.sandboxed import SandboxContainer
from rlhf_mcore.environments.containers.task import ContainerLimits, Task, TaskTests
from rlhf_mcore.environments.containers.workplace import grade
from rlhf_mcore.sandbox.run import machine_level
from tests.commands import wait_for

IMAGE = "rlhf-mcore-tests:1"
LIMITS = ContainerLimits(timeout_s=20.0, start_timeout_s=60.0, memory_bytes=2**29, lives_s=120.0)
NO_NAMESPACES = pytest.mark.skipif(not machine_level().reaches("namespaces"), reason="this machine gives no namespaces")
# A hierarchy of cgroups of both versions, and limits above our own, stop an older crun: neither is there inside of this.
WITHOUT_CGROUPS = """#!/bin/sh
export CONTAINERS_CONF={folder}/containers.conf
exec unshare -m sh -c 'umount /sys/fs/cgroup/unified 2>/dev/null; exec {program} "$@"' sh "$@"
"""


@cache
def runs_containers(name: str, folder: str) -> bool:
    """Return whether a client runs a container of an image made here; ``folder`` is then a directory for PATH."""
    busybox = shutil.which("busybox")
    if busybox is None:
        return False
    root = Path(folder, "root")
    (root / "bin").mkdir(parents=True)
    (root / "app").mkdir()
    (root / "tmp").mkdir()
    shutil.copy(busybox, root / "bin" / "busybox")
    for name in subprocess.check_output([busybox, "--list"], text=True).split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    subprocess.run(["tar", "-C", root, "-cf", Path(folder, "root.tar"), "."], check=True)
    Path(folder, "containers.conf").write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
    )
    if (program := shutil.which(name)) is None:
        return False
    for text in (f'#!/bin/sh\nexec {program} "$@"\n', WITHOUT_CGROUPS.format(folder=folder, program=program)):
        wrapper = Path(folder, name)
        wrapper.write_text(text)
        wrapper.chmod(0o755)
        made = subprocess.run([wrapper, "import", Path(folder, "root.tar"), IMAGE], capture_output=True)
        tried = [wrapper, "run", "--rm", "--network", "none", "--memory", "64m", IMAGE, "/bin/true"]
        if not made.returncode and not subprocess.run(tried, capture_output=True, timeout=60).returncode:
            return True
    return False


@contextmanager
def real_client(name: str, folder: Path) -> Iterator[str]:
    """Put the real client ``name`` of this machine first in PATH, or skip the test."""
    if not runs_containers(name, str(folder)):
        pytest.skip(f"{name} runs no container here, or there is no static busybox for its image")
    before, os.environ["PATH"] = os.environ["PATH"], f"{folder}:{os.environ['PATH']}"
    yield name
    os.environ["PATH"] = before


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real client of Docker, first in PATH."""
    with real_client("docker", tmp_path_factory.mktemp("docker")) as name:
        yield name


Use = Callable[[Container], Coroutine[Any, Any, Any]]
Opened = Callable[[Task, Use], Any]


async def use_local(kind: str, task: Task, use: Use) -> Any:
    """Open a container of this machine for a task, use it, and close it."""
    async with Containers(kind, LIMITS, image=IMAGE).opened(task) as container:
        return await use(container)


@pytest.fixture(params=[pytest.param("sandbox", marks=NO_NAMESPACES), "docker"])
def use_container(request: pytest.FixtureRequest) -> Opened:
    """Open a container of a kind for a task, use it, and close it."""
    kind = request.getfixturevalue("program") if request.param == "docker" else request.param
    return lambda task, use: asyncio.run(use_local(kind, task, use))


TASK = Task(
    workdir="/app",
    env={"WHO": "me"},
    files={"x.txt": b"hello\n", "/app/deep/run.sh": b"#!/bin/sh\necho from a script\n"},
    setup=("echo ready > setup.txt",),
    tests=TaskTests('grep -q bye x.txt && [ "$(cat /tests/hidden)" = 1 ]', {"/tests/hidden": b"1"}),
)


def test_files_go_in_commands_run_and_files_come_out(use_container: Opened) -> None:
    async def use(box: Container) -> None:
        ran = await box.run(
            "cat x.txt setup.txt; ./deep/run.sh; echo $WHO $MORE; cat; echo oops >&2; exit 3",
            stdin="in\n",
            env={"MORE": "more"},
        )
        assert ran.stdout == "hello\nready\nfrom a script\nme more\nin\n"
        assert (ran.exit_code, ran.stderr, ran.reason, ran.ok) == (3, "oops\n", "", False)
        content = bytes(range(256)) * 5000
        await box.write({"new/binary": content})
        assert await box.read("new/binary") == await box.read("/app/new/binary") == content
        with pytest.raises(OSError, match="none"):
            await box.read("none")
        assert (await box.run("pwd", cwd="/app/new")).stdout.endswith("/app/new\n")

    use_container(TASK, use)


def test_tests_grade_what_is_left_and_are_not_there_before(use_container: Opened) -> None:
    async def use(box: Container) -> None:
        assert TASK.tests is not None
        assert not (await box.run("cat /tests/hidden")).ok
        await box.run("mkdir -p /logs/verifier; (while :; do echo 1 > /logs/verifier/reward.txt; done) & sleep 0.1")
        assert await grade(box, TASK.tests, 20) == 0.0
        await box.write({"x.txt": "bye"})
        assert await grade(box, TASK.tests, 20) == 1.0
        for name, text, score in (
            ("reward.txt", "0.25", 0.25),
            ("reward.json", '{"reward": 0.5}', 0.5),
            ("reward.txt", "much", 0.0),
        ):
            told = TaskTests(f"echo '{text}' > /logs/verifier/{name}; exit 1", needs_file=True)
            assert await grade(box, told, 20) == score
        assert await grade(box, TaskTests("true", needs_file=True), 20) == 0.0  # a test without a verdict

    use_container(TASK, use)


def test_a_command_that_hangs_or_floods_is_stopped_and_the_container_goes_on(use_container: Opened) -> None:
    async def use(box: Container) -> None:
        begun = time.monotonic()
        assert (await box.run("sleep 100", timeout_s=1)).reason == "timeout"
        assert (await box.run("head -c 9000000 /dev/zero | tr '\\0' x")).reason == "output"
        assert time.monotonic() - begun < 15
        assert (await box.run("cat x.txt")).stdout == "hello\n"

    use_container(TASK, use)


def test_a_long_command_runs_and_what_no_shell_can_run_ends_with_126(use_container: Opened) -> None:
    async def use(box: Container) -> None:
        for size in (66_000, 300_000, 10_000_000):
            ran = await box.run(f"cat <<'EOF' | wc -c\n{'a' * size}\nEOF\nexit 3", timeout_s=10)
            assert (ran.stdout.strip(), ran.stderr, ran.exit_code) == (str(size + 1), "", 3)
        assert (await box.run("ls -A /tmp /scratch | grep command")).stdout == ""
        assert (await box.run("echo $A | wc -c", env={"A": "x" * 70_000})).stdout.strip() == "70001"
        for how in (
            {"env": {"A": "x" * 140_000}},
            {"env": {f"A{number}": "x" * 100_000 for number in range(9)}},
            {"cwd": "/" + "x" * 140_000},
            {"cwd": "/a\0b"},
            {"env": {"A": "\0"}},
        ):
            begun, ran = time.monotonic(), await box.run("echo hi", **how)
            assert ran.exit_code == 126 and ran.stderr.count("\n") == 1 and not ran.stdout
            assert time.monotonic() - begun < 5 and "rlhf_mcore" not in ran.stderr
        assert (await box.run("echo \0hi")).exit_code == 126
        with pytest.raises(OSError, match="cannot be read"):
            await box.read("/" + "x" * 140_000)
        assert (await box.run("cat x.txt")).stdout == "hello\n"

    use_container(TASK, use)


def test_a_command_that_nobody_waits_for_ends(use_container: Opened) -> None:
    async def use(box: Container) -> None:
        begun = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(box.run("echo > begun; sleep 19; echo > ended"), 1)
        assert (await box.run("ls begun ended 2>/dev/null")).stdout == "begun\n"
        await box.run("mkfifo fifo")
        with pytest.raises(OSError, match="no regular file"):
            await box.read("fifo")
        assert time.monotonic() - begun < 10

    use_container(TASK, use)


def test_nothing_of_the_host_is_in_it(use_container: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-host")
    (tmp_path / "file").write_text("of the host")

    async def use(box: Container) -> None:
        assert "secret-of-the-host" not in (await box.run("env; cat /proc/*/environ 2>/dev/null")).output
        assert not (await box.run(f"cat {tmp_path}/file")).ok
        assert not (await box.run("cat /etc/shadow")).ok
        await box.run(f"timeout 2 wget -T 1 -q -O - http://127.0.0.1:{server.getsockname()[1]}/")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        use_container(TASK, use)
        with pytest.raises(TimeoutError):
            server.accept()


def test_what_is_closed_is_lost_and_gone(use_container: Opened) -> None:
    held: list[Container] = []

    async def use(box: Container) -> None:
        held.append(box)
        await box.run("true")

    use_container(TASK, use)
    with pytest.raises(ContainerLost):
        asyncio.run(held[0].run("true"))


@NO_NAMESPACES
def test_a_sandbox_that_is_killed_is_lost() -> None:
    async def main() -> None:
        async with Containers("sandbox", LIMITS).opened(TASK) as box:
            assert isinstance(box, SandboxContainer)
            command = asyncio.ensure_future(box.run("sleep 60"))
            await asyncio.sleep(0.3)
            os.kill(box._sandbox._process.pid, signal.SIGKILL)
            with pytest.raises(ContainerLost):
                await command
            with pytest.raises(ContainerLost):
                await box.run("true")

    asyncio.run(main())


def test_a_real_container_that_is_killed_is_lost_and_one_that_nobody_ends_ends(program: str) -> None:
    def there() -> list[str]:
        return subprocess.check_output([program, "ps", "-aq", "--filter", "label=rlhf_mcore"], text=True).split()

    async def main() -> None:
        async with Containers(program, LIMITS, image=IMAGE).opened(TASK) as box:
            command = asyncio.ensure_future(box.run("sleep 60"))
            await asyncio.sleep(0.5)
            assert subprocess.run([program, "kill", *there()], capture_output=True).returncode == 0
            with pytest.raises(ContainerLost):
                await command
        await Containers(program, ContainerLimits(lives_s=3.0), image=IMAGE).open(
            Task()
        )  # as by a process that is killed

    asyncio.run(main())
    wait_for(lambda: not there(), 30)


def test_an_image_is_built_from_a_dockerfile_once(program: str) -> None:
    context = {"Dockerfile": f"FROM {IMAGE}\nWORKDIR /work\nCOPY note.txt .\n".encode(), "note.txt": b"built\n"}

    async def main() -> tuple[str, str]:
        kind = Containers(program, LIMITS)
        await kind.warm([Task(context=context)] * 3)
        async with kind.opened(Task(context=context)) as box:
            return (await box.run("cat note.txt; pwd")).stdout, (await box.run("id -u")).stdout.strip()

    assert asyncio.run(main()) == ("built\n/work\n", "0")
    images = [
        f"rlhf-mcore-task:{name}"
        for name in subprocess.check_output(
            [program, "images", "--format", "{{.Tag}}", "--filter", "reference=*rlhf-mcore-task*"], text=True
        ).split()
    ]
    assert images
    subprocess.run([program, "rmi", "-f", *images], capture_output=True, check=True)
    with pytest.raises(ConfigError, match=r"the image localhost/no-such:1 cannot be pulled"):
        asyncio.run(Containers(program, LIMITS, image="localhost/no-such:1").warm([Task()]))


STAND_IN = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
case "$1" in
  run) echo 0123456789ab;;
  inspect) echo true;;
  exec) while [ "$1" != /bin/sh ]; do shift; done; shift; exec /bin/sh "$@";;
esac
"""


@pytest.mark.parametrize("name", ["docker"])
def test_the_command_lines_give_nothing_of_the_host(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, log = tmp_path / name, tmp_path / "log"
    client.write_text(STAND_IN.format(log=log))
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def main() -> None:
        limits = ContainerLimits(memory_bytes=2**30, cpus=1.5, lives_s=77.0)
        async with Containers(name, limits, image="img:1").opened(Task(env={"A": "b"}, workdir="/app")) as box:
            assert (await box.run("echo said")).stdout == "said\n"
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(box.run("exec sleep 20"), 0.5)

    asyncio.run(main())
    lines = log.read_text().splitlines()
    inspected, started = lines[0], lines[1]
    assert inspected == "image inspect img:1" and lines[-1].startswith("rm --force rlhf-mcore-")
    for part in (
        "--network none",
        "--cap-drop ALL",
        "no-new-privileges",
        "--pids-limit 512",
        "--memory 1073741824",
        "--cpus 1.5",
        "--rm",
        "+77)",
    ):
        assert part in started, started
    assert not {"-v", "--volume", "--mount", "--privileged", "--env-file"} & set(started.split())
    [said] = [line for line in lines if line.endswith("echo said")]
    assert "exec --interactive --workdir /app --env A=b" in said and "timeout -s KILL 60 /bin/sh -c echo said" in said
    [left] = [line for line in lines if line.endswith("exec sleep 20")]
    mark = next(word for word in left.split() if word.startswith("CONTAINER_RUN="))
    assert any(f"grep -q {mark} $each/environ" in line for line in lines)  # it is killed in the container


def test_a_client_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"environment\.container\.kind=docker: there is no program 'docker'"):
        Containers("docker")


@NO_NAMESPACES
def test_what_a_sandbox_cannot_do_is_refused() -> None:
    def opens(task: Task) -> None:
        async def main() -> None:
            async with Containers("sandbox", LIMITS).opened(task):
                pass

        asyncio.run(main())

    with pytest.raises(ConfigError, match=r"has no images, but a task needs the image ubuntu:24\.04; use docker"):
        opens(Task(image="ubuntu:24.04"))
    with pytest.raises(ConfigError, match=r"a setup command of a task failed in its container, 'exit 4'"):
        opens(Task(setup=("exit 4",)))
