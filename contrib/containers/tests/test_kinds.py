"""Podman containers and containers of a service behave like containers of this machine. The service requires the key."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import ContainerLost
from rlhf_mcore.environments.containers.kinds import Containers
from rlhf_mcore.environments.containers.task import Task
from rlhf_mcore.own_processes import has_ended
from rlhf_mcore_contrib.containers.service import Service
from tests.processes.environments import test_containers as core
from tests.processes.environments.test_containers import LIMITS, NO_NAMESPACES, TASK, Opened, Use

test_files = core.test_files_go_in_commands_run_and_files_come_out
test_grading = core.test_tests_grade_what_is_left_and_are_not_there_before
test_limits = core.test_a_command_that_hangs_or_floods_is_stopped_and_the_container_goes_on
test_long_commands = core.test_a_long_command_runs_and_what_no_shell_can_run_ends_with_126
test_cancelled_commands = core.test_a_command_that_nobody_waits_for_ends
test_isolation = core.test_nothing_of_the_host_is_in_it
test_closing = core.test_what_is_closed_is_lost_and_gone
test_a_lost_podman_container = core.test_a_real_container_that_is_killed_is_lost_and_one_that_nobody_ends_ends
test_podman_builds_images = core.test_an_image_is_built_from_a_dockerfile_once


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Put the real Podman client first in PATH."""
    with core.real_client("podman", tmp_path_factory.mktemp("podman")) as name:
        yield name


async def use_remote(task: Task, use: Use) -> Any:
    """Open a container of a service of sandboxes for a task, use it, and close it."""
    runner = web.AppRunner(Service(Containers("sandbox", LIMITS).open_in, "token", LIMITS).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Containers("remote", LIMITS, url, "CONTAINER_TOKEN").opened(task) as container:
            return await use(container)
    finally:
        await runner.cleanup()


@pytest.fixture(params=["podman", pytest.param("remote", marks=NO_NAMESPACES)])
def use_container(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Open a container of a kind for a task, use it, and close it."""
    if request.param == "remote":
        monkeypatch.setenv("CONTAINER_TOKEN", "token")
        return lambda task, use: asyncio.run(use_remote(task, use))
    kind = request.getfixturevalue("program")
    return lambda task, use: asyncio.run(core.use_local(kind, task, use))


def test_the_command_lines_of_podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core.test_the_command_lines_give_nothing_of_the_host("podman", tmp_path, monkeypatch)


@NO_NAMESPACES
def test_a_sandbox_rejects_dockerfiles_it_cannot_follow() -> None:
    task = Task(context={"Dockerfile": b"FROM x\nVOLUME /data\n"})
    with pytest.raises(ConfigError, match="a Dockerfile with VOLUME needs"):
        asyncio.run(Containers("sandbox", LIMITS).open(task))


def test_a_login_in_the_address_of_a_service_is_not_shown() -> None:
    async def main() -> None:
        async with Containers("remote", LIMITS, "http://user:secretpw@127.0.0.1:9").opened(TASK):
            pass

    with pytest.raises((ContainerLost, OSError)) as raised:
        asyncio.run(main())
    assert "secretpw" not in str(raised.value) and "127.0.0.1:9" in str(raised.value)


@NO_NAMESPACES
def test_the_service_lets_in_who_has_the_key(tmp_path: Path) -> None:
    environment = {**os.environ, "LENT": "token", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "serve-containers", "--port", "0", "--token-env", "LENT"]
    served = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    line = served.stdout.readline()
    url = line.split(" on ")[1].split()[0]

    async def main() -> list[tuple[int, Any]]:
        answers = []
        async with aiohttp.ClientSession() as client:

            async def ask(method: str, path: str, key: str, body: Any = None) -> Any:
                headers = {"Authorization": f"Bearer {key}"}
                async with client.request(method, f"{url}{path}", headers=headers, data=body) as answer:
                    answers.append((answer.status, await answer.read()))
                    return answers[-1][1]

            task = {"image": None, "context": {}, "workdir": None, "env": {}, "files": {}, "setup": []}
            order = json.dumps({"task": task, "room": {"lives_s": 60, "memory_bytes": float("inf")}})
            await ask("POST", "/containers", "other", order)
            await ask("POST", "/containers", "token", "{")
            await ask("POST", "/containers", "token", '{"task": {}}')
            for room in ('"x"', "[1]", '{"memory_bytes": NaN}', '{"memory_bytes": true}', '{"lives_s": -1}'):
                await ask("POST", "/containers", "token", f'{{"task": {json.dumps(task)}, "room": {room}}}')
            for field, value in (("setup", "abc"), ("files", {"a": "%%%"}), ("env", [])):
                await ask("POST", "/containers", "token", json.dumps({"task": {**task, field: value}}))
            told = json.loads(await ask("POST", "/containers", "token", order))
            path = f"/containers/{told['id']}"
            await ask("POST", f"{path}/run", "token", '{"command": "id"}')
            await ask("PUT", f"{path}/files?path=a.txt", told["key"], b"said")
            await ask("POST", f"{path}/run", told["key"], '{"command": "cat a.txt"}')
            await ask("DELETE", path, told["key"])
            await ask("POST", f"{path}/run", told["key"], '{"command": "true"}')
        return answers

    try:
        answers = asyncio.run(main())
        assert [status for status, _ in answers] == [401, *[400] * 10, 200, 401, 200, 200, 200, 410]
        assert json.loads(answers[14][1])["stdout"] == "said"
        assert all("\n" not in json.loads(body)["error"] for status, body in answers if status != 200)
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(20) == 0
    assert has_ended(served.pid)
