"""Test the client of engine servers against a small server that fails like real servers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config, RolloutConfig
from rlhf_mcore.config.schema.rollout import ServerConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.server.engine import ServerEngine, ShardWriter
from rlhf_mcore.sampling.rollouts import Context, Policy, RolloutSetup
from rlhf_mcore.sampling.served_loop import ServedLoop
from rlhf_mcore.trainer.batches import BatchSampler
from rlhf_mcore.types import Completion, Prompt, Request, Sampling, Trajectory
from tests.episodes import single_turn
from tests.messages import expect_error
from tests.unit.parallel.world import world

__all__ = ["world"]

DECLARED = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32", "max_model_len": 64}
SHAPES = {"a.weight": (2, 3), "b.weight": (4,)}


@dataclass
class Server:
    """A server with vLLM's routes. A response is the prompt's last token plus 1, 2, 3. ``answers`` change it."""

    declared: dict[str, Any] = field(default_factory=lambda: dict(DECLARED))
    token: str | None = None
    fails_at: str = ""  # a path
    label: str = "default"
    forced_label: str | None = None
    finish_reason: str = "stop"
    lie: Any = None  # takes the answer to a request, and returns another answer
    info: Any = None  # the answer to /server_info
    asked: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    is_ready: Callable[[], bool] = lambda: True  # responses wait until it returns true
    num_closed: int = 0  # number of connections that the client closed before the response
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.asked.append(request.path_qs)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path == self.fails_at:
            return web.json_response({"error": "no memory"}, status=500)
        body = json.loads(await request.text() or "{}")
        if path == "/server_info" and self.info is not None:
            return web.Response(body=self.info)
        if path == "/server_info":
            return web.json_response({"vllm_config": {"model_config": self.declared}})
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.loaded = {}
            for file in sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors")):
                self.loaded |= load_file(file)
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/inference/v1/generate":
            self.bodies.append(body)
            try:
                while not self.is_ready():
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.num_closed += 1
                raise
            answer = {"choices": [self.choice(body["token_ids"][-1])]}
            return web.json_response(answer) if self.lie is None else web.Response(body=self.lie(answer))
        return web.json_response({})

    def choice(self, last: int) -> dict[str, Any]:
        return {
            "token_ids": [last + 1, last + 2, last + 3],
            "finish_reason": self.finish_reason,
            "weight_versions": [{"version": self.forced_label or self.label, "start": 0, "end": 3}],
            "logprobs": {"content": [{"token_id": last + k, "logprob": -0.5 * k} for k in (1, 2, 3)]},
        }


@contextmanager
def running(server: Server) -> Iterator[Server]:
    loop, ready, runners = asyncio.new_event_loop(), Event(), []

    async def start() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        runners.append(runner)
        ready.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(running(Server())) for _ in range(2)]


@pytest.fixture
def build(tmp_path: Path, world: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Build an engine in a world of one rank. Its tokenizer needs only the token that ends a response."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("rlhf_mcore.rollout.engine.load_tokenizer", lambda _: SimpleNamespace(eos_token_id=2))
    with ExitStack() as stack:

        def make(*servers: Server, token_env: str | None = None) -> ServerEngine:
            served = ServerConfig(
                urls=[f"{server.url}/" for server in servers],
                weights_dir=str(tmp_path / "weights"),
                token_env=token_env,
            )
            model = EngineModel(str(tmp_path), str(tmp_path), "fp32", 64, 0, SHAPES)
            engine = ServerEngine(RolloutConfig(engine="server", server=served, engine_timeout_s=0.5), model)
            stack.callback(engine.close)
            return engine

        yield make


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.full(shape, value)) for name, shape in SHAPES.items()]


def requests(count: int) -> list[Request]:
    sampling = Sampling(temperature=0.7, max_new_tokens=5)
    return [Request(10 + n, f"prompt {n}", [3, 20 + n], sampling, seed=100 + n) for n in range(count)]


def generate(engine: ServerEngine, requests: Sequence[Request]) -> list[Completion]:
    """Return the completions of requests, in order."""
    loop = ServedLoop(engine)

    async def sample_all() -> list[Completion]:
        return await loop.join([loop.begin(loop.sample(request)) for request in requests])

    return run(loop.run(sample_all()))


def test_responses_come_from_all_servers_by_the_weights_that_they_were_given(
    build: Any, servers: list[Server], tmp_path: Path
) -> None:
    engine = build(*servers)
    with pytest.raises(RuntimeError, match="no weights were ever loaded"):
        generate(engine, requests(1))
    engine.load_weights(weights(2.0), version=4)
    for server in servers:  # an early answer would make its server the one with the fewest requests
        server.is_ready = lambda: sum(len(server.bodies) for server in servers) == 6
    drawn = generate(engine, requests(6))
    assert [completion.request_id for completion in drawn] == [10, 11, 12, 13, 14, 15]
    assert [completion.token_ids.tolist() for completion in drawn] == [[21 + n, 22 + n, 23 + n] for n in range(6)]
    assert all(completion.logprobs.tolist() == [-0.5, -1.0, -1.5] for completion in drawn)
    assert {completion.versions for completion in drawn} == {((0, 4),)}
    assert sorted(len(server.bodies) for server in servers) == [3, 3]
    for server in servers:
        assert server.loaded.keys() == SHAPES.keys() and all((tensor == 2.0).all() for tensor in server.loaded.values())
        order = [path.split("?")[0] for path in server.asked if "server_info" not in path and "health" not in path]
        assert order[1:6] == ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"]
        sampling = server.bodies[0]["sampling_params"]
        assert (sampling["temperature"], sampling["max_tokens"], sampling["logprobs"]) == (0.7, 5, 0)
        assert sampling["seed"] == 100 + server.bodies[0]["token_ids"][-1] - 20
    assert list((tmp_path / "weights").glob("*/*")) == [], "weights are removed when the servers have them"


def test_a_server_that_fails_is_left_out_until_the_next_weights(build: Any, servers: list[Server]) -> None:
    engine = build(*servers)
    engine.load_weights(weights(1.0), version=0)
    servers[0].fails_at = "/inference/v1/generate"
    assert len(generate(engine, requests(4))) == 4
    assert len(servers[1].bodies) == 4
    servers[0].fails_at = ""
    generate(engine, requests(4))
    assert servers[0].bodies == []
    engine.load_weights(weights(1.0), version=1)
    generate(engine, requests(4))
    assert servers[0].bodies  # the number depends on which of the two answers first


def replace_fields(**values: Any) -> Any:
    """Return a function that replaces fields of a choice."""
    return lambda answer: json.dumps({"choices": [answer["choices"][0] | values]}).encode()


def logprobs(*values: Any) -> Any:
    return replace_fields(logprobs={"content": [{"token_id": 5, "logprob": value} for value in values]})


LIES = {
    "id -1": replace_fields(token_ids=[21, -1, 23]),
    "id beyond the vocabulary": replace_fields(token_ids=[21, 40, 23]),
    "id of 40 bits": replace_fields(token_ids=[21, 2**40, 23]),
    "id 5.7": replace_fields(token_ids=[21, 5.7, 23]),
    "id true": replace_fields(token_ids=[21, True, 23]),
    "id null": replace_fields(token_ids=[21, None, 23]),
    "id as text": replace_fields(token_ids=[21, "5", 23]),
    "no ids": replace_fields(token_ids=None),
    "more than asked": replace_fields(token_ids=[5] * 6, logprobs={"content": [{"logprob": -1.0}] * 6}),
    "logprob as text": logprobs("x", -1, -1),
    "logprob as list": logprobs([1], -1, -1),
    "logprob NaN": logprobs(float("nan"), -1, -1),
    "logprob -inf": logprobs(float("-inf"), -1, -1),
    "logprob above 0": logprobs(0.5, -1, -1),
    "version 5": replace_fields(weight_versions=[{"version": 5}]),
    "versions null": replace_fields(weight_versions=None),
    "versions as text": replace_fields(weight_versions="a"),
    "a reason that is none": replace_fields(finish_reason=["stop"]),
    "no choice": lambda _: b"[]",
    "two choices": lambda answer: json.dumps({"choices": answer["choices"] * 2}).encode(),
    "no JSON": lambda _: b"\xff",
    "nested": lambda _: b"[" * 100_000,
    "2 MB": lambda _: b'"' + b"x" * 2**21 + b'"',
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_server_that_lies_is_left_out(build: Any, servers: list[Server], tmp_path: Path, lie: Any) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 40}')
    engine = build(*servers)
    engine.load_weights(weights(1.0), version=0)
    servers[0].lie = lie
    drawn = generate(engine, requests(4))
    assert [completion.token_ids.tolist() for completion in drawn] == [[21 + n, 22 + n, 23 + n] for n in range(4)]
    assert len(servers[1].bodies) == 4
    servers[1].lie = lie
    with pytest.raises(RuntimeError, match=f"stopped sampling: {servers[1].url}") as raised:
        generate(engine, requests(1))
    assert len(str(raised.value)) < 1200


@pytest.mark.parametrize(
    "info",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"vllm_config": []}',
        b'{"vllm_config": {"model_config": []}}',
        json.dumps({"vllm_config": {"model_config": {**DECLARED, "max_model_len": None}}}).encode(),
        json.dumps({"vllm_config": {"model_config": {**DECLARED, "max_model_len": "big"}}}).encode(),
        json.dumps({"vllm_config": {"model_config": {**DECLARED, "dtype": ["a" * 999]}}}).encode(),
        json.dumps({"vllm_config": {"model_config": {**DECLARED, "model": 5}}}).encode(),
        b"[" * 100_000,
        b'"' + b"x" * 2**21 + b'"',
    ],
    ids=lambda info: info[:60].decode(),
)
def test_a_server_info_of_another_form_is_refused(build: Any, servers: list[Server], info: bytes) -> None:
    servers[0].info = info
    with expect_error(ConfigError, field="rollout.server.urls", value=servers[0].url, remedy="start") as raised:
        build(servers[0])
    assert len(str(raised.value)) < 600


def test_a_login_in_an_address_is_not_shown(build: Any, servers: list[Server]) -> None:
    with pytest.raises(ConfigError) as raised:
        build(Server(url="http://user:secretpw@127.0.0.1:9"))
    assert "secretpw" not in str(raised.value) and "127.0.0.1:9" in str(raised.value)
    servers[0].url = servers[0].url.replace("//", "//user:secretpw@")
    for change in ({"max_model_len": 63}, {"max_model_len": "big"}):
        servers[0].declared |= change
        with pytest.raises(ConfigError) as raised:
            build(servers[0])
        assert "secretpw" not in str(raised.value)
    cfg = Config()
    cfg.rollout.server.urls = ["http://user:secretpw@a:1"] * 2 + ["ftp://user:secretpw@a", "http://user:secretpw@[a"]
    problems = " ".join(engine_kind("server").model_problems(cfg.rollout, cfg.model, None, records_routes=False))  # type: ignore[arg-type]
    assert "secretpw" not in problems and "more than once" in problems and "not a server address" in problems


def test_an_agents_turns_are_answered_while_another_request_hangs(build: Any, servers: list[Server]) -> None:
    engine = build(*servers)
    engine.load_weights(weights(1.0), version=0)
    has_ended = Event()
    servers[0].is_ready = has_ended.is_set  # the first request is sent to the first server

    async def rollout(policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
        turns = [await policy.sample(prompt.prompt_ids)]
        while prompt.index and len(turns) < 20:
            await asyncio.to_thread(time.sleep, 0.001)  # the agent's own work
            turns.append(await policy.sample([*prompt.prompt_ids, *turns[-1].token_ids]))
        has_ended.set()
        return single_turn(prompt, ctx.job.sample, turns[-1].token_ids, turns[-1].logprobs, "", "stop", 0)

    setup = RolloutSetup(rollout, in_order=False)
    prompts = [Prompt(f"p{index}", index, [20 + 10 * index], "text") for index in range(2)]
    began = time.monotonic()
    sampler = BatchSampler(engine, engine.rank, lambda rows: [""] * len(rows), setup=setup)
    hung, played = sampler.sample(prompts, Sampling(max_new_tokens=5), step=1)
    assert time.monotonic() - began < 10  # much less than a second per turn
    assert (len(servers[0].bodies), len(servers[1].bodies)) == (1, 20)
    assert hung.sampled_ids.tolist() == [21, 22, 23]
    assert played.sampled_ids.tolist() == [30 + 19 * 3 + k for k in (1, 2, 3)]


def test_a_cancelled_request_closes_its_connection(build: Any, servers: list[Server]) -> None:
    engine = build(servers[0])
    engine.load_weights(weights(1.0), version=0)
    servers[0].is_ready = lambda: False
    loop = ServedLoop(engine)

    async def cancel_one() -> None:
        task = loop.begin(loop.sample(requests(1)[0]))
        while not servers[0].bodies:
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="1 requests are in flight"):
            engine.load_weights(weights(1.0), version=1)
        task.cancel()
        while not servers[0].num_closed:
            await asyncio.sleep(0.01)
        assert task.cancelled() and loop.num_in_flight == 0

    run(asyncio.wait_for(loop.run(cancel_one()), 20))
    engine.load_weights(weights(1.0), version=1)


def test_a_server_that_does_not_take_weights_draws_nothing(build: Any, servers: list[Server]) -> None:
    engine = build(*servers)
    servers[1].fails_at = "/collective_rpc"
    engine.load_weights(weights(1.0), version=0)
    generate(engine, requests(4))
    assert servers[1].bodies == [] and len(servers[0].bodies) == 4
    assert servers[1].asked[-1] == "/resume" and servers[1].label.endswith("-0-incomplete")  # the server is shared
    servers[0].fails_at = "/collective_rpc"
    with pytest.raises(
        RuntimeError,
        match=r"no server loaded the weights: http.*/collective_rpc answers with status 500: .*no memory.*is resumed",
    ):
        engine.load_weights(weights(1.0), version=1)
    servers[0].fails_at = servers[1].fails_at = "/resume"
    with pytest.raises(RuntimeError, match=f"it is still paused, until POST {servers[1].url}/resume"):
        engine.load_weights(weights(1.0), version=2)
    with pytest.raises(RuntimeError, match="cannot generate"):
        generate(engine, requests(1))


def test_a_server_of_another_model_is_sent_nothing(build: Any, servers: list[Server], tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, **sizes}
    (served := tmp_path / "served").mkdir()
    servers[0].declared["model"] = str(served)
    for name, layers in (("config.json", 2), ("served/config.json", 3)):
        (tmp_path / name).write_text(json.dumps({**config, "num_hidden_layers": layers}))
    with expect_error(ConfigError, field="rollout.server.urls", value=str(served), remedy="start the server with"):
        build(servers[0])
    assert not {"/pause", "/collective_rpc"} & set(servers[0].asked)
    (served / "config.json").write_text(json.dumps(config))
    build(servers[0])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"forced_label": "default"}, "sampled from the weights default instead of this run's rlhf_mcore-"),
        ({"finish_reason": "abort"}, "ended a response of 3 tokens early: abort"),
        ({"fails_at": "/inference/v1/generate"}, "/inference/v1/generate answers with status 500"),
    ],
)
def test_a_response_of_other_weights_or_half_a_response_is_none(
    build: Any, servers: list[Server], change: dict[str, Any], told: str
) -> None:
    engine = build(servers[0])
    engine.load_weights(weights(1.0), version=0)
    for name, value in change.items():
        setattr(servers[0], name, value)
    with pytest.raises(
        RuntimeError, match=f"the servers of rollout.server.urls stopped sampling: {servers[0].url}.*{told}"
    ):
        generate(engine, requests(2))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"logprobs_mode": "raw_logprobs"},
            "needs processed_logprobs; start the server with --logprobs-mode processed_logprobs",
        ),
        ({"dtype": "torch.bfloat16"}, "needs torch.float32; start the server with --dtype float32"),
        ({"max_model_len": 63}, "less than rollout.max_model_len=64; start the server with --max-model-len 64"),
    ],
)
def test_a_server_that_draws_otherwise_is_refused(
    build: Any, servers: list[Server], change: dict[str, Any], told: str
) -> None:
    servers[1].declared |= change
    with pytest.raises(ConfigError, match=told):
        build(*servers)


def test_a_server_without_the_routes_is_refused(build: Any, servers: list[Server]) -> None:
    servers[0].fails_at = "/weight_info"
    with pytest.raises(ConfigError, match="start the server with VLLM_SERVER_DEV_MODE=1"):
        build(servers[0])
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9/health does not answer"):
        build(Server(url="http://127.0.0.1:9"))


def test_a_place_that_cannot_hold_weights_is_refused(build: Any, servers: list[Server], tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(ConfigError, match=r"rollout\.server\.weights_dir=.*/weights: File exists; name a directory"):
        build(servers[0])


def test_the_key_is_sent_from_its_variable(build: Any, servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    servers[0].token = "s3cret"
    with pytest.raises(ConfigError, match="answers with status 401"):
        build(servers[0])
    monkeypatch.setenv("KEY_OF_A_TEST", "s3cret")
    engine = build(servers[0], token_env="KEY_OF_A_TEST")
    engine.load_weights(weights(1.0), version=0)
    assert len(generate(engine, requests(1))) == 1


def test_weights_go_to_files_of_a_bounded_size(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "w", shard_bytes=100)
    for number in range(5):
        writer.add(f"t{number}", torch.full((4, 4), float(number)).t())  # 64 bytes, not contiguous
    writer.close()
    files = sorted((tmp_path / "w").iterdir())
    assert [len(load_file(file)) for file in files] == [2, 2, 1]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "needs rollout.server.urls"),
        (["rollout.server.urls=[10.0.0.7:8000]"], "has '10.0.0.7:8000', which is not a server address"),
        (["rollout.server.urls=[http://a:1]"], "needs rollout.server.weights_dir"),
        (
            ["rollout.server.urls=[http://a:1,http://a:1]", "rollout.server.weights_dir=/w"],
            "'http://a:1' more than once",
        ),
        (
            ["rollout.server.urls=[http://a:1]", "rollout.server.weights_dir=/w", "rollout.server.token_env=NO_SUCH"],
            "is not set",
        ),
        (
            ["rollout.server.urls=[http://a:1]", "rollout.server.weights_dir=/w", "rollout.sampling.top_k=5"],
            "set them to 1 and -1",
        ),
    ],
)
def test_what_is_missing_is_told_before_the_run(overrides: list[str], told: str) -> None:
    cfg = Config()
    for override in overrides:
        key, _, value = override.partition("=")
        *path, name = key.split(".")
        owner: Any = cfg
        for part in path:
            owner = getattr(owner, part)
        setattr(
            owner,
            name,
            value.strip("[]").split(",") if value.startswith("[") else int(value) if value.isdigit() else value,
        )
    problems = list(engine_kind("server").model_problems(cfg.rollout, cfg.model, None, records_routes=False))  # type: ignore[arg-type]
    assert any(told in problem for problem in problems), problems
