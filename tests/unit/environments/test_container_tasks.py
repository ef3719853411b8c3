"""Tasks of rows for containers, and keys of containers: accepted and rejected values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.environments.containers.task import Task, TaskTests, task_of


def test_rows() -> None:
    told = {"image": "img", "workdir": "/w", "env": {"A": "b"}, "files": {"a": "text", "b": None}, "setup": "one"}
    task = task_of({"container": {**told, "tests": {"command": ["x", "y"], "files": {"/t": "1"}, "timeout_s": 5}}})
    assert task == Task(
        "img", {}, "/w", {"A": "b"}, {"a": b"text"}, ("one",), TaskTests("x && y", {"/t": b"1"}, {}, 5.0)
    )
    assert task_of({"container": json.dumps({"tests": "true"})}).tests == TaskTests("true")
    assert task_of({}) == task_of({"container": None}) == Task()


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ("{", "is not JSON"),
        ([1], "must be an object"),
        ({"imag": "x"}, "has unknown fields: imag"),
        ({"image": 3}, "image must be a non-empty text"),
        ({"workdir": "app"}, "give an absolute path"),
        ({"setup": [1]}, "setup must be a command"),
        ({"files": ["a"]}, "files must be an object"),
        ({"env": {"A=": "b"}}, "env must be an object"),
        ({"tests": {"files": {}}}, "tests has no command"),
        ({"tests": {"command": "x", "timeout_s": -1}}, "timeout_s must be a number above 0"),
    ],
)
def test_rows_that_are_not_as_they_should_be(told: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        task_of({"container": told})


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({"kind": "sandbox"}, "environment.container.kind=sandbox needs an agent, found environment.function=None"),
        (
            {"kind": "remote"},
            "environment.container.kind=remote and environment.container.url=None: the url names the service",
        ),
        ({"kind": "docker", "url": "http://x"}, "the url has no effect"),
        (
            {"kind": "remote", "url": "ftp://x"},
            "container.url='ftp://x' is not valid; give a URL that begins with http",
        ),
        ({"kind": "sandbox", "network": True}, "environment.container.network needs Docker or Podman"),
    ],
)
def test_keys_that_do_not_fit(own: dict[str, Any], problem: str) -> None:
    cfg = Config()
    with pytest.raises(ConfigError) as raised:
        for name, value in own.items():
            setattr(cfg.environment.container, name, value)
        validate(cfg)
    assert problem in str(raised.value)
