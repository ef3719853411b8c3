"""Run vLLM engines in separate processes, with TP 2 and with shared experts.

Two trainer ranks send the weights over one group.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.e2e.bridge.remote_worker import LAYOUTS

CASES = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.bridge.remote_worker", 2, tmp_path_factory.mktemp("remote"), timeout_s=560)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_engines_are_as_if_they_had_loaded_the_files(findings: Any, model: str, layout: str) -> None:
    """Parameters are equal bit for bit, and so are the responses. The syncs compare digests."""
    found = findings[model][layout]
    for synced, loaded in zip(found["synced"], found["loaded"], strict=True):
        assert synced["live"] == loaded["live"] and synced["said"] == loaded["said"]
        assert len(synced["live"]) > 4 and loaded["version"] == 99
    assert {synced["version"] for synced in found["synced"]} == {LAYOUTS[model].index(layout)}
    assert sum(bool(synced["said"]) for synced in found["synced"]) == len({n.partition(".")[0] for n in found["names"]})


def test_ranks_of_an_engine_receive_what_they_need_and_no_more(findings: Any) -> None:
    """Two tensor-parallel ranks each need half of the matrices, and all norms and the one key-value head."""
    for layout in LAYOUTS["qwen3_tied"]:
        answers = {answer["engine"]: answer["answer"] for answer in findings["qwen3_tied"][layout]["answers"]}
        replicated = 4 * (2 * 64 + 2 * 32 + 2 * 32 * 64) + 64
        cut = 4 * (2 * 128 * 64 + 3 * 96 * 64)
        words = (64, 33)  # vLLM pads 97 to 128
        for rank in (0, 1):
            for engine in "ab":
                received = answers[f"{engine}.{rank}"]["received_bytes"]
                assert received == 4 * (replicated + cut // 2 + words[rank] * 64)


def test_fault_20_an_engine_of_which_one_rank_is_killed_is_left_out(findings: Any) -> None:
    found = findings["qwen3_tied"]["killed"]
    assert found["names"] == ["a.0", "a.1"]
    last = findings["qwen3_tied"][LAYOUTS["qwen3_tied"][-1]]["synced"]
    assert found["seen"] == [{**seen, "version": 50} for seen in last[:2]]
