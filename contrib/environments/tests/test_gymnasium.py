"""The gymnasium adapter with an environment of the package."""

from __future__ import annotations

import sys

import pytest

from rlhf_mcore.config.choices import CONTRIB_ENVIRONMENTS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.worker import load_environment
from rlhf_mcore_contrib.environments.gymnasium import Gymnasium
from rlhf_mcore_contrib.environments.openenv import OpenEnv
from rlhf_mcore_contrib.environments.verifiers import Verifiers
from tests.messages import expect_error


def test_a_walk_over_the_frozen_lake() -> None:
    pytest.importorskip("gymnasium")
    lake = Gymnasium("FrozenLake-v1", ["left", "down", "right", "up"], arguments={"is_slippery": False})
    assert lake.reset({"prompt": "go"}, seed=2**40) == "0"
    assert lake.step("fly") == ("choose one of: left, down, right, up", 0.0, False)
    walked = [lake.step(f"{way} please") for way in ("down", "down", "right", "right", "down", "right")]
    assert walked == [(cell, float(cell == "15"), cell == "15") for cell in ("4", "8", "9", "10", "14", "15")]
    lake.close()
    with expect_error(ConfigError, field="environment.options.id", value="Nowhere-v0"):
        Gymnasium("Nowhere-v0")


def test_without_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match="install it"):
        Gymnasium("FrozenLake-v1")


def test_workers_load_these_environments_as_plugins() -> None:
    assert [load_environment(name) for name in CONTRIB_ENVIRONMENTS] == [Gymnasium, OpenEnv, Verifiers]
