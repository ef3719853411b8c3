"""Run the colocated vLLM engine under torchrun with two ranks, as two engines and as one engine over both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.world import run_world
from tests.e2e.processors import ALL_REDUCE
from tests.e2e.rollout.tiny import EOS, VOCABULARY, save_model

Seen = list[dict[str, Any]]  # the result of each rank


LAYOUTS = {"two_engines": ("qwen3", 1), "one_engine": ("llama", 2)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Run all layouts under one torchrun, because imports and process groups cost more than the engines."""
    directories = {name: tmp_path_factory.mktemp(name) for name in LAYOUTS}
    for name, (family, _) in LAYOUTS.items():
        for letter, seed in (("a", 1), ("b", 2)):
            save_model(directories[name] / letter, family, seed)
    whole = tmp_path_factory.mktemp("engines")
    run_world("e2e.rollout.worker", 2, whole, *(f"{tp}:{directories[name]}" for name, (_, tp) in LAYOUTS.items()))
    console = (whole / "output.txt").read_text()
    return {name: [read_rank(directory, rank, console) for rank in range(2)] for name, directory in directories.items()}


def read_rank(directory: Path, rank: int, console: str) -> dict[str, Any]:
    return {**json.loads((directory / f"rank{rank}.json").read_text()), "console": console}


@pytest.fixture(scope="module")
def two_engines(runs: dict[str, Seen]) -> Seen:
    return runs["two_engines"]


@pytest.fixture(scope="module")
def one_engine(runs: dict[str, Seen]) -> Seen:
    return runs["one_engine"]


@pytest.fixture(scope="module", params=list(LAYOUTS))
def seen(request: pytest.FixtureRequest, runs: dict[str, Seen]) -> Seen:
    return runs[request.param]


def test_ranks_know_their_engine(two_engines: Seen, one_engine: Seen) -> None:
    assert [rank["engine"] for rank in two_engines] == [[0, 2, True, -1], [1, 2, True, -1]]
    assert [rank["engine"] for rank in one_engine] == [[0, 1, True, -1], [0, 1, False, -1]]


def test_an_engine_names_its_backends(two_engines: Seen, one_engine: Seen) -> None:
    assert [rank["kernels"] for rank in two_engines] == 2 * [{"engine attention": "CPU_ATTN"}]
    both = {"engine attention": "CPU_ATTN", "engine all-reduce": ALL_REDUCE}
    assert [rank["kernels"] for rank in one_engine] == [both, both]


def test_a_rank_that_samples_other_tokens_is_an_error(one_engine: Seen, two_engines: Seen) -> None:
    for rank in one_engine:
        for name in ("generate", "steps"):
            assert "ranks [1] of engine 0 sampled other tokens" in rank["other rank"][name]
        assert rank["other rank"]["again"] == "nothing was raised"
    for rank in two_engines:  # nothing to compare with
        assert set(rank["other rank"].values()) == {"nothing was raised"}


def test_only_the_lead_of_an_engine_returns_trajectories(one_engine: Seen) -> None:
    lead, other = one_engine
    assert len(lead["seeds"]["together"]) == 15
    assert other["seeds"]["together"] == []


@pytest.mark.parametrize("setting", ["t1.0", "t0.7", "top_k", "greedy"])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(seen: Seen, setting: str) -> None:
    assert sum(len(drawn["ids"]) for drawn in seen[0]["parity"][setting]["drawn"]) > 20
    for rank in seen:
        assert rank["parity"][setting]["gap"] < 1e-4


def test_norms_are_one_operation_each(two_engines: Seen, one_engine: Seen) -> None:
    for seen, norms in ((two_engines, 2 * 4 + 1), (one_engine, 2 * 2 + 1)):  # Qwen 3 has norms of queries and keys
        for rank in seen:
            assert len(rank["norms"]) == 3 * norms and max(rank["norms"]) < 1e-5


def test_order_and_version_of_trajectories(seen: Seen) -> None:
    drawn = seen[0]["parity"]["t1.0"]["drawn"]
    assert [(t["prompt"], t["sample"]) for t in drawn] == [
        (f"p{row}", sample) for row in range(4) for sample in range(4)
    ]
    assert {t["version"] for t in drawn} == {0}


def test_a_response_ends_with_eos_exactly_if_it_stopped(seen: Seen) -> None:
    drawn = seen[0]["parity"]["t1.0"]["drawn"] + seen[0]["seeds"]["together"] + seen[0]["seeds"]["next step"]
    assert {t["finish"] for t in drawn} == {"stop", "length"}
    for t in drawn:
        assert t["ids"].index(EOS) == len(t["ids"]) - 1 if t["finish"] == "stop" else EOS not in t["ids"]
        assert t["finish"] == "stop" or len(t["ids"]) == 24
        special = {"<pad>", "<eos>", "<unk>"}
        assert t["text"] == "".join(VOCABULARY[i] for i in t["ids"] if VOCABULARY[i] not in special)


def test_greedy_decoding_equals_our_loop_over_transformers(seen: Seen) -> None:
    assert [t["ids"] for t in seen[0]["parity"]["greedy"]["drawn"]] == [t["ids"] for t in seen[0]["hf"]]


def by_key(drawn: list[dict[str, Any]]) -> dict[tuple[str, int], list[int]]:
    return {(t["prompt"], t["sample"]): t["ids"] for t in drawn}


def test_a_response_depends_on_neither_the_engine_nor_the_batch(two_engines: Seen) -> None:
    first, second = (rank["seeds"] for rank in two_engines)
    responses = by_key(first["together"])
    assert len({tuple(ids) for ids in responses.values()}) == 15  # samples are independent across and within prompts
    for other in (first["alone"], first["reversed"], second["together"], second["alone"]):
        assert by_key(other) == responses


def test_another_step_draws_other_responses(seen: Seen) -> None:
    now, later = by_key(seen[0]["seeds"]["together"]), by_key(seen[0]["seeds"]["next step"])
    assert all(now[key] != later[key] for key in now)


def test_a_response_depends_neither_on_the_token_budget_nor_on_the_room_in_the_cache(one_engine: Seen) -> None:
    """In vLLM 0.32, "CPU Generator does not use offset" was raised if the budget split a prompt whose requests have seeds."""
    long = one_engine[0]["long"]
    expected = by_key(long["whole"]["drawn"])
    assert len(expected) == 64 and long["whole"]["preempted"] == 0
    for name, preempted in (("budget", False), ("budget and cache", True)):
        assert by_key(long[name]["drawn"]) == expected, name
        assert (long[name]["preempted"] > 0) == preempted, name
        assert [rank["long"][name]["reported"] for rank in one_engine] == [long[name]["preempted"], 0], name


def test_a_cache_that_holds_no_whole_response_is_refused_by_its_key(one_engine: Seen) -> None:
    for rank in one_engine:
        message = rank["long"]["no cache"]
        assert message.startswith("rollout.kv_cache_gib=5e-05: ") and "rollout.max_model_len=160" in message


def test_experts_that_no_kernel_takes_are_refused_by_the_key_that_cuts_them(one_engine: Seen) -> None:
    for rank in one_engine:
        message = rank["long"]["narrow experts"]
        assert message.startswith("ConfigError: rollout.layout.tp=") and "rollout.engine=hf" in message


def test_drafts_change_neither_logprobs_nor_what_is_likely(two_engines: Seen) -> None:
    for rank in two_engines:
        drafts = rank["drafts"]
        assert [t["ids"] for t in drafts["greedy"]] == [t["ids"] for t in rank["hf"]]
        assert drafts["gap"] < 1e-4 and drafts["gap of the likeliest"] < 1e-4
        assert by_key(drafts["together"]) == by_key(drafts["alone"])
        passes, tokens = drafts["passes"]
        assert passes < tokens, "some drafts are taken"
        assert drafts["threads"] == 1, "numba sets the number of cores"
    deviations = two_engines[0]["drafts"]["deviations"]
    assert len(deviations) > 8 and max(map(abs, deviations)) < 4
    assert by_key(two_engines[0]["drafts"]["together"]) == by_key(two_engines[1]["drafts"]["together"])


def test_loading_other_weights_and_back_restores_the_outputs(seen: Seen) -> None:
    reload = seen[0]["reload"]
    a, b, again = ([t["ids"] for t in reload[name]] for name in ("a", "b", "a again"))
    assert a == [t["ids"] for t in seen[0]["hf"]]
    assert b != a
    assert again == a
    assert [reload[name][0]["version"] for name in ("a", "b", "a again")] == [1, 2, 3]


def test_a_response_depends_neither_on_when_it_was_asked_for_nor_on_what_is_cancelled(seen: Seen) -> None:
    streamed = seen[0]["streaming"]
    alone = streamed["alone"]
    assert list(alone) == ["0", "1", "2", "3"] and all(versions == [[0, 30]] for _, versions in alone.values())
    assert streamed["late"] == alone
    assert streamed["same id"].startswith("ValueError: s0: request id 0 is in flight")
    assert streamed["not cancelled"] == {"0": alone["0"], "2": alone["2"]}
    assert streamed["generated meanwhile"] == [50]
    in_flight, left, tokens = streamed["counts"]
    assert (in_flight, left) == (4, 0) and tokens > 0


@pytest.mark.parametrize("mode", ["continue", "resubmit"])
def test_responses_in_flight_go_on_with_new_weights(seen: Seen, mode: str) -> None:
    """The reference is transformers, with the keys and values of the old weights, or without them."""
    published = seen[0]["publish"][mode]
    for request_id in ("0", "1", "2"):
        tokens, versions = published["drawn"][request_id]
        assert versions == [[0, 40], [6, 41]] and len(tokens) > 7
    assert published["same before"] == [True, True, True]
    assert published["gap"] < 1e-4
    assert published["drawn"]["7"][1] == [[0, 41]] and published["gap of a fresh request"] < 1e-4


def test_where_responses_are_to_end_first_new_weights_are_refused(seen: Seen) -> None:
    published = seen[0]["publish"]["drain"]
    assert published["error"].startswith("RuntimeError: 3 requests are in flight, but rollout.at_publish=drain")
    assert [versions for _, versions in published["drawn"].values()] == [[[0, 40]]] * 3


def test_no_weights_no_responses(seen: Seen) -> None:
    for rank in seen:
        assert "no weights were ever loaded" in rank["too early"]
        assert "it was closed" in rank["closed"]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("torn", "the wire broke"),
        ("missing", "model.layers.1.self_attn.k_proj.weight"),
        ("misshapen", "model.layers.0.mlp.gate_proj.weight"),
        ("unknown", "model.layers.9.mlp.up_proj.weight"),
    ],
)
def test_a_load_that_fails_leaves_the_engine_unusable(seen: Seen, load: str, message: str) -> None:
    for rank in seen:
        broken = rank["broken"][load]
        assert message in broken["error"]
        assert broken["version"] == -1
        assert broken["generate"].startswith("RuntimeError") and "did not finish" in broken["generate"]


def test_a_whole_load_repairs_an_engine_after_broken_ones(seen: Seen) -> None:
    repaired = seen[0]["broken"]["repaired"]
    assert [t["ids"] for t in repaired] == [t["ids"] for t in seen[0]["hf"]]
    assert {t["version"] for t in repaired} == {10}


def test_sleep_and_wake_keep_the_weights_on_a_cpu(seen: Seen) -> None:
    assert [rank["after sleep"] for rank in seen] == [10, 10]


def test_a_prompt_without_room_for_a_response_is_refused(seen: Seen) -> None:
    assert "'long'" in seen[0]["too long"] and "rollout.max_model_len=160" in seen[0]["too long"]


def test_the_process_is_left_as_it_was(seen: Seen) -> None:
    for rank in seen:
        assert rank["process"]["after"] == rank["process"]["before"]
        assert rank["ranks after close"] == 2


def test_the_console_stays_empty(seen: Seen) -> None:
    lines = [line for line in seen[0]["console"].splitlines() if line.strip()]
    assert lines == []


def test_vllms_own_parsers_find_calls_of_tools(two_engines: Seen) -> None:
    found = two_engines[0]["tool calls"]
    twice = [["add", '{"a": 1, "b": "x"}']] * 2
    assert found["hermes finds"] == [
        ["Well.\n", twice],
        ["none", []],
        ['<tool_call>{"name": "add", "arg</tool_call>', []],
    ]
    assert found["llama3_json finds"] == [
        ["", [["add", '{"a": 1}'], ["sub", "{}"]]],
        ["none", []],
        ['{"name": "add", "pa', []],
    ]
    assert found["qwen3_coder finds"][:2] == [["Well.", twice[:1]], ["none", []]]
    assert found["qwen3_coder finds"][2][1] == []
    assert found["pythonic finds"] == [["", [twice[0], ["sub", "{}"]]], ["none", []], ["[add(a=", []]]
    function = {"name": "add", "arguments": '{"a": 1, "b": "x"}'}
    assert found["message"]["tool_calls"][0] == {"id": "call_0", "type": "function", "function": function}
    for key in ("nothing", "nothing, before vLLM is imported"):
        assert f"is not a parser of the installed vLLM; choose from {', '.join(found['names'])}" in found[key]
    assert (
        "llama3_json does not fit the tokenizer of the model" in found["llama3_json"]
        and "<|python_tag|>" in found["llama3_json"]
    )
