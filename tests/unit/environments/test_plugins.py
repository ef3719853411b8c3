"""Features of environments that are plug-ins: the error without a plug-in, and features from other packages."""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from rlhf_mcore import plugins
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.environments.agents.dialects import RequestError
from rlhf_mcore.environments.agents.endpoint import dialect_at
from rlhf_mcore.environments.containers.container import Container, ContainerKind, KindSettings
from rlhf_mcore.environments.containers.kinds import Containers
from rlhf_mcore.environments.containers.task import ContainerLimits, Task, task_of
from rlhf_mcore.environments.worker import load_environment


class Shelf(ContainerKind):
    """A kind of containers of another package."""

    def __init__(self, settings: KindSettings) -> None:
        self.image = settings.image

    async def open(self, task: Task, limits: ContainerLimits) -> Container:
        raise OSError(f"{self.image} is not on the shelf")

    async def warm(self, task: Task) -> Task:
        return task


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package registers anything."""
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])


def agent(**keys: Any) -> Config:
    cfg = Config()
    cfg.environment.function = "agent"
    for name, value in keys.items():
        owner: Any = cfg
        *groups, last = name.split("__")
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, last, value)
    return cfg


@pytest.mark.parametrize(
    ("keys", "needs"),
    [
        (
            {"environment__function": "gymnasium"},
            "environment.function=gymnasium needs rlhf_mcore_contrib.environments",
        ),
        (
            {"environment__container__kind": "podman"},
            "environment.container.kind=podman needs rlhf_mcore_contrib.containers",
        ),
        (
            {"environment__container__kind": "sandbox", "environment__agent__command": ["sh"]},
            "environment.agent.command with environment.container.kind needs rlhf_mcore_contrib.containers",
        ),
        ({"logging__episode_traces": 3}, "logging.episode_traces=3 needs rlhf_mcore_contrib.traces"),
    ],
)
def test_a_plugin_that_is_not_installed_is_named(bare: None, keys: dict[str, Any], needs: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(agent(**keys))
    assert needs in str(raised.value)


def test_what_is_first_needed_in_a_run_is_named_too(bare: None) -> None:
    with pytest.raises(ConfigError, match=r"extra_info\.container\.folder needs rlhf_mcore_contrib\.containers"):
        task_of({"container": {"folder": "x"}})
    with pytest.raises(ConfigError, match=r"verifiers needs rlhf_mcore_contrib\.environments"):
        load_environment("verifiers")
    with pytest.raises(RequestError, match=r"POST /v1/other needs rlhf_mcore_contrib\.other") as refused:
        dialect_at("/v1/other")
    assert refused.value.status == 404


def test_another_package_adds_a_kind_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("shelf", f"{__name__}:Shelf", "rlhf_mcore.containers")
    monkeypatch.setattr(EntryPoint, "load", lambda self: Shelf)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    cfg = agent(environment__container__kind="shelf", environment__agent__function="a.py:f")
    with pytest.raises(ConfigError) as raised:
        validate(cfg)
    assert "container" not in str(raised.value)
    with pytest.raises(OSError, match="img is not on the shelf"):
        asyncio.run(Containers("shelf", image="img").open(Task()))
