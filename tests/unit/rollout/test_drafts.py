"""Test vLLM's settings for drafts, and how drafts are loaded and counted. tests/e2e/rollout tests real drafts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig, SpeculativeConfig
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.vllm.cpu import _repeat
from rlhf_mcore.rollout.vllm.drafts import DraftedModel, DraftRecord, Drafts, learned_names
from tests.messages import expect_error

OF_DRAFT = "model.layers.2.enorm.weight"
SHAPES: dict[str, tuple[int, ...]] = {"model.norm.weight": (4,), OF_DRAFT: (4,)}


def engine_model(directory: Path, shapes: dict[str, tuple[int, ...]] | None) -> EngineModel:
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    return EngineModel(str(directory), str(directory), "fp32", 64, 0, shapes)


def draft_settings(directory: Path, drafts: SpeculativeConfig, shapes: dict[str, tuple[int, ...]] | None = None) -> Any:
    made = Drafts(RolloutConfig(speculative=drafts), engine_model(directory, shapes), on_cuda=False)
    return made.options["speculative_config"]


def test_each_drafted_token_has_the_temperature_of_its_request() -> None:
    temperatures, ends = torch.tensor([0.7, 0.0, 1.5, 0.0]), torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    found = _repeat(temperatures, ends, 6, replace_from=0, replace_to=1)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 1.5, 1.5, 1.5, 1.0]))
    assert _repeat(torch.tensor([5, 0]), torch.tensor([1, 3]), 3).tolist() == [5, 0, 0]
    assert _repeat(temperatures, torch.zeros(4, dtype=torch.int32), 0).tolist() == []


def test_what_vllm_is_told(tmp_path: Path) -> None:
    found = draft_settings(tmp_path, SpeculativeConfig(method="ngram", num_tokens=4, ngram_tokens=2))
    assert found == {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 2}
    of_files = {"load_format": "safetensors"}  # the model itself starts with dummy weights
    for shapes in (None, {"model.norm.weight": (4,)}):
        assert draft_settings(tmp_path, SpeculativeConfig(method="mtp"), shapes)["draft_load_config"] == of_files
    assert draft_settings(tmp_path, SpeculativeConfig(method="mtp"), SHAPES) == {
        "method": "mtp",
        "num_speculative_tokens": 1,
    }, "sent"


@pytest.mark.parametrize(
    ("shapes", "rollout", "is_refused"),
    [
        (None, {}, True),
        (None, {"sleep_level": 1}, False),
        (None, {"sleep_level": 0}, False),
        (None, {"placement": "disaggregated"}, False),
        (SHAPES, {}, False),
    ],
)
def test_a_sleep_on_cuda_does_not_discard_what_no_sync_brings_back(
    tmp_path: Path, shapes: Any, rollout: dict[str, Any], is_refused: bool
) -> None:
    cfg, model = RolloutConfig(speculative=SpeculativeConfig(method="mtp"), **rollout), engine_model(tmp_path, shapes)
    if is_refused:
        with expect_error(ConfigError, field="rollout.speculative.method", value="mtp", remedy="rollout.sleep_level=1"):
            Drafts(cfg, model, on_cuda=True)
    else:
        assert Drafts(cfg, model, on_cuda=True).options


@pytest.mark.parametrize(("quantization", "suffix"), [("fp8", "_scale_inv"), ("int8", "_scale")])
def test_scales_of_a_draft_go_where_its_weights_of_8_bits_go(tmp_path: Path, quantization: str, suffix: str) -> None:
    matrices = {f"model.layers.{layer}.self_attn.o_proj.weight": (256, 256) for layer in (1, 2)}
    model = engine_model(tmp_path, SHAPES | matrices)
    cfg = RolloutConfig(speculative=SpeculativeConfig(method="mtp"), quantization=quantization)
    weight = "model.layers.2.self_attn.o_proj.weight"
    assert learned_names(cfg, model) == {OF_DRAFT, weight, weight + suffix}
    assert learned_names(cfg.model_copy(update={"quantization": None}), model) == {OF_DRAFT, weight}


class Loader(nn.Module):
    """A model that records how it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.calls.append([])
        for name, _ in weights:
            self.calls[-1].append(name)
        return {f"parameter of {name}" for name in self.calls[-1]}


def test_each_tensor_is_loaded_where_it_belongs_one_at_a_time() -> None:
    model, draft, given = Loader(), Loader(), list[str]()

    def weights() -> Any:
        for name in ("first", "draft 1", "draft 2", "last"):
            given.append(name)
            loaded = [name for each in (model, draft) for call in each.calls for name in call]
            assert len(loaded) >= len(given) - 1, "none is held back: a whole model has no room"
            yield name, torch.zeros(1)

    found = DraftedModel(model, draft, {"draft 1", "draft 2"}).load_weights(weights())
    assert model.calls == [["first", "last"]]
    assert draft.calls == [["draft 1", "draft 2"]], "of DeepSeek vLLM refuses a part"
    names = {"model": ("first", "last"), "draft": ("draft 1", "draft 2")}
    assert found == {f"{part}.parameter of {name}" for part in names for name in names[part]}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("shapes", [SHAPES, None])
@pytest.mark.parametrize("draft", [Loader(), None])
def test_what_is_loaded_is_the_draft_too_where_one_is_and_learns(
    tmp_path: Path, pp: int, shapes: Any, draft: Loader | None
) -> None:
    """A stage before the last has no draft model. Stages share the drafts if there are several."""
    layout, drafts = RolloutLayoutConfig(pp=pp), SpeculativeConfig(method="mtp")
    cfg = RolloutConfig(layout=layout, speculative=drafts, sleep_level=1)
    made, model = Drafts(cfg, engine_model(tmp_path, shapes), on_cuda=True), Loader()
    runner, core = object(), SimpleNamespace(scheduler=SimpleNamespace(make_spec_decoding_stats=None))
    worker = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: draft, model_runner=runner)
    with mock.patch("rlhf_mcore.rollout.vllm.drafts.share_drafts") as share:
        made.attach(worker, core)
    assert share.mock_calls == ([mock.call(runner, core)] if pp == 2 else [])
    if draft is None or shapes is None:
        assert made.model is None
    else:
        assert made.model is not None and (made.model.model, made.model.draft) == (model, draft)


def test_drafts_are_noted_at_the_token_that_their_pass_begins_with() -> None:
    requests, counted = {"a": SimpleNamespace(num_output_tokens=1)}, list[Any]()
    scheduler: Any = SimpleNamespace(requests=requests, make_spec_decoding_stats=lambda *given: counted.append(given))
    record = DraftRecord(scheduler)
    for tokens, drafted, taken in ((1, 2, 2), (4, 2, 0), (5, 1, 1)):
        requests["a"].num_output_tokens = tokens
        scheduler.make_spec_decoding_stats(
            None, num_draft_tokens=drafted, num_accepted_tokens=taken, num_invalid_spec_tokens=None, request_id="a"
        )
    assert record.take("a", 7).tolist() == [[0, 0], [2, 2], [0, 0], [0, 0], [2, 0], [1, 1], [0, 0]]
    assert record.take("a", 2).tolist() == [[0, 0], [0, 0]], "taken once; and a request may have had no drafts"
    assert counted == [(None, 2, 2, None, "a"), (None, 2, 0, None, "a"), (None, 1, 1, None, "a")], "vLLM counts too"
