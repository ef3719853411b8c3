"""The order in which a vLLM engine may be used, seen on one with a fake inside. The real one is in tests/e2e."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from torch import Tensor

from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.rollout.vllm_engine import VLLMEngine
from rlhf_mcore.rollout.weights import ExpectedTensors


class LLM:
    """Writes down what it is told, and finds every reload complete."""

    def __init__(self, *, resets: bool = True) -> None:
        self.told: list[Any] = []
        self.resets = resets

    def sleep(self, level: int) -> None:
        self.told.append(("sleep", level))

    def wake_up(self) -> None:
        self.told.append("wake")

    def collective_rpc(self, method: Any, args: Any = ()) -> list[Any]:
        weights: Iterable[tuple[str, Tensor]] = args[0]
        self.told.append(("reload", [name for name, _ in weights]))
        return [[]]

    def reset_prefix_cache(self) -> bool:
        self.told.append("reset")
        return self.resets


def engine(llm: LLM) -> VLLMEngine:
    """An engine on CUDA, as it is after its start."""
    made = object.__new__(VLLMEngine)
    super(VLLMEngine, made).__init__()
    made._llm, made._can_sleep, made._asleep = llm, True, False
    made._expected = ExpectedTensors.of_shapes({})
    return made


def test_fault_21_a_wake_without_a_sync_leaves_nothing_to_generate_with() -> None:
    llm = LLM()
    which = engine(llm)
    which.load_weights(iter(()), version=3)
    which.require_weights()
    which.sleep()
    for refused in (lambda: which.load_weights(iter(()), version=4), lambda: which.updating(version=4).__enter__()):
        with pytest.raises(RuntimeError, match=r"sleeps: call wake\(\)"):
            refused()
    which.wake()
    with pytest.raises(RuntimeError, match=r"cannot generate: its weights were discarded by sleep"):
        which.require_weights()
    assert which.policy_version == -1
    which.load_weights(iter(()), version=4)
    which.require_weights()
    assert which.policy_version == 4
    assert llm.told == [("reload", []), "reset", ("sleep", 2), "wake", ("reload", []), "reset"]


def test_fault_22_new_weights_never_meet_the_old_prefix_cache() -> None:
    which = engine(LLM(resets=False))
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        which.load_weights(iter(()), version=5)
    with pytest.raises(RuntimeError, match="cannot generate: the last load of weights did not finish"):
        which.require_weights()


@pytest.mark.parametrize(
    ("sequences", "budget", "expected"),
    [(256, None, (256, None)), (256, 64, (64, 64)), (5000, None, (5000, 16384)), (20000, None, (20000, 20000))],
)
def test_a_pass_has_room_for_a_token_of_every_sequence(
    sequences: int, budget: int | None, expected: tuple[int, int | None]
) -> None:
    made = engine(LLM())
    made._on_cuda, made._max_model_len = False, 128
    cfg = RolloutConfig(max_num_seqs=sequences, max_num_batched_tokens=budget)
    options = made._options(cfg, model_dir="model", dtype="fp32", seed=0)
    assert (options["max_num_seqs"], options.get("max_num_batched_tokens")) == expected
