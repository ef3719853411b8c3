"""Whose choice of experts can be replayed: models without experts and engines that do not record are refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.config.checking import check, only
from tests.unit.config.rules.test_layouts import QWEN_MOE


@pytest.mark.parametrize(
    "mode",
    [
        "rollout",
    ],
)
def test_a_mixture_may_replay(workspace: Any, mode: str) -> None:
    workspace.write_hf_config(**QWEN_MOE)
    assert check(f"actor.router_replay={mode}") == []


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        ({}, ["actor.router_replay=rollout"], ["actor.router_replay=rollout", "no experts", "off"]),
        (
            QWEN_MOE,
            ["actor.router_replay=rollout", "rollout.engine=hf"],
            ["rollout.engine=hf does not record", "use vllm", "old_logprobs"],
        ),
        (
            QWEN_MOE,
            ["actor.router_replay=old_logprobs", "actor.megatron={moe_router_fusion: true}"],
            ["actor.router_replay=old_logprobs", "actor.megatron.moe_router_fusion", "remove"],
        ),
    ],
)
def test_what_cannot_replay_is_named(workspace: Any, model: Any, overrides: list[str], words: list[str]) -> None:
    workspace.write_hf_config(**model)
    problem = only(check(*overrides))
    assert all(word in problem for word in words), problem
