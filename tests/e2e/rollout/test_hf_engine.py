"""The reference engine against transformers' own forward pass, in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.types import Prompt, Sampling, Trajectory
from tests.e2e.rollout.drawing import drawn_until_empty, generate, logprobs_across_a_sync, requests_to
from tests.e2e.rollout.tiny import EOS, save_model
from tests.messages import expect_error

PROMPTS = [Prompt(f"p{row}", 10 + row, [3 + (5 * row + i) % 90 for i in range(2 + 4 * row)], "") for row in range(3)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("qwen3")
    save_model(directory, "qwen3", seed=0)
    return str(directory)


@pytest.fixture(scope="module")
def reference(model_dir: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(model_dir: str, reference: Any) -> Any:
    cfg = RolloutConfig(engine="hf", max_num_seqs=4)  # several batches per call
    engine = build_engine(cfg, EngineModel(model_dir, model_dir, "fp32", 48, seed=0))
    with pytest.raises(RuntimeError, match="no weights"):
        generate(engine, PROMPTS, Sampling(), step=0)
    engine.load_weights(reference.named_parameters(), version=0)
    return engine


def ids(trajectories: list[Trajectory]) -> dict[tuple[str, int], list[int]]:
    return {(t.prompt.prompt_id, t.sample): t.sampled_ids.tolist() for t in trajectories}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_logprobs_are_those_of_a_whole_forward_pass(engine: Any, reference: Any, temperature: float) -> None:
    drawn = generate(engine, PROMPTS, Sampling(n=3, temperature=temperature, max_new_tokens=12), step=1)
    assert [(t.prompt.prompt_id, t.sample) for t in drawn] == [(p.prompt_id, k) for p in PROMPTS for k in range(3)]
    for t in drawn:
        logits = reference(torch.tensor([t.prompt.prompt_ids + t.sampled_ids.tolist()])).logits[0]
        logprobs = (logits[len(t.prompt.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
        expected = logprobs[range(len(t.sampled_ids.tolist())), t.sampled_ids.tolist()]
        assert torch.allclose(torch.tensor(t.sampled_logprobs.tolist()), expected, atol=1e-4)


@torch.no_grad()
def test_greedy_follows_the_argmax(engine: Any, reference: Any) -> None:
    for t in generate(engine, PROMPTS, Sampling(temperature=0.0, max_new_tokens=12), step=0):
        logits = reference(torch.tensor([t.prompt.prompt_ids + t.sampled_ids.tolist()])).logits[0]
        assert logits[len(t.prompt.prompt_ids) - 1 : -1].argmax(-1).tolist() == t.sampled_ids.tolist()


def test_a_response_ends_with_eos_exactly_if_it_stopped(engine: Any) -> None:
    drawn = generate(engine, PROMPTS, Sampling(n=16, temperature=3.0, max_new_tokens=40), step=0)
    assert {t.finish_reason for t in drawn} == {"stop", "length"}
    for t in drawn:
        room = min(40, 48 - len(t.prompt.prompt_ids))
        if t.finish_reason == "stop":
            assert t.sampled_ids.tolist().index(EOS) == len(t.sampled_ids.tolist()) - 1
        else:
            assert EOS not in t.sampled_ids.tolist() and len(t.sampled_ids.tolist()) == room


def test_a_response_does_not_depend_on_its_batch_but_on_the_step(engine: Any) -> None:
    sampling = Sampling(n=3, max_new_tokens=12, seed=2)
    together = ids(generate(engine, PROMPTS, sampling, step=4))
    assert ids(generate(engine, PROMPTS[::-1], sampling, step=4)) == together
    assert ids([t for prompt in PROMPTS for t in generate(engine, [prompt], sampling, step=4)]) == together
    assert all(other != together[key] for key, other in ids(generate(engine, PROMPTS, sampling, step=5)).items())


def test_the_global_generator_is_not_touched(engine: Any) -> None:
    before = torch.get_rng_state()
    generate(engine, PROMPTS, Sampling(max_new_tokens=4), step=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_torn_load_leaves_the_engine_unusable_until_a_whole_one(engine: Any, reference: Any) -> None:
    pairs = list(reference.named_parameters())
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.load_weights([pair for pair in pairs if pair[0] != "model.norm.weight"], version=1)
    with pytest.raises(RuntimeError, match="did not finish"):
        generate(engine, PROMPTS, Sampling(), step=0)
    engine.load_weights(pairs, version=2)
    assert generate(engine, PROMPTS[:1], Sampling(max_new_tokens=1), step=0)[0].policy_version == 2


@pytest.mark.parametrize("mode", ["continue", "resubmit"])
def test_responses_in_flight_go_on_with_new_weights(
    engine: Any, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from transformers import AutoModelForCausalLM

    save_model(tmp_path, "qwen3", seed=1)
    after = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    engine.load_weights(reference.named_parameters(), version=5)
    requests = requests_to([*PROMPTS, *PROMPTS], Sampling(max_new_tokens=12))  # the last two wait for a batch
    undisturbed = {c.request_id: c.token_ids.tolist() for c in engine.generate(requests)}
    monkeypatch.setattr(engine, "_at_publish", mode)
    engine.submit(requests)
    for _ in range(4):
        assert engine.step() == []
    engine.cancel([1])
    engine.load_weights(after.named_parameters(), version=6)
    drawn = drawn_until_empty(engine)
    assert sorted(drawn) == [0, 2, 3, 4, 5]
    for request in [requests[place] for place in (0, 2, 3, 4, 5)]:
        completion = drawn[request.request_id]
        tokens, first = completion.token_ids.tolist(), 4 if request.request_id < 4 else 0
        assert completion.versions == (((0, 5), (4, 6)) if first else ((0, 6),))
        assert tokens[:first] == undisturbed[request.request_id][:first]
        models = (reference, after) if first else (after, after)
        expected = logprobs_across_a_sync(*models, request.prompt_ids, tokens, first or 1, recompute=mode == "resubmit")
        assert completion.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    engine.load_weights(reference.named_parameters(), version=7)


def test_the_attention_kernel_is_chosen_by_name(model_dir: str, reference: Any, engine: Any) -> None:
    model = EngineModel(model_dir, model_dir, "fp32", 48, seed=0, attention="eager")
    cfg, greedy = RolloutConfig(engine="hf", max_num_seqs=4), Sampling(temperature=0.0, max_new_tokens=12)
    eager = build_engine(cfg, model)
    assert eager.model.config._attn_implementation == "eager"
    eager.load_weights(reference.named_parameters(), version=0)
    assert ids(generate(eager, PROMPTS, greedy, step=0)) == ids(generate(engine, PROMPTS, greedy, step=0))
    with expect_error(ConfigError, field="model.attention", value="flash_attention_2", remedy="model.attention=auto"):
        build_engine(cfg, replace(model, attention="flash_attention_2"))
