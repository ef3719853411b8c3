"""Test a pool whose actors end during an item. Workers end in a given order."""

from __future__ import annotations

from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.pool import Outcome, WorkerLimits, WorkerLost, WorkerPool


class Dying:
    """A worker that returns the listed outcomes in turn. A text means that its actor is lost."""

    def __init__(self, outcomes: list[Outcome | str]) -> None:
        self.outcomes = outcomes

    async def load(self) -> None: ...

    def stop(self) -> None: ...

    async def answer(self, item: bytes) -> Outcome:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, str):
            raise WorkerLost(outcome)
        return outcome


def answer(outcomes: list[Outcome | str], retries: int) -> Outcome:
    pool = WorkerPool("f", "", {}, WorkerLimits(workers=1, timeout_s=1, retries=retries), lambda: Dying(outcomes))
    try:
        [outcome] = run(pool.answer_all([b"1"]))
        assert outcome is not None and not outcomes
        return outcome
    finally:
        pool.close()


def test_an_actor_and_the_process_that_ray_killed_before_it_are_one_loss() -> None:
    killed, scored = Outcome(lost="was ended by SIGKILL"), Outcome({"value": 1.0})
    assert answer([killed, "lost its actor", scored], retries=1) == scored
    assert answer([killed, "lost its actor", killed], retries=1) == killed
    assert answer(["lost its actor", "lost its actor"], retries=1).lost == "lost its actor"
    assert answer([killed, killed, "lost its actor", scored], retries=2) == scored
