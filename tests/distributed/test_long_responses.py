"""A response may take longer than a collective's deadline while its engine samples tokens."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.long_responses_worker import LIMIT_S
from tests.distributed.world import run_world


def test_ranks_wait_for_an_engine_that_draws_tokens_and_not_for_one_that_does_not(tmp_path: Path) -> None:
    found = run_world("distributed.long_responses_worker", 2, tmp_path)
    for problem, beats in found["late"]:
        assert problem == "" and beats >= 2, "the watchdog of both ranks is told"
    (problem, _), seconds = found["stuck"]
    assert "no rank generated a token for 2 s (trainer.collective_timeout_s)" in problem
    assert LIMIT_S <= seconds < 3 * LIMIT_S
