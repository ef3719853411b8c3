"""Agents at the endpoint of an engine: the packages that people use as clients, what is learned from, and who is refused."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.coroutines import Background
from rlhf_mcore.environments.agents import endpoint as serving
from rlhf_mcore.environments.agents.conversation import Conversation
from rlhf_mcore.environments.agents.endpoint import Endpoint
from rlhf_mcore.environments.agents.episode import AgentRollout, AgentRules
from rlhf_mcore.environments.agents.program import AgentEnvironment
from rlhf_mcore.environments.sessions import StepResult
from rlhf_mcore.environments.turn_text import ControlTokens
from rlhf_mcore.sampling import rollouts
from rlhf_mcore.sampling.rollouts import RolloutLimits, RolloutSetup
from rlhf_mcore.types import Completion, Job, Prompt, Sampling, Trajectory
from tests.messages import expect_error
from tests.unit.environments.conftest import Scripted, play_jobs

if TYPE_CHECKING:
    import openai

PROMPT = Prompt("p", 0, [1, 2], "prompt", ground_truth="42", messages=[{"role": "user", "content": "q"}])


class Clients:
    """Sessions whose agents are threads of the test: ``play(base_url, api_key)`` returns the answer to the episode's step."""

    name = "environment.function=agent"

    def __init__(self, play: Callable[[str, str], Any]) -> None:
        self.play, self.pool = play, ThreadPoolExecutor()

    def open(self, row: Any, seed: int) -> Clients:
        self.row = row
        return self

    async def reset(self) -> StepResult:
        return StepResult()

    async def step(self, action: Any) -> StepResult:
        def run() -> StepResult:
            try:
                return StepResult(reward=float(self.play(action["base_url"], action["api_key"])), done=True)
            except Exception as error:
                return StepResult(error=f"raised {error}", done=True)

        return await asyncio.wrap_future(self.pool.submit(run))

    def close(self) -> None: ...


def parse(text: str, tools: Any) -> dict[str, Any]:
    """Parse "call:NAME:{...}" as a call, like a parser of vLLM."""
    if any(tool["function"]["name"] == "junk" for tool in tools):
        raise ValueError("junk")
    if not text.startswith("call:"):
        return {"role": "assistant", "content": text, "tool_calls": []}
    _, name, arguments = text.split(":", 2)
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint("127.0.0.1")
    yield served
    served.close_all()


@pytest.fixture
def run(tokenizer: PreTrainedTokenizerBase, endpoint: Endpoint) -> Iterator[Callable[..., Any]]:
    """Play episodes with a client. ``says``: the policy's turns in the order of their number in the history, or a function."""
    before = tokenizer.chat_template
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ 'call:' + c.function.name + ':' + c.function.arguments | tojson }}{% endfor %}"
        "{{ '<end>' }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ).replace("m.role + '>'", "('user' if m.role == 'system' else m.role) + '>'")

    def run(says: Any, play: Any, n: int = 1, new: int = 40, fails: bool = True, **limits: Any) -> list[Trajectory]:
        slots = limits.pop("slots", None)
        turns = says if callable(says) else lambda text, seed: says[text.count("<assistant>") - 1]
        make = limits.pop("make", lambda turns: Scripted(tokenizer, turns))
        engine = run.engine = make(turns)  # type: ignore[attr-defined]
        branches, total = limits.pop("branches", "all"), limits.pop("max_total", 400)
        in_order = limits.pop("in_order", False)
        rules = AgentRules(fails=fails, branches=branches, in_order=in_order)
        sessions: Any = Clients(play)
        run.sessions = sessions  # type: ignore[attr-defined]
        rollout = AgentRollout(sessions, endpoint, Conversation(tokenizer, parse), rules)
        bounds = RolloutLimits(**{"max_turns": 8, "max_total": total, **limits})
        setup = RolloutSetup(rollout, bounds, in_order, places=2 if in_order else None)
        sampling = Sampling(n=n, max_new_tokens=new, seed=5)
        found = play_jobs(engine, setup, [Job(k, PROMPT, k, sampling, 3) for k in range(n)], slots)
        assert not endpoint._by_digest and not engine.num_in_flight
        return found

    yield run
    tokenizer.chat_template = before


def chat(base_url: str, api_key: str) -> openai.OpenAI:
    import openai  # takes a while, in each worker that collects this file

    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=20)


def texts_of(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [
        tokenizer.decode(trajectory.token_ids[turn.start : turn.stop])
        for turn in trajectory.turns
        if turn.writer == "policy"
    ]


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("streams", [False, True])
def test_openai_chat_with_a_tool_is_one_sequence_of_sampled_tokens(
    run: Any, tokenizer: PreTrainedTokenizerBase, streams: bool
) -> None:
    def play(base_url: str, api_key: str) -> float:
        client, messages = chat(base_url, api_key), [{"role": "user", "content": "q"}]
        if not streams:
            said = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, temperature=0.1).choices[
                0
            ]
        else:
            with client.chat.completions.stream(model="any", messages=messages, tools=TOOLS) as events:
                said = events.get_final_completion().choices[0]
        assert said.finish_reason == "tool_calls" and said.message.tool_calls[0].function.name == "add"
        assert json.loads(said.message.tool_calls[0].function.arguments) == {"b": 2, "a": 1}
        assert said.message.tool_calls[0].id == f"call_{run.engine.requests[0].seed:016x}0"  # equal in a repeated run
        messages += [said.message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": said.message.tool_calls[0].id, "content": "3"}]
        last = client.chat.completions.create(model="any", messages=messages, tools=TOOLS, logprobs=True)
        assert last.choices[0].message.content == "it is 3" and last.choices[0].finish_reason == "stop"
        assert [token.token for token in last.choices[0].logprobs.content] == [*"it is 3", "<end>"]
        assert [token.logprob for token in last.choices[0].logprobs.content] == [-1, -2, -3, -4, -5, -6, -7, -8]
        assert last.usage.completion_tokens == 8
        return 0.5

    [whole] = run(['call:add:{"b":  2, "a": 1}', "it is 3"], play)  # spaces that no template would write again
    assert whole.sequences == () and texts_of(whole, tokenizer) == ['call:add:{"b":  2, "a": 1}<end>', "it is 3<end>"]
    assert tokenizer.decode(whole.token_ids).endswith('"a": 1}<end>\n<tool>3<end>\n<assistant>it is 3<end>')
    assert whole.score.value == 0.5 and whole.finish_reason == "stop" and whole.response_text == "it is 3"
    assert run.sessions.row["ground_truth"] == "42" and run.sessions.row["messages"] == PROMPT.messages
    one, two = whole.record["nodes"]
    assert (one["parent"], two["parent"], two["said"], two["calls"]) == (None, 0, "it is 3", [])
    [call] = one["calls"]
    assert call["name"] == "add" and one["ended_s"] <= call["begun_s"] < call["ended_s"] <= two["begun_s"]
    assert json.loads(json.dumps(whole.record)) == whole.record
    parts = [whole.record[f"{part}_s"] for part in ("engine", "tools", "waiting")]
    assert sum(parts) == pytest.approx(whole.record["seconds"]) and min(parts[:2]) > 0
    first, second = (request.prompt_ids for request in run.engine.requests)
    assert second[: len(first)] == first and len({request.seed for request in run.engine.requests}) == 2


def test_n_stop_and_a_rewritten_history(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        client, question = chat(base_url, api_key), [{"role": "user", "content": "q"}]
        two = client.chat.completions.create(model="m", messages=question, n=2).choices
        assert [each.message.content for each in two] == ["a STOP b", "a STOP b"] and [each.index for each in two] == [
            0,
            1,
        ]
        cut = client.chat.completions.create(model="m", messages=question, stop=["STOP"], max_tokens=30).choices[0]
        assert cut.message.content == "a " and cut.finish_reason == "stop"
        short = client.chat.completions.create(model="m", messages=question, max_tokens=3).choices[0]
        assert short.message.content == "a S" and short.finish_reason == "length"
        kept = [*question, {"role": "assistant", "content": "a STOP b"}, {"role": "user", "content": "r"}]
        client.chat.completions.create(model="m", messages=kept)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "summary"}])
        return 1

    [whole] = run(lambda text, seed: "a STOP b", play)
    turns = ["a STOP b<end>", "a STOP b<end>", "a STOP", "a S", "a STOP b<end>", "a STOP b<end>"]
    assert len(whole.sequences) == 5 and sorted(texts_of(whole, tokenizer)) == sorted(turns)
    [last] = run(lambda text, seed: "a STOP b", play, branches="last")
    assert texts_of(last, tokenizer) == ["a STOP b<end>"] and "summary" in tokenizer.decode(last.token_ids)


def test_completions_of_texts_and_tokens(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        client = chat(base_url, api_key)
        first = client.completions.create(model="m", prompt="Q: ", stop="\n", logprobs=0).choices[0]
        assert first.text == "yes" and first.logprobs.token_logprobs == [-1, -2, -3, -4]
        more = client.completions.create(model="m", prompt="Q: yes\nand ", max_tokens=3, stream=True)
        assert "".join(chunk.choices[0].text for chunk in more) == "yes"
        both = client.completions.create(model="m", prompt=["x", [5, 6]], max_tokens=1).choices
        assert [each.text for each in both] == ["y", "y"]
        return 1

    [whole] = run(lambda text, seed: "yes\nno", play)
    parts = [tokenizer.decode(part) for part in _parts(whole)]
    assert parts[0] == "Q: yes\nand yes" and texts_of(whole, tokenizer)[:2] == ["yes\n", "yes"]


def _parts(whole: Trajectory) -> list[Any]:
    starts = [sum(whole.sequences[:k]) for k in range(len(whole.sequences))]
    return [whole.token_ids[start : start + size] for start, size in zip(starts, whole.sequences, strict=True)]


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_messages_with_a_tool(run: Any, tokenizer: PreTrainedTokenizerBase, streams: bool) -> None:
    tools: Any = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]

    def play(base_url: str, api_key: str) -> float:
        import anthropic  # takes a while, in each worker that collects this file

        client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0, timeout=20)
        messages: Any = [{"role": "user", "content": "q"}]
        common: Any = {"model": "m", "max_tokens": 40, "system": "be brief", "tools": tools}
        if not streams:
            said = client.messages.create(**common, messages=messages)
        else:
            with client.messages.stream(**common, messages=messages) as events:
                said = events.get_final_message()
        assert said.stop_reason == "tool_use" and said.content[-1].input == {"a": 1}
        messages += [{"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in said.content]}]
        result = {"type": "tool_result", "tool_use_id": said.content[-1].id, "content": "3"}
        messages += [{"role": "user", "content": [result]}]
        last = client.messages.create(**common, messages=messages)
        assert last.content[0].text == "done" and last.stop_reason == "end_turn" and last.usage.output_tokens == 5
        return 1

    [whole] = run(['call:add:{ "a":1}', "done"], play)
    assert whole.sequences == () and texts_of(whole, tokenizer) == ['call:add:{ "a":1}<end>', "done<end>"]


class Slow(Scripted):
    """Samples a letter per request in each step. After ``stands`` letters it waits until ``go`` is set."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, says: Any, stands: int) -> None:
        super().__init__(tokenizer, says)
        self.go, self.stands, self.now = Event(), stands, dict[int, list[int]]()

    def step(self) -> list[Completion]:
        for request in self._in_flight:
            had = self.now.setdefault(request.request_id, [])
            whole = self._tokenizer(self._says(self._tokenizer.decode(request.prompt_ids), 0) + "<end>")["input_ids"]
            if had == whole:
                self._in_flight = [request, *(other for other in self._in_flight if other is not request)]
                return super().step()
            if len(had) < self.stands or self.go.is_set():
                had.append(whole[len(had)])
        time.sleep(0.002)
        return []

    def sampled_tokens(self, request_ids: Any) -> dict[int, list[int]]:
        return {number: self.now[number] for number in request_ids if number in self.now}


LONG = "a long answer in many words"


@pytest.mark.parametrize("api", ["chat", "completions", "messages"])
def test_words_of_a_stream_come_while_they_are_drawn(run: Any, tokenizer: PreTrainedTokenizerBase, api: str) -> None:
    def ask(base_url: str, api_key: str) -> Iterator[str]:
        client = chat(base_url, api_key)
        if api == "chat":
            for chunk in client.chat.completions.create(model="m", messages=HI, stream=True):
                yield chunk.choices[0].delta.content or ""
        elif api == "completions":
            for text in client.completions.create(model="m", prompt="<user>q<end>", stream=True):
                yield text.choices[0].text
        else:
            import anthropic

            other = anthropic.Anthropic(
                base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0, timeout=20
            )
            with other.messages.stream(model="m", max_tokens=40, messages=HI) as stream:
                yield from stream.text_stream
                assert stream.get_final_message().content[0].text == LONG
                assert stream.get_final_message().usage.output_tokens == len(LONG) + 1

    check_stream(run, tokenizer, ask)


def check_stream(run: Any, tokenizer: PreTrainedTokenizerBase, ask: Callable[[str, str], Iterator[str]]) -> None:
    """Check that words of a turn come before the engine continues, and the others after that."""

    def play(base_url: str, api_key: str) -> float:
        words, parts = ask(base_url, api_key), [""]
        while len("".join(parts)) < 10:  # while the engine stands
            parts.append(next(words))
        assert "".join(parts) == LONG[:10] and not run.engine.go.is_set()
        run.engine.go.set()
        assert "".join([*parts, *words]) == LONG
        return 1

    [whole] = run(lambda text, seed: LONG, play, make=lambda says: Slow(tokenizer, says, 10))
    assert texts_of(whole, tokenizer) == [LONG + "<end>"] and whole.sequences == ()


def test_a_stream_has_nothing_that_is_cut_at_its_end(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        client, texts = chat(base_url, api_key), ["", ""]
        for chunk in client.chat.completions.create(model="m", messages=HI, stream=True, stop=["STOP", "o b"], n=2):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == ["no ST", "no ST"]
        return 1

    run(lambda text, seed: "no STo bSTOP", play, make=lambda says: Slow(tokenizer, says, 99))


def test_a_client_that_leaves_a_stream_is_not_learned_from(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        client = chat(base_url, api_key)
        with client.chat.completions.create(model="m", messages=HI, stream=True) as stream:
            assert next(iter(stream)).choices[0].delta.role == "assistant"
        while not run.engine.cancelled:  # it stops sampling for a disconnected client
            time.sleep(0.01)
        run.engine.go.set()
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "r"}])
        return 1

    [whole] = run(lambda text, seed: "a long answer", play, make=lambda says: Slow(tokenizer, says, 5))
    assert whole.sequences == () and "<user>r" in tokenizer.decode(whole.token_ids)


def test_turns_beyond_the_slots_of_an_engine_wait_and_may_be_lent(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    class Lends(Scripted):
        """Runs two turns at once. Another engine runs the waiting turns and returns them."""

        def step(self) -> list[Completion]:
            self.most = max(getattr(self, "most", 0), self.num_in_flight)
            lent = self.loop.move_held(1) if self.loop.num_held > 1 else []
            self.lent = [*getattr(self, "lent", []), *lent]
            other = Scripted(tokenizer, self._says)
            other.submit(lent)
            for turn in other.step():
                self.loop.resolve(turn.request_id, turn)
            return super().step()

    def play(base_url: str, api_key: str) -> float:
        client = chat(base_url, api_key)
        first = client.chat.completions.create(model="m", messages=HI).choices[0].message.content
        kept = [*HI, {"role": "assistant", "content": first}, {"role": "user", "content": "r"}]
        with ThreadPoolExecutor(8) as pool:
            asked = [kept, [{"role": "user", "content": "new"}]] * 4
            said = pool.map(
                lambda m: client.chat.completions.create(model="m", messages=m).choices[0].message.content, asked
            )
        return float(set(said) == {"ok"})

    [whole] = run(lambda text, seed: "ok", play, make=lambda says: Lends(tokenizer, says), slots=2, max_turns=20)
    assert whole.score.value == 1 and len(texts_of(whole, tokenizer)) == 9 and run.engine.most == 2 and run.engine.lent
    assert len({request.request_id for request in [*run.engine.requests, *run.engine.lent]}) == 9


def test_many_agents_ask_in_parallel_and_each_is_learned_from_by_itself(
    run: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    def play(base_url: str, api_key: str) -> float:
        async def ask_all() -> list[str]:
            import openai  # takes a while, in each worker that collects this file

            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                asked = [
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": str(number)}])
                    for number in range(4)
                ]
                return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]

        assert asyncio.run(ask_all()) == ["0!", "1!", "2!", "3!"]
        return 1

    whole = run(lambda text, seed: text.split("<user>")[1][0] + "!", play, n=6)
    assert [sorted(texts_of(each, tokenizer)) for each in whole] == [["0!<end>", "1!<end>", "2!<end>", "3!<end>"]] * 6
    assert [each.sample for each in whole] == list(range(6))


def test_in_order_agents_get_the_same_tokens_whatever_the_time_that_they_take(
    run: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    class Counting(Scripted):
        """Its turns depend on the number of requests in flight, as the last bits of real ones."""

        def step(self) -> list[Completion]:
            self.most = max(getattr(self, "most", 0), self.num_in_flight)
            return super().step()

    def play(base_url: str, api_key: str) -> float:
        client, messages = chat(base_url, api_key), [{"role": "user", "content": "q"}]
        for _ in range(3):
            time.sleep(chance.random() / 50)
            said = client.chat.completions.create(model="m", messages=messages, n=2).choices[1].message
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
            if said.content.endswith("0"):
                break
        return 1

    def make(says: Any) -> Counting:
        return Counting(tokenizer, lambda text, seed: f"{run.engine.num_in_flight}{seed % 3}")

    chance, found = random.Random(0), []
    for _ in range(3):
        whole = run([], play, n=9, make=make, in_order=True)
        found.append(([texts_of(each, tokenizer) for each in whole], [request.seed for request in run.engine.requests]))
        assert run.engine.most == 4  # two turns in each of two places
    assert found[0] == found[1] == found[2]


def test_in_order_concurrent_requests_end_the_run(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        def ask() -> Any:
            return chat(base_url, api_key).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "q"}]
            )

        with ThreadPoolExecutor() as pool:
            return len([asked.result() for asked in [pool.submit(ask) for _ in range(8)]])

    class Slow(Scripted):
        def step(self) -> list[Completion]:
            time.sleep(0.1)
            return super().step()

    with expect_error(ConfigError, value="concurrent requests", remedy="environment.overlap=true"):
        run(["a"], play, make=lambda says: Slow(tokenizer, says), in_order=True, fails=False)


@pytest.mark.parametrize(
    ("limits", "reason", "code"),
    [
        ({"max_turns": 2}, "turns", "limit"),
        ({"max_tokens": 12}, "length", "context_length_exceeded"),
        ({"max_total": 40}, "length", "context_length_exceeded"),
        ({"max_seconds": 1000.0}, "seconds", "limit"),
    ],
)
def test_an_episode_that_meets_a_limit_is_truncated(
    run: Any, limits: Any, reason: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped = [0.0]  # seconds that the clock of the limits is ahead
    monkeypatch.setattr(
        rollouts, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() + skipped[0]})
    )

    def play(base_url: str, api_key: str) -> float:
        client, messages = chat(base_url, api_key), [{"role": "user", "content": "q"}]
        for _ in range(30):
            said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "r"}]
            skipped[0] = limits.get("max_seconds", 0.0)  # the second turn comes too late
        return 1

    [whole] = run(lambda text, seed: "abc", play, **{"max_turns": 40, **limits})
    assert whole.finish_reason == reason and whole.is_truncated and whole.score.value == 0
    assert run.engine.requests


def post(base_url: str, path: str, content: bytes, api_key: str | None, **headers: str) -> tuple[int, Any]:
    where = urlsplit(base_url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20)
    given = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
    connection.request("POST", f"/v1/{path}", content, {**given, "Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read() or b"null")


HI = [{"role": "user", "content": "q"}]
DEEP = '{"a":' * 960 + "1" + "}" * 960
NESTED = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": DEEP}}]}
HOSTILE = [
    ("chat/completions", b"{", 400, "not JSON"),
    ("chat/completions", b"[" * 100_000, 400, "not JSON"),
    ("chat/completions", b"[]", 400, "not a JSON object"),
    ("chat/completions", {}, 400, "messages must be a non-empty list"),
    ("chat/completions", {"messages": [7]}, 400, "messages[0] needs a role"),
    ("chat/completions", {"messages": [{"role": "root", "content": "x"}]}, 400, "messages[0] needs a role"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "'image_url'"),
    ("chat/completions", {"messages": [{"role": "system", "content": [{"type": "image_url"}]}]}, 400, "send text"),
    ("chat/completions", {"messages": [{"role": "user", "content": "\0"}]}, 400, "NUL"),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "rejects these messages"),
    ("chat/completions", {"messages": HI, "n": 10**9}, 400, "n is 1000000000"),
    ("chat/completions", {"messages": HI, "max_tokens": -1}, 400, "max_tokens is -1"),
    ("chat/completions", {"messages": HI, "stop": ["x"] * 99}, 400, "stop is"),
    ("chat/completions", {"messages": HI, "top_logprobs": 5}, 400, "top_logprobs"),
    ("chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ("chat/completions", {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"),
    ("chat/completions", {"messages": HI, "tools": "all"}, 400, "tools must be a list"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [1]}]}, 400, "tool_calls"),
    ("completions", {"prompt": []}, 400, "prompt must be a non-empty text"),
    ("completions", {"prompt": [-1]}, 400, "prompt"),
    ("completions", {"prompt": "x", "echo": True}, 400, "echo"),
    ("completions", {"prompt": [5, 105]}, 400, "token 105"),  # the tokenizer has 105
    ("completions", {"prompt": [5, 2**31 - 1]}, 400, "token 2147483647"),
    ("completions", {"prompt": "\ue0ff"}, 400, "prompt is empty"),
    ("completions", {"prompt": "x", "stream": True, "stream_options": "usage"}, 400, "stream_options"),
    ("chat/completions", {"messages": HI, "stream": True, "stream_options": [1]}, 400, "stream_options"),
    ("chat/completions", {"messages": [*HI, NESTED], "tools": TOOLS}, 400, "nested deeper than 64"),
    ("chat/completions", {"messages": HI, "metadata": json.loads("[" * 99 + "]" * 99)}, 400, "nested deeper than 64"),
    ("chat/completions", b'{"x": [' + b"1," * 2**20 + b"1]}", 413, "values"),
    ("chat/completions", {"messages": HI, "tools": [{"function": {"name": "junk"}}]}, 400, "tools cannot be used"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "'image'"),
    ("messages", {"messages": HI, "tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ("messages", {"messages": HI, "tool_choice": "none"}, 400, "tool_choice"),
]


def test_junk_is_refused_in_one_line_and_harms_nobody(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        for path, body, status, reason in HOSTILE:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = post(base_url, path, content, api_key)
            message = answer[1]["error"]["message"]
            assert answer[0] == status and reason in message and "\n" not in message, (path, body, answer)
        for key in (None, "", "x" * 43, api_key[:-1], api_key + "x", "ü"):
            for path in ("chat/completions", "messages", "begin"):
                assert post(base_url, path, b"{}", key and key.encode().decode("latin-1"))[0] == 401
        status, answer = post(base_url, "embeddings", b"{}", api_key)
        assert status == 404 and "POST /v1/embeddings is not served; use POST /v1/chat/" in answer["error"]["message"]
        assert post(base_url, "chat/completions", b"x" * (serving.MAX_BYTES + 1), api_key)[0] == 413
        assert chat(base_url, api_key).models.list().data[0].id == "policy"
        assert (
            chat(base_url, api_key).chat.completions.create(model="m", messages=HI).choices[0].message.content == "ok"
        )
        return 1

    [whole] = run(["ok"], play)
    assert texts_of(whole, tokenizer) == ["ok<end>"]


TEXT = {"type": "text", "text": "q"}
CALL = {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}}
VALID: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": "c", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "i", "content": "r"},
        ],
        "tools": TOOLS,
        "stop": ["x"],
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "logprobs": True,
        "n": 1,
    },
    "completions": {"prompt": "x", "n": 1, "stop": "x", "stream_options": {}, "logprobs": 1, "max_tokens": 4},
    "messages": {
        "system": [TEXT],
        "messages": [
            {"role": "user", "content": [TEXT, {"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["a"],
    },
}
JUNK = [None, True, -1, 1e308, "none", "\ud800", [1], [[]], {"type": ["x"]}, [{"role": ["user"]}]]


def replace_parts(value: Any, junk: Any) -> Iterator[Any]:
    """Yield copies of a JSON value in which one of its parts is ``junk``."""
    yield junk
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        for other in replace_parts(child, junk):
            copied = value.copy()
            copied[key] = other
            yield copied


@pytest.mark.parametrize(("path", "valid"), VALID.items())
def test_no_value_of_another_type_is_an_internal_error_or_cuts_a_stream(
    endpoint: Endpoint, path: str, valid: dict[str, Any]
) -> None:
    async def serve() -> str:
        return endpoint.open(serving.SilentEpisode())

    engine = Background("engine")
    api_key = engine.start(serve()).result()
    try:
        where = urlsplit(endpoint.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=20)
        for body in [body for junk in JUNK for body in replace_parts(valid | {"stream": True}, junk)]:
            connection.request("POST", f"/v1/{path}", json.dumps(body), {"Authorization": f"Bearer {api_key}"})
            response = connection.getresponse()
            content = response.read()  # IncompleteRead if it is cut
            assert response.status in (200, 400) and b"internal_error" not in content, (body, content)
    finally:
        engine.close()
        endpoint.close(api_key)


def test_a_call_of_the_policy_that_is_nested_too_deep_is_text(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        client = chat(base_url, api_key)
        said = client.chat.completions.create(model="m", messages=HI, tools=TOOLS).choices[0].message
        assert said.tool_calls is None and said.content.startswith("call:add:{")
        kept = [*HI, {"role": "assistant", "content": said.content}, {"role": "user", "content": "r"}]
        client.chat.completions.create(model="m", messages=kept, tools=TOOLS)
        return 1

    [whole] = run(["call:add:" + DEEP, "done"], play, new=9999, max_total=20_000)
    assert whole.sequences == () and texts_of(whole, tokenizer)[1] == "done<end>"


def test_an_exception_is_the_answer_of_its_request(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        asked = json.dumps({"messages": HI}).encode()
        status, answer = post(base_url, "chat/completions", asked, api_key)
        assert status == 500 and "KeyError: 'oops'" in answer["error"]["message"]
        return float(post(base_url, "chat/completions", asked, api_key)[0] == 200)

    read, first = Conversation.read, [True]

    def broken(self: Conversation, *arguments: Any) -> Any:
        if first.pop() if first else False:
            raise KeyError("oops")
        return read(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Conversation, "read", broken)
        [whole] = run(["ok"], play)
    assert whole.score.value == 1 and texts_of(whole, tokenizer) == ["ok<end>"]  # it is not learned from


def test_a_request_that_cannot_fit_is_refused_before_it_is_tokenised(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ControlTokens.encode_marked

    def short(self: ControlTokens, text: str) -> list[int]:
        assert len(text) < 70_000, "it is tokenised"
        return encode(self, text)

    monkeypatch.setattr(ControlTokens, "encode_marked", short)

    def play(base_url: str, api_key: str) -> float:
        assert post(base_url, "chat/completions", json.dumps({"messages": HI}).encode(), api_key)[0] == 200
        bodies = [
            ("chat/completions", {"messages": [{"role": "user", "content": "1" * 15_000_000}]}),
            ("chat/completions", {"messages": [{"role": "user", "content": "1"}] * 300_000}),
            ("completions", {"prompt": [1] * 70_000}),
        ]
        for path, body in bodies:
            began = time.monotonic()
            status, answer = post(base_url, path, json.dumps(body).encode(), api_key)
            assert status in (400, 413) and answer["error"]["code"] == "context_length_exceeded", (path, answer)
            assert time.monotonic() - began < 10
        raise ValueError("too long")

    [whole] = run(["ok"], play)
    assert whole.finish_reason == "length" and whole.score.value == 0  # as any episode that meets a limit


def test_an_engine_draws_while_a_request_is_tokenised(
    run: Any, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, find = Event(), Conversation.find

    def slow(self: Conversation, requests: Any) -> Any:
        if any("slow" in str(asked.messages) for _, asked in requests):
            assert drawn.wait(20), "the engine waits for the tokenizer"
        return find(self, requests)

    monkeypatch.setattr(Conversation, "find", slow)

    def play(base_url: str, api_key: str) -> float:
        client, heard = chat(base_url, api_key), ""
        with ThreadPoolExecutor(1) as pool:
            for chunk in client.chat.completions.create(model="m", messages=HI, stream=True):
                if not heard:
                    slow = [{"role": "user", "content": "slow"}]
                    asked = pool.submit(client.chat.completions.create, model="m", messages=slow)
                heard += chunk.choices[0].delta.content or ""
            assert heard == "a long answer in many words"
            drawn.set()
            return float(asked.result().choices[0].message.content == heard)

    [whole] = run(lambda text, seed: "a long answer in many words", play, make=lambda says: Slow(tokenizer, says, 99))
    assert whole.score.value == 1


def test_a_prompt_that_is_a_text_is_a_message_of_the_user(tokenizer: PreTrainedTokenizerBase) -> None:
    rendered = Prompt("p", 0, [1], "<user>q<end><assistant>", question="q")
    assert Conversation(tokenizer).messages_of(rendered) == HI and Conversation(tokenizer).messages_of(PROMPT) == HI
    assert Conversation(tokenizer).messages_of(Prompt("p", 0, [1], "<user>q<end><assistant>")) is None


def test_the_key_of_an_episode_that_has_ended_is_refused(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    keys: list[str] = []

    def play(base_url: str, api_key: str) -> float:
        asked = json.dumps({"messages": HI, "prompt": "q", "input": "q", "max_tokens": 5}).encode()
        for path in ("chat/completions", "completions", "messages", "begin"):
            assert [post(base_url, path, asked, key)[0] for key in keys] == [401] * len(keys)
        keys.append(api_key)
        chat(base_url, api_key).chat.completions.create(model="m", messages=HI)
        return 1

    for _ in range(2):
        [whole] = run(["ok"], play)
        assert texts_of(whole, tokenizer) == ["ok<end>"] and len(run.engine.requests) == 1
    assert len(set(keys)) == 2


def test_who_leaves_or_floods_is_not_learned_from(
    run: Any, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_WAITING", 3)

    def play(base_url: str, api_key: str) -> float:
        import openai  # takes a while, in each worker that collects this file

        client = chat(base_url, api_key)
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.05).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "slow"}]
            )
        with ThreadPoolExecutor(12) as pool:
            question = json.dumps({"messages": HI}).encode()
            flood = pool.map(lambda _: post(base_url, "chat/completions", question, api_key)[0], range(12))
            statuses = sorted(flood)
        assert set(statuses) == {200, 429}, statuses
        return statuses.count(200)

    def says(text: str, seed: int) -> str:
        time.sleep(0.4 if "slow" in text else 0.05)
        return "slow" if "slow" in text else "ok"

    [whole] = run(says, play, max_turns=99)
    assert set(texts_of(whole, tokenizer)) == {"ok<end>"} and len(texts_of(whole, tokenizer)) == whole.score.value


def test_an_agent_that_begins_again_is_learned_from_once(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    def play(base_url: str, api_key: str) -> float:
        for _ in range(3):
            assert post(base_url, "begin", b"", api_key)[0] == 200
            chat(base_url, api_key).chat.completions.create(model="m", messages=HI)
        return 1

    [whole] = run(["ok"], play)
    assert whole.sequences == () and texts_of(whole, tokenizer) == ["ok<end>"]
    assert len({request.seed for request in run.engine.requests}) == 1


def test_an_agent_that_fails_ends_the_run_or_leaves_a_row_without_a_score(run: Any) -> None:
    def play(base_url: str, api_key: str) -> float:
        raise ValueError("no idea")

    with pytest.raises(ConfigError, match=r"after 0 turns, raised no idea\. Correct it, or set reward\.on_error=zero"):
        run(["ok"], play)
    [whole] = run(["ok"], play, fails=False)
    assert whole.score.failure == "error" and "no idea" in whole.score.cause and whole.num_sampled == 3
    with pytest.raises(ConfigError, match="ended without a turn of the policy"):
        run(["ok"], lambda base_url, api_key: 1.0)


def test_a_turn_that_must_not_be_trained_on_ends_the_run(run: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    class Broken(Scripted):
        def step(self) -> list[Completion]:
            return [replace(turn, logprobs=turn.logprobs * math.nan) for turn in super().step()]

    def play(base_url: str, api_key: str) -> float:
        asked = json.dumps({"messages": HI}).encode()
        assert post(base_url, "chat/completions", asked, api_key)[0] == 500
        return 1

    with pytest.raises(RuntimeError, match="logprob nan at token 0 of prompt 'p', sample 0"):
        run(["ok"], play, make=lambda says: Broken(tokenizer, says))


def test_an_address_that_is_not_ours_is_refused() -> None:
    with expect_error(ConfigError, field="environment.agent.host", value="203.0.113.1"):
        Endpoint("203.0.113.1")


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["python3", "-u", "agent.py", "--to", "new.py"], "agent.py"),
        (["sh", "tools/agent.sh"], "tools/agent.sh"),
        (["python3", "there.py", "new.py"], ""),
        (["python3", "-m", "agent"], ""),
        (["env", "run"], ""),
        (["bash", "-c", "cd elsewhere && python agent.py"], ""),
        (["python3", "-c", "print(1)  # as in agent.py"], ""),
        (["bash", "--init-file=new.sh", "there.py"], ""),
        (["sh", "on_path.sh"], ""),
        (["node", "-r", "dotenv/config.js", "agent.js"], ""),
        (["env", "SETTINGS=new.py", "python3", "agent.py"], ""),
        (["cat", "new.py"], ""),
    ],
)
def test_a_script_that_is_not_there_is_found_where_the_agent_is_made(
    command: list[str], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is done once before processes start (``sessions.check_loads``)."""
    monkeypatch.chdir(tmp_path)
    Path("there.py").touch()
    for name in ("node", "bin/on_path.sh"):  # this machine may have no Node
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if not missing:
        AgentEnvironment(command=command)
        return
    with expect_error(
        ConfigError, field="environment.agent.command", value=(repr(missing), str(tmp_path)), remedy="give its path"
    ):
        AgentEnvironment(command=command)
