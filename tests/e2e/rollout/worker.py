"""Start vLLM engines under torchrun, one layout after the other, run all checks and write the results as JSON.

Layouts are TP:DIRECTORY. DIRECTORY contains the models a and b, and receives rank<r>.json. test_vllm_engine.py asserts on the results.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GptOssConfig

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig, SpeculativeConfig
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.vllm import cpu
from rlhf_mcore.rollout.vllm.tool_calls import ToolCallParser, check_tool_parser
from rlhf_mcore.types import Completion, Prompt, Sampling, Trajectory
from tests.e2e.rollout.drawing import (
    drawn_until_empty,
    generate,
    logprobs_across_a_sync,
    requests_to,
    sampler_of,
)

NEW_TOKENS = 24
MAX_MODEL_LEN = 160
LONG_PROMPT = 95
_HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
CALLS = {  # texts of models of a family: several calls, none, a broken call
    "hermes": [f"Well.\n{_HERMES}\n{_HERMES}", "none", '<tool_call>{"name": "add", "arg</tool_call>'],
    "llama3_json": [
        '{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}',
        "none",
        '{"name": "add", "pa',
    ],
    "qwen3_coder": [
        "Well.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
        "none",
        "<tool_call>\nadd(1)",
    ],
    "pythonic": ["[add(a=1, b='x'), sub()]", "none", "[add(a="],
}


def prompts(count: int) -> list[Prompt]:
    """Return prompts of different lengths. Their row numbers differ from their positions in the list."""
    rows = [[3 + (7 * row + 5 * i) % 90 for i in range(4 + 3 * row)] for row in range(count)]
    return [Prompt(f"p{row}", 100 + row, ids, "") for row, ids in enumerate(rows)]


def summary(trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": trajectory.prompt.prompt_id,
            "sample": trajectory.sample,
            "ids": trajectory.sampled_ids.tolist(),
            "logprobs": trajectory.sampled_logprobs.tolist(),
            "text": trajectory.response_text,
            "finish": trajectory.finish_reason,
            "version": trajectory.versions[0][1],
        }
        for trajectory in trajectories
    ]


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Models:
    """Two sets of weights of an architecture, and transformers models with them."""

    def __init__(self, directory_a: str, directory_b: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.a = AutoModelForCausalLM.from_pretrained(directory_a, dtype=torch.float32).eval()
        self.b = AutoModelForCausalLM.from_pretrained(directory_b, dtype=torch.float32).eval()

    @staticmethod
    def weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(list(model.named_parameters()))  # contains a shared tensor once

    @torch.no_grad()
    def logprob_gap(self, trajectories: list[Trajectory], temperature: float, top_k: int | None = None) -> float:
        """Return the largest difference between the engine's logprobs and a whole forward pass of transformers."""
        gap = 0.0
        for trajectory in trajectories:
            prompt = trajectory.prompt.prompt_ids
            logits = self.a(torch.tensor([prompt + trajectory.sampled_ids.tolist()])).logits[0, len(prompt) - 1 : -1]
            logits = logits / temperature
            if top_k is not None:
                logits[logits < logits.sort(descending=True).values[:, top_k - 1 : top_k]] = -torch.inf
            expected = logits.log_softmax(-1)[
                range(len(trajectory.sampled_ids.tolist())), trajectory.sampled_ids.tolist()
            ]
            gap = max(gap, (expected - torch.tensor(trajectory.sampled_logprobs.tolist())).abs().max().item())
        return gap


def process_state() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads.__name__,
        "torch_rng": int(torch.get_rng_state().sum()),
        "python_rng": hash(random.getstate()),
        "local_world_size": os.environ["LOCAL_WORLD_SIZE"],
        "ld_preload": os.environ.get("LD_PRELOAD"),
        "dynamo_disabled": os.environ.get("TORCHDYNAMO_DISABLE"),
    }


def check_parity(engine: Any, models: Models, directory: str) -> dict[str, Any]:
    engine.load_weights(models.weights(models.a), version=0)
    seen: dict[str, Any] = {}
    for name, sampling, top_k in (
        ("t1.0", Sampling(n=4, temperature=1.0, max_new_tokens=NEW_TOKENS), None),
        ("t0.7", Sampling(n=4, temperature=0.7, max_new_tokens=NEW_TOKENS), None),
        ("top_k", Sampling(n=4, temperature=1.0, top_k=3, max_new_tokens=NEW_TOKENS), 3),
        ("greedy", Sampling(n=1, temperature=0.0, max_new_tokens=NEW_TOKENS), None),
    ):
        drawn = sampler_of(engine, directory).sample(prompts(4), sampling, step=3)
        seen[name] = {"gap": models.logprob_gap(drawn, sampling.temperature or 1.0, top_k), "drawn": summary(drawn)}
    return seen


def check_norms(model: torch.nn.Module) -> list[float]:
    """Return the differences between CPU kernels of norms and vLLM's single operations. Rows are not contiguous."""
    seen = []
    for norm in model.modules():
        if getattr(getattr(norm, "_forward_method", None), "func", None) is cpu._norm:
            draw = torch.randn(2, 5, 2, 192, generator=torch.Generator().manual_seed(0))
            x, residual = draw[..., : norm.weight.numel()]
            expected = norm.forward_native(x), *norm.forward_native(x, residual)
            found = norm(x), *norm(x, residual)
            seen += [(ours - theirs).abs().max().item() for ours, theirs in zip(found, expected, strict=True)]
    return seen


def check_greedy_hf(models: Models, directory: str) -> list[dict[str, Any]]:
    """Return the responses of our own loop over transformers with the same weights."""
    cfg = RolloutConfig(engine="hf")
    engine = build_engine(cfg, EngineModel(directory, directory, "fp32", MAX_MODEL_LEN, seed=0))
    engine.load_weights(models.weights(models.a), version=0)
    greedy = Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS)
    return summary(sampler_of(engine, directory).sample(prompts(4), greedy, step=0))


def check_reload(engine: Any, models: Models) -> dict[str, Any]:
    greedy = Sampling(n=1, temperature=0.0, max_new_tokens=NEW_TOKENS)
    seen = {}
    for name, model, version in (("a", models.a, 1), ("b", models.b, 2), ("a again", models.a, 3)):
        engine.load_weights(models.weights(model), version=version)
        seen[name] = summary(generate(engine, prompts(4), greedy, step=0))
    return seen


def check_seeds(engine: Any, directory: str) -> dict[str, Any]:
    worker = sampler_of(engine, directory)
    sampling = Sampling(n=3, temperature=1.0, max_new_tokens=NEW_TOKENS, seed=5)
    return {
        "together": summary(worker.sample(prompts(5), sampling, step=7)),
        "alone": summary([t for prompt in prompts(5) for t in worker.sample([prompt], sampling, step=7)]),
        "reversed": summary(worker.sample(prompts(5)[::-1], sampling, step=7)),
        "next step": summary(worker.sample(prompts(5), sampling, step=8)),
    }


def check_broken_loads(engine: Any, models: Models) -> dict[str, Any]:
    greedy = Sampling(n=1, temperature=0.0, max_new_tokens=NEW_TOKENS)
    pairs = list(models.weights(models.b))

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in pairs:
            if "layers.1.self_attn.v_proj" in name:
                raise RuntimeError("the wire broke")
            yield name, tensor

    seen: dict[str, Any] = {}
    for name, weights in (
        ("torn", torn()),
        ("missing", [pair for pair in pairs if "layers.1.self_attn.k_proj" not in pair[0]]),
        ("misshapen", [(key, tensor[1:] if "gate_proj" in key else tensor) for key, tensor in pairs]),
        ("unknown", [*pairs, ("model.layers.9.mlp.up_proj.weight", torch.zeros(2, 2))]),
    ):
        seen[name] = {
            "error": error_of(engine.load_weights, weights, version=9),
            "version": engine.policy_version,
            "generate": error_of(generate, engine, prompts(1), greedy, step=0),
        }
    engine.load_weights(models.weights(models.a), version=10)
    seen["repaired"] = summary(generate(engine, prompts(4), greedy, step=0))
    return seen


def check_long_prompts(engine: Any, models: Models) -> dict[str, Any]:
    """Return 64 responses to prompts of 95 tokens, and the number of preemptions of running responses."""
    engine.load_weights(models.weights(models.a), version=20)
    engine.pop_preemptions()
    scheduler, preempted = engine._llm.llm_engine.engine_core.engine_core.scheduler, 0
    preempt = scheduler._preempt_request

    def counting(*args: Any, **kwargs: Any) -> None:
        nonlocal preempted
        preempted += 1
        preempt(*args, **kwargs)

    scheduler._preempt_request = counting
    rows = [[3 + (7 * row + 5 * i) % 90 for i in range(LONG_PROMPT)] for row in range(8)]
    long = [Prompt(f"l{row}", row, ids, "") for row, ids in enumerate(rows)]
    drawn = generate(engine, long, Sampling(n=8, temperature=0.8, max_new_tokens=60), step=2)
    scheduler._preempt_request = preempt
    return {"drawn": summary(drawn), "preempted": preempted, "reported": engine.pop_preemptions()}


def check_small_budgets(tp: int, directory: str, models: Models) -> dict[str, Any]:
    """Repeat with a token budget that splits every prompt, and then with a cache for a few responses, and for none."""
    seen = {}
    for name, kv_cache_gib in (("budget", 0.125), ("budget and cache", 0.0004), ("no cache", 0.00005)):
        cfg = RolloutConfig(layout=RolloutLayoutConfig(tp=tp), kv_cache_gib=kv_cache_gib, max_num_batched_tokens=64)
        try:
            engine: Any = build_engine(cfg, EngineModel(directory, directory, "fp32", MAX_MODEL_LEN, seed=0))
        except ConfigError as error:
            seen[name] = str(error)
            continue
        seen[name] = check_long_prompts(engine, models)
        engine.close()
    return seen | {"narrow experts": check_narrow_experts(tp, Path(directory))}


def check_drafts(directory: str, models: Models) -> dict[str, Any]:
    """Check an engine with n-gram drafts: logprobs, seeds, passes, and the distribution of samples."""
    drafts = SpeculativeConfig(method="ngram", num_tokens=3, ngram_tokens=1)
    cfg = RolloutConfig(kv_cache_gib=0.125, max_num_seqs=128, speculative=drafts)
    engine: Any = build_engine(cfg, EngineModel(directory, directory, "fp32", MAX_MODEL_LEN, seed=0))
    with torch.no_grad():
        models.a.model.norm.weight *= 4  # more certain of its tokens, so that drafts are accepted
    engine.load_weights(models.weights(models.a), version=50)
    greedy = Sampling(n=1, temperature=0.0, max_new_tokens=NEW_TOKENS)
    sampling = Sampling(n=4, temperature=0.7, max_new_tokens=NEW_TOKENS, seed=5)
    drawn = generate(engine, prompts(4), sampling, step=3)
    alone = [t for prompt in prompts(4) for t in generate(engine, [prompt], sampling, step=3)]
    seen = {
        "greedy": summary(sampler_of(engine, directory).sample(prompts(4), greedy, step=0)),
        "gap": models.logprob_gap(drawn, 0.7),
        "gap of the likeliest": models.logprob_gap(
            generate(engine, prompts(4), replace(sampling, top_k=5), step=3), 0.7, 5
        ),
        "together": summary(drawn),
        "alone": summary(alone),
    }
    [request] = requests_to(prompts(1), Sampling(temperature=0.0, max_new_tokens=100))
    engine.submit([request])
    passes, found = 0, []
    while not found:
        passes, found = passes + 1, engine.step()
    seen["passes"] = [passes, len(found[0].token_ids)]
    seen["deviations"] = deviations(engine, models) if dist.get_rank() == 0 else []
    seen["threads"] = torch.get_num_threads()
    engine.close()
    return seen


@torch.no_grad()
def deviations(engine: Any, models: Models, count: int = 1500, temperature: float = 0.7) -> list[float]:
    """Return how many standard deviations the counts of the likeliest first-token pairs are from their expected values."""
    prompt, sampling = (
        Prompt("repeats", 0, [10, 11, 12, 13] * 3, ""),
        Sampling(temperature=temperature, max_new_tokens=2),
    )
    requests = [replace(r, seed=k) for k, r in enumerate(requests_to([prompt] * count, sampling))]
    drawn = Counter(tuple(completion.token_ids.tolist()) for completion in engine.generate(requests))

    def logprobs(*tokens: int) -> torch.Tensor:
        return (models.a(torch.tensor([[*prompt.prompt_ids, *tokens]])).logits[0, -1] / temperature).log_softmax(-1)

    pairs = {}
    for one in logprobs().topk(4).indices.tolist():
        second = logprobs(one)
        pairs |= {(one, two): float((logprobs()[one] + second[two]).exp()) for two in second.topk(3).indices.tolist()}
    return [(drawn[pair] - count * p) / (count * p * (1 - p)) ** 0.5 for pair, p in pairs.items() if 1 not in pair]


def check_narrow_experts(tp: int, directory: Path) -> str:
    """Return the error for a gpt-oss whose experts are narrower on a rank than vLLM's kernel supports."""
    path = directory.with_name(f"{directory.name}_narrow_{dist.get_rank()}")
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    GptOssConfig(
        **sizes, head_dim=32, vocab_size=97, num_hidden_layers=1, architectures=["GptOssForCausalLM"]
    ).save_pretrained(path)
    cfg = RolloutConfig(layout=RolloutLayoutConfig(tp=tp), kv_cache_gib=0.02)
    return error_of(build_engine, cfg, EngineModel(str(path), str(directory), "fp32", MAX_MODEL_LEN, seed=0, shapes={}))


def long_prompts(count: int) -> list[Prompt]:
    """Return prompts that each fill several blocks of the cache."""
    return [Prompt(f"s{row}", row, [3 + (11 * row + 5 * i) % 90 for i in range(70)], "") for row in range(count)]


def summarize(completions: dict[int, Completion]) -> dict[str, Any]:
    return {
        str(request_id): [drawn.token_ids.tolist(), [list(run) for run in drawn.versions]]
        for request_id, drawn in sorted(completions.items())
    }


def check_streaming(engine: Any, models: Models) -> dict[str, Any]:
    """Check requests that start, end and are cancelled at any time, with unchanged weights."""
    engine.load_weights(models.weights(models.a), version=30)
    requests = requests_to(long_prompts(4), Sampling(max_new_tokens=NEW_TOKENS))
    seen: dict[str, Any] = {"alone": summarize({c.request_id: c for r in requests for c in engine.generate([r])})}
    engine.submit(requests[:2])
    for _ in range(5):
        engine.step()
    engine.submit(requests[2:])
    seen["same id"] = error_of(engine.submit, requests[:1])
    seen["late"] = summarize(drawn_until_empty(engine))
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    before, in_flight = engine.num_sampled_tokens, engine.num_in_flight
    engine.cancel([1, 3, 99])
    other = requests_to(prompts(1), Sampling(max_new_tokens=4), first_id=50)
    seen["generated meanwhile"] = [completion.request_id for completion in engine.generate(other)]
    seen["not cancelled"] = summarize(drawn_until_empty(engine))
    seen["counts"] = [in_flight, engine.num_in_flight, engine.num_sampled_tokens - before]
    return seen


def check_other_rank(engine: Any, models: Models) -> dict[str, Any]:
    """Check responses of one token. The second rank once samples different tokens."""
    engine.load_weights(models.weights(models.a), version=35)
    model, seen = engine._worker().model_runner.model, {}
    requests = requests_to(long_prompts(2), Sampling(temperature=0.0, max_new_tokens=1))
    logits = model.compute_logits
    if dist.get_rank() == 1:
        model.compute_logits = lambda *args: logits(*args).roll(1, -1)
    seen["generate"] = error_of(engine.generate, requests)
    engine.submit(requests)
    seen["steps"] = error_of(drawn_until_empty, engine)
    model.compute_logits = logits
    seen["again"] = error_of(engine.generate, requests)
    return seen


def check_publish(engine: Any, models: Models, mode: str) -> dict[str, Any]:
    """Publish new weights while three responses are sampled, and then submit a request with one of their prompts."""
    engine.load_weights(models.weights(models.a), version=40)
    requests = requests_to(long_prompts(3), Sampling(max_new_tokens=NEW_TOKENS))
    undisturbed = {c.request_id: c.token_ids.tolist() for c in engine.generate(requests)}
    engine._at_publish = mode
    engine.submit(requests)
    finished = [completion for _ in range(6) for completion in engine.step()]
    assert not finished, "the seeds are those of responses that are longer"
    if mode == "drain":
        error = error_of(engine.load_weights, models.weights(models.b), version=41)
        drawn = drawn_until_empty(engine)
        engine._at_publish = "continue"
        return {"error": error, "drawn": summarize(drawn)}
    engine.load_weights(models.weights(models.b), version=41)
    engine.submit(requests_to(long_prompts(1), Sampling(max_new_tokens=NEW_TOKENS), first_id=7))
    drawn, gap, before, fresh = drawn_until_empty(engine), 0.0, [], 0.0
    engine._at_publish = "continue"
    for request in requests if engine.rank.is_lead else ():
        completion = drawn[request.request_id]
        tokens, [(_, _), (first, _)] = completion.token_ids.tolist(), completion.versions
        expected = logprobs_across_a_sync(
            models.a, models.b, request.prompt_ids, tokens, first, recompute=mode == "resubmit"
        )
        gap = max([gap, *(abs(a - b) for a, b in zip(expected, completion.logprobs.tolist(), strict=True))])
        before.append(tokens[:first] == undisturbed[request.request_id][:first])
    if engine.rank.is_lead:
        tokens = drawn[7].token_ids.tolist()
        expected = logprobs_across_a_sync(models.b, models.b, long_prompts(1)[0].prompt_ids, tokens, 1, recompute=True)
        fresh = max(abs(a - b) for a, b in zip(expected, drawn[7].logprobs.tolist(), strict=True))
    return {"drawn": summarize(drawn), "gap": gap, "same before": before, "gap of a fresh request": fresh}


def parse_tool_calls(directory: str) -> dict[str, Any]:
    """Return the results of vLLM's parsers for texts, by parser name, and the errors for unusable names."""
    from vllm.tool_parsers import ToolParserManager

    tokenizer = load_tokenizer(directory)
    seen: dict[str, Any] = {"names": ToolParserManager.list_registered()}
    for name in ("nothing", "llama3_json"):
        seen[name] = error_of(ToolCallParser, name, tokenizer)
    seen["nothing, before vLLM is imported"] = error_of(check_tool_parser, "nothing")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>", "<tool_call>", "</tool_call>"]})
    for name, texts in CALLS.items():
        parse = ToolCallParser(name, tokenizer, tools)
        found = [parse(text) for text in texts]
        seen[name + " finds"] = [
            [
                each["content"],
                [[call["function"]["name"], call["function"]["arguments"]] for call in each["tool_calls"]],
            ]
            for each in found
        ]
        seen["message"] = found[0]
    return seen


def try_engine(tp: int, directory: Path) -> None:
    directory_a = str(directory / "a")
    models = Models(directory_a, str(directory / "b"))
    before = process_state()
    cfg = RolloutConfig(layout=RolloutLayoutConfig(tp=tp), kv_cache_gib=0.125, max_num_seqs=128)
    engine: Any = build_engine(cfg, EngineModel(directory_a, directory_a, "fp32", MAX_MODEL_LEN, seed=0))
    seen: dict[str, Any] = {
        "engine": [*astuple(engine.rank), engine.policy_version],
        "too early": error_of(generate, engine, prompts(1), Sampling(), step=0),
        "kernels": engine.kernels(),
        "parity": check_parity(engine, models, directory_a),
        "norms": check_norms(engine.model),
        "process": {"before": before, "after": process_state()},
        "hf": check_greedy_hf(models, directory_a),
        "seeds": check_seeds(engine, directory_a),
        "reload": check_reload(engine, models),
        "broken": check_broken_loads(engine, models),
    }
    engine.sleep()
    engine.wake()
    seen["after sleep"] = engine.policy_version
    seen["too long"] = error_of(generate, engine, [Prompt("long", 0, [5] * MAX_MODEL_LEN, "")], Sampling(), step=0)
    if tp > 1:  # only once, because the ranks of an engine share this work
        seen["long"] = {"whole": check_long_prompts(engine, models)}
    seen["streaming"] = check_streaming(engine, models)
    seen["other rank"] = check_other_rank(engine, models)
    seen["publish"] = {mode: check_publish(engine, models, mode) for mode in ("continue", "resubmit", "drain")}
    engine.close()
    seen["closed"] = error_of(generate, engine, prompts(1), Sampling(), step=0)
    ranks = torch.ones(1)
    dist.all_reduce(ranks)  # the trainer's group still works after the engine
    seen["ranks after close"] = ranks.item()
    if tp > 1:
        seen["long"] |= check_small_budgets(tp, directory_a, models)
    else:
        seen["drafts"] = check_drafts(directory_a, models)
        seen["tool calls"] = parse_tool_calls(directory_a)
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))


def main(_directory: Path, *layouts: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    for layout in layouts:
        tp, directory = layout.split(":", 1)
        try_engine(int(tp), Path(directory))
    dist.destroy_process_group()
