"""Transports of the bridge that are plug-ins."""

from __future__ import annotations

import pytest

from rlhf_mcore import plugins
from rlhf_mcore.config.rules.rollout import _transport_problems
from rlhf_mcore.config.schema import BridgeConfig


@pytest.mark.parametrize(
    ("bridge", "expected"),
    [
        (BridgeConfig(transport="nixl"), ["bridge.transport=nixl", "rlhf_mcore_contrib.nixl", "pip install"]),
        (BridgeConfig(full_every=8), ["bridge.full_every=8", "rlhf_mcore_contrib.delta_sync", "pip install"]),
    ],
)
def test_a_plug_in_that_is_not_installed_is_named(
    bridge: BridgeConfig, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "find_plugins", lambda kind: {})
    (problem,) = _transport_problems(bridge)
    assert all(part in problem for part in expected), problem


def test_the_default_and_an_installed_plug_in_are_no_problem() -> None:
    assert not list(_transport_problems(BridgeConfig())) and not list(_transport_problems(BridgeConfig(full_every=8)))
