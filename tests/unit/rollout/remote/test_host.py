"""The actions of a remote engine's rank between two steps, with a fake engine and without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.protocols import PeersLost
from rlhf_mcore.rollout import engine as engines
from rlhf_mcore.rollout.engine import EngineRank, VersionedWeights
from rlhf_mcore.rollout.remote import host as module
from rlhf_mcore.rollout.remote.host import BorrowedTurn, EngineHost, Location, RankRendezvous
from rlhf_mcore.sampling.rollouts import Context, Policy, RolloutSetup, request_of, sample_single_turn
from rlhf_mcore.types import Completion, Job, Prompt, Request, Sampling, Trajectory
from tests.commands import wait_for

ORDER: Any = None
HOSTS: list[EngineHost] = []  # hosts of the running test


@pytest.fixture(autouse=True)
def no_task_is_left() -> Iterator[None]:
    yield
    while HOSTS:
        host = HOSTS.pop()
        host._engine.allowed.release(10**6) if isinstance(host._engine, Engine) else None
        host._thread.close()


class Engine:
    """Samples a token in each step that the test allows, and finishes a request at its limit of tokens."""

    num_ranks, warnings = 1, ("no FlashInfer",)

    def __init__(self) -> None:
        self.drawn: dict[int, tuple[Request, int]] = {}
        self.allowed = threading.Semaphore(0)
        self.told: list[Any] = []
        self.num_sampled_tokens, self.policy_version = 0, 3

    @property
    def num_in_flight(self) -> int:
        return len(self.drawn)

    def kernels(self) -> dict[str, str]:
        return {"engine attention": "TRITON_ATTN"}

    def pop_preemptions(self) -> int:
        return 2

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return ["text"] * len(responses)

    def submit(self, requests: Sequence[Request]) -> None:
        self.told.append([request.request_id for request in requests])
        self.drawn |= {request.request_id: (request, 0) for request in requests}

    def compare_ranks(self) -> None: ...

    def forget_prefixes(self) -> None:
        assert not self.drawn
        self.told.append("forget")

    def cancel(self, request_ids: Collection[int]) -> None:
        for request_id in request_ids:
            self.drawn.pop(request_id, None)

    def step(self) -> list[Completion]:
        assert self.allowed.acquire(timeout=120)
        self.told.append("step")
        self.num_sampled_tokens += len(self.drawn)
        self.drawn = {number: (request, drawn + 1) for number, (request, drawn) in self.drawn.items()}
        ended = [number for number, (request, drawn) in self.drawn.items() if drawn == request.sampling.max_new_tokens]
        for number in ended:
            del self.drawn[number]
        return [
            Completion(number, np.zeros(1, np.int32), np.zeros(1, np.float32), ((0, 3),), "stop") for number in ended
        ]


class Receiver:
    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def join(self, spec: Any, bridge: str) -> None:
        self.told.append("join")

    def sync(self, version: int) -> None:
        self.told.append(("sync", version))
        if version < 0:
            raise ValueError("no such version")


def start(monkeypatch: pytest.MonkeyPatch, engine: Any, receiver: Any, setup: RolloutSetup | None = None) -> EngineHost:
    """Start a lead that serves, with two slots."""
    monkeypatch.setattr(module, "end_with_parent", lambda _: None)

    def build(self: EngineHost, *_: Any) -> None:
        self._engine, self._receiver, self._setup, self._slots = engine, receiver, setup, 2

    monkeypatch.setattr(EngineHost, "_build", build)
    host = EngineHost()
    HOSTS.append(host)
    lines = host.start(ORDER, RankRendezvous((Location("", 0),), 0), 1)
    assert lines == [f"kernels: {name} {kind}" for name, kind in engine.kernels().items()] + [*engine.warnings]
    host.resume()
    return host


@pytest.fixture
def running_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EngineHost, Engine]]:
    engine = Engine()
    yield start(monkeypatch, engine, Receiver(engine.told)), engine
    engine.allowed.release(100)


def outcomes(host: EngineHost, count: int) -> dict[int, Any]:
    """Return the next outcomes by number."""
    found: dict[int, Any] = {}
    while len(found) < count:
        found |= {outcome.number: outcome.result for outcome in host.report(20).outcomes}
    return found


def job(number: int, tokens: int) -> Job:
    return Job(
        number,
        Prompt(f"p{number}", number, [5], ""),
        0,
        Sampling(max_new_tokens=tokens),
        1,
        is_single_turn=number % 2 == 1,
    )


TRAINER = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.9",
    "MASTER_PORT": "1",
    "CUDA_VISIBLE_DEVICES": "6",
    "XDG_CACHE_HOME": "/cache",
}


def test_a_rank_takes_nothing_of_the_trainers_first_rank() -> None:
    places = Location("127.0.0.1", 29999, ("5",), "a"), Location("127.0.0.1", 0, ("GPU-7",), "a")
    meeting = RankRendezvous(places, 1, "3")
    own = module._rank_environment(meeting, 4, TRAINER)
    assert own == {
        "OMP_NUM_THREADS": "4",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "5,GPU-7",  # all of the engine's, its own is number LOCAL_RANK
        "VLLM_CACHE_ROOT": "/cache/vllm/engine-3",
    }
    other = module._rank_environment(replace(meeting, engine="4"), 4, {**TRAINER, "VLLM_CACHE_ROOT": "/mine"})
    assert other["VLLM_CACHE_ROOT"] == "/mine/engine-4"
    assert "NCCL_SOCKET_IFNAME" not in module._rank_environment(
        meeting, 4, {"NCCL_SOCKET_IFNAME": "ib0"}
    )  # the user's stays
    assert not {"CUDA_VISIBLE_DEVICES", "VLLM_CACHE_ROOT"} & set(
        module._rank_environment(replace(meeting, locations=(Location("127.0.0.1", 29999),) * 2), 1, {})
    )


def test_a_rank_on_another_machine_has_the_devices_and_the_interface_of_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "interface_of", lambda address: {"10.0.0.2": "eth2", "10.0.0.3": "ib3"}[address])
    places = [Location("10.0.0.2", 40, (str(number),), "a") for number in range(2)]
    places += [Location("10.0.0.3", 0, (str(number),), "b") for number in (6, 7)]
    own = [module._rank_environment(RankRendezvous(tuple(places), rank), 1, {}) for rank in range(4)]
    assert [(env["RANK"], env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) for env in own] == [
        ("0", "0", "0,1"),
        ("1", "1", "0,1"),
        ("2", "0", "6,7"),
        ("3", "1", "6,7"),
    ]
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) for env in own} == {("4", "2", "10.0.0.2")}
    assert [env["GLOO_SOCKET_IFNAME"] for env in own] == ["eth2", "eth2", "ib3", "ib3"]


def test_weights_come_between_two_steps_and_requests_after_them(running_host: tuple[EngineHost, Engine]) -> None:
    host, engine = running_host
    host.submit([job(1, 1), job(2, 2)])
    engine.allowed.release()
    report = host.report(20)
    assert [found.number for found in report.outcomes] == [1]
    assert (report.num_sampled_tokens, report.num_in_flight, report.version) == (2, 1, 3)
    assert (report.work.steps, report.work.preemptions) == (1, 2)
    engine.allowed.release()  # for a started step, because pause waits for its end
    host.pause()
    host.submit([job(3, 1)])
    host.join(ORDER, "{}")
    host.sync(4)
    with pytest.raises(ValueError, match="no such version"):
        host.sync(-1)
    engine.allowed.release(5)
    host.resume()
    finished: list[int] = []
    while len(finished) < 2:
        finished += [found.number for found in host.report(20).outcomes]
    assert sorted(finished) == [2, 3]
    work = host.report(0).work
    assert (work.steps, work.tokens) == (engine.told.count("step"), 4) and work.busy_s > 0
    told = engine.told
    assert told[0] == [0, 1] and told.index([2]) > told.index(("sync", 4)) > told.index("join") > told.index("step")
    assert "step" not in told[told.index("join") : told.index([2])]


class AheadEngine(engines.Engine):
    """Is within a pass when weights arrive, as with vLLM's asynchronous scheduling. The sync finishes this pass."""

    def __init__(self) -> None:
        VersionedWeights.__init__(self)
        self.rank, self._max_model_len, self._at_publish = EngineRank(), 100, "continue"
        self._in_flight, self._finished, self._tokens_of_finished = {}, [], 0
        self._tokenizer = SimpleNamespace(batch_decode=lambda rows, skip_special_tokens: ["text"] * len(rows))
        self.commit_load(3)

    def _begin(self, requests: Sequence[Request], limits: Sequence[int]) -> list[str]:
        return [str(request.request_id) for request in requests]

    def _step(self) -> list[Completion]:
        return []  # the result of a pass arrives one step later

    def load_weights(self, weights: Any, *, version: int) -> None:
        ids = list(self._in_flight)
        self._finished += self._drop_finished(
            [Completion(number, np.zeros(1, np.int32), np.zeros(1, np.float32), ((0, 3),), "stop") for number in ids]
        )
        self.commit_load(version)

    def _end(self, request_ids: Sequence[int]) -> None: ...

    def _num_sampled(self) -> dict[int, int]:
        return dict.fromkeys(self._in_flight, 1)

    def close(self) -> None: ...


def test_a_response_that_finishes_while_weights_arrive_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AheadEngine()

    class Loads(Receiver):
        def sync(self, version: int) -> None:
            engine.load_weights([], version=version)

    host = start(monkeypatch, engine, Loads([]))
    host.submit([job(1, 1), job(2, 1)])
    wait_for(lambda: engine.num_in_flight == 2, 60)
    host.pause()
    host.sync(4)
    host.resume()
    finished: list[int] = []
    for _ in range(3):
        finished += [found.number for found in host.report(2).outcomes]
    assert sorted(finished) == [1, 2] and engine.num_in_flight == 0


def test_an_engine_waits_for_environments_and_is_paused_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, answers = Engine(), threading.Event()
    engine.allowed.release(100)

    async def episode(policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
        while not answers.is_set():  # an environment
            await asyncio.sleep(0.005)
        return await sample_single_turn(policy, prompt, ctx)

    host = start(monkeypatch, engine, Receiver(engine.told), RolloutSetup(episode))
    host.submit([replace(job(1, 1), is_single_turn=True), job(2, 1), job(4, 1)])
    waits = 0
    while waits < 2:  # and counts as progress
        waits = host.report(0.1).num_waits
    assert engine.told == [] and host.report(0).num_sampled_tokens == 0  # in order
    host.pause()
    host.sync(4)
    host.cancel([4])
    answers.set()
    host.resume()
    assert sorted(outcomes(host, 2)) == [1, 2] and engine.told == [("sync", 4), [0, 1], "step"]


def test_out_of_order_an_engine_samples_while_environments_work(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.allowed.release(100)

    async def episode(policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
        await asyncio.sleep(60 if ctx.job.number == 2 else 0)
        return await sample_single_turn(policy, prompt, ctx)

    host = start(monkeypatch, engine, Receiver(engine.told), RolloutSetup(episode, in_order=False))
    host.submit([job(2, 1), job(4, 1)])
    assert list(outcomes(host, 1)) == [4]


def test_an_error_of_a_rollout_is_its_outcome_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.allowed.release(100)

    async def episode(policy: Policy, prompt: Prompt, ctx: Context) -> Trajectory:
        if ctx.job.number == 2:
            raise ConfigError("environment.function raises")
        return await sample_single_turn(policy, prompt, ctx)

    host = start(monkeypatch, engine, Receiver(engine.told), RolloutSetup(episode))
    host.submit([job(1, 1), job(2, 1)])
    found = outcomes(host, 2)
    assert isinstance(found[2], ConfigError) and found[1].response_text == "text" and found[1].prompt is None


def test_fault_36_what_is_drawn_afresh_finds_nothing_of_what_came_before(
    running_host: tuple[EngineHost, Engine],
) -> None:
    host, engine = running_host
    engine.allowed.release(100)
    host.submit([job(1, 1)])
    assert [found.number for found in host.report(20).outcomes] == [1]
    host.submit([job(2, 1), job(4, 1)], True)
    assert [found.number for found in host.report(20).outcomes] == [2, 4]
    assert engine.told == [[0], "step", "forget", [1, 2], "step"]


def test_what_ends_the_engine_is_reported(running_host: tuple[EngineHost, Engine]) -> None:
    host, engine = running_host
    engine.step = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    host.submit([job(1, 1)])
    with pytest.raises(ZeroDivisionError):
        host.report(20)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        host.pause()


def test_a_lead_lends_turns_and_takes_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    host = start(
        monkeypatch, engine, Receiver(engine.told), RolloutSetup(sample_single_turn, in_order=False, moves_turns=True)
    )
    engine.allowed.release(10**6)
    endless = [job(number, 10**9) for number in range(2)]
    host.submit([*endless, job(2, 1), job(3, 1), BorrowedTurn(-9, request_of(job(7, 1)))])
    wait_for(lambda: host.report(0).num_held == 3, 20)
    host.lend_turns(2)
    lent = host.report(20).lent
    assert [request.name for request in lent] == ["prompt 'p2', sample 0", "prompt 'p3', sample 0"]
    turn = Completion(99, np.zeros(1, np.int32), np.zeros(1, np.float32), ((0, 3),), "stop")
    host.take_back(lent[1].request_id, turn)
    host.take_back(lent[1].request_id, turn)  # it is resolved once
    assert list(outcomes(host, 1)) == [3]
    host.cancel([0, 1, 2])
    found = outcomes(host, 1)
    assert isinstance(found[-9], Completion) and not host.report(0).lent
    wait_for(lambda: host.report(0).num_in_flight == 0, 20)
    assert host.report(0).num_held == 0


def test_a_rank_that_is_lost_is_told_without_the_source_of_gloo(
    running_host: tuple[EngineHost, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, engine = running_host
    text = "[/w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:56724: Connection reset by peer. Check the logs. GLHF!"

    def lose() -> list[Completion]:
        raise RuntimeError(text)

    monkeypatch.setattr(engine, "step", lose)
    host.submit([job(1, 1)])
    with pytest.raises(PeersLost) as raised:
        host.report(20)
    told = "one of its ranks is lost to the others (Read error [127.0.0.1]:56724: Connection reset by peer)"
    assert str(raised.value) == told
