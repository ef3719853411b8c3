"""The OpenEnv adapter, with a real server if the package is installed."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore_contrib.environments.openenv import OpenEnv
from rlhf_mcore_contrib.environments.verifiers import Verifiers
from tests.messages import expect_error

ROW = {"prompt": "guess", "ground_truth": "5", "extra_info": {}, "data_source": "numbers"}


def test_an_episode_is_a_session_on_a_server_of_openenv() -> None:
    pytest.importorskip("openenv.core")
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):
        message: str

    class Heard(Observation):
        text: str = ""

    class Echo(Environment):  # type: ignore[misc, type-arg, unused-ignore]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
            return Heard(text=f"seed {seed}")

        def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Heard:
            return Heard(text=action.message.upper(), reward=0.5, done=action.message == "bye")

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def play(**options: Any) -> list[Any]:
        environment = OpenEnv(f"http://127.0.0.1:{port}", **options)
        answers: list[Any] = [await environment.reset(ROW, seed=2**31 + 7)]
        answers += [await environment.step(action) for action in ("hi", "bye")]
        await environment.close()
        return answers

    try:
        assert asyncio.run(play(observation="text")) == ["seed 7", ("HI", 0.5, False), ("BYE", 0.5, True)]
        assert '"text": "seed 7"' in asyncio.run(play())[0]
        with expect_error(KeyError, field="environment.options.observation", value="words", remedy="text"):
            asyncio.run(play(observation="words"))
    finally:
        server.should_exit = True
        thread.join(20)


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("openenv", "openenv.core.generic_client"):  # an earlier test may have imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"environment.function=openenv: .*install it \(pip install openenv-core\)"):
        OpenEnv("http://localhost:1")
    with expect_error(
        ConfigError, field="environment.options.packages", value="/nowhere", remedy="pip install --target"
    ):
        Verifiers({"id": "wordle"}, packages="/nowhere")
    with pytest.raises(
        ConfigError, match=r"environment.function=verifiers: .*pip install --target FOLDER verifiers==0.4.0"
    ):
        Verifiers({"id": "wordle"})
