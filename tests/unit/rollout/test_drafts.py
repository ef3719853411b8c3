"""What vLLM is told of drafts, and the temperature of each drafted token. Drafts themselves are in tests/e2e/rollout."""

from __future__ import annotations

import torch

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import SpeculativeConfig
from rlhf_mcore.rollout.vllm.cpu import _repeat
from rlhf_mcore.rollout.vllm.drafts import draft_options
from tests.messages import refused


def test_each_drafted_token_has_the_temperature_of_its_request() -> None:
    temperatures, ends = torch.tensor([0.7, 0.0, 1.5, 0.0]), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    found = _repeat(temperatures, ends, 6, replace_from=0, replace_to=1)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 1.5, 1.5, 1.5, 1.0]))
    assert _repeat(torch.tensor([5, 0]), torch.tensor([1, 3]), 3).tolist() == [5, 0, 0]
    assert _repeat(temperatures, torch.zeros(4, dtype=torch.int32), 0).tolist() == []


def test_what_vllm_is_told() -> None:
    assert draft_options(SpeculativeConfig(), on_cuda=True) == {}
    found = draft_options(SpeculativeConfig("ngram", num_tokens=4, ngram_tokens=2), on_cuda=False)["speculative_config"]
    assert found == {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    found = draft_options(SpeculativeConfig("mtp"), on_cuda=False)["speculative_config"]
    assert found["draft_load_config"] == {"load_format": "safetensors"}  # the model itself starts with dummy weights


def test_drafts_on_cuda_are_refused() -> None:
    with refused(ConfigError, field="rollout.speculative.method", value="mtp", remedy="off"):
        draft_options(SpeculativeConfig("mtp"), on_cuda=True)
