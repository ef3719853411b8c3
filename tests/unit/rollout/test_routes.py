"""Test routes as vLLM returns them on CUDA, and completions without routes. tests/e2e records routes on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.rollout.vllm.limits import problem_of
from rlhf_mcore.rollout.vllm.token_records import ReturnedRoutes
from rlhf_mcore.sampling.engine_loop import check_completion
from rlhf_mcore.types import ROUTES, Completion, Request, Sampling


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_of_inputs_become_those_of_the_tokens_that_they_predict(dtype: Any) -> None:
    """The first and the third of four layers are dense. There are three inputs, and one more whose token was dropped."""
    returned = np.zeros((4, 4, 2), dtype)
    returned[:, 1] = [[0, 255], [3, 4], [5, 6], [7, 8]]
    returned[:, 3] = [[9, 10], [11, 12], [13, 14], [15, 16]]
    found = ReturnedRoutes([1, 3]).take("request", SimpleNamespace(routed_experts=returned), 4)
    assert found.dtype == np.int16
    assert found[:, 0].tolist() == [[0, 0], [1, 256], [4, 5], [6, 7]]
    assert found[:, 1].tolist() == [[0, 0], [10, 11], [12, 13], [14, 15]]


@pytest.mark.parametrize("returned", [None, np.zeros((2, 4, 2), np.uint8)])
def test_too_few_are_refused(returned: Any) -> None:
    with pytest.raises(RuntimeError, match=r"the experts of (0|2) tokens for a request with 4"):
        ReturnedRoutes([1]).take("request", SimpleNamespace(routed_experts=returned), 4)


@pytest.mark.parametrize("fields", [{}, {ROUTES: np.array([0, 3, 0], np.int16)[:, None, None]}])
def test_a_completion_without_all_routes_ends_the_step(fields: Any) -> None:
    request = Request(0, "prompt 'a', sample 0", [5], Sampling(records_routes=True), seed=1)
    drawn = Completion(0, np.array([6, 7], np.int32), np.zeros(2, np.float32), ((0, 0),), "stop", fields=fields)
    with pytest.raises(
        RuntimeError, match="did not record the experts that all tokens of prompt 'a', sample 0 went to"
    ):
        check_completion(request, drawn)
    whole = np.array([0, 3, 4], np.int16)[:, None, None]
    drawn = Completion(0, drawn.token_ids, drawn.logprobs, ((0, 0),), "stop", fields={ROUTES: whole})
    check_completion(request, drawn)


def test_a_model_without_the_runner_that_returns_routes_is_refused_in_our_words() -> None:
    import vllm.config.vllm

    said = "AuxOutput Connector requires Model Runner V2"
    assert said in Path(vllm.config.vllm.__file__).read_text(), "what vLLM raises comes from vLLM itself"
    problem = problem_of(f"1 validation error: {said}; set it", {"model": "mixture"}, RolloutConfig(), on_cuda=True)
    assert problem is not None and "actor.router_replay=rollout" in problem and "old_logprobs or off" in problem
