"""Test the agreement of engine stages. tests/e2e/rollout runs real engines with stages and drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from rlhf_mcore.rollout.vllm import stages


@pytest.mark.parametrize(("memory", "others", "expected"), [(60, 15, 15), (60, 20, 20), (60, 25, 20)])
def test_stages_have_as_many_blocks_as_that_with_fewest(memory: int, others: int, expected: int) -> None:
    """This stage has three layers, whose blocks take a unit of memory each."""
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks_override=None))

    def vllms(vllm_config: Any, specs: list[dict[str, int]], memories: list[int]) -> list[Any]:
        blocks = vllm_config.cache_config.num_gpu_blocks_override or memories[0] // sum(specs[0].values())
        return [SimpleNamespace(num_blocks=blocks)]

    with mock.patch.object(stages, "all_gather_json", lambda own: [others, own]):
        [found] = stages._with_fewest_blocks(vllms)(config, [{"a": 1, "b": 1, "draft": 1}], [memory])
    assert found.num_blocks == expected
