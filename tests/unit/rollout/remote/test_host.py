"""What a rank of a remote engine does between two steps, with a fake engine inside and no Ray around it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.protocols import PeersLost
from rlhf_mcore.rollout import engine as engines
from rlhf_mcore.rollout.engine import EngineRank, VersionedWeights
from rlhf_mcore.rollout.remote import host as module
from rlhf_mcore.rollout.remote.host import EngineHost, Location, RankRendezvous
from rlhf_mcore.sampling.requests import request_of
from rlhf_mcore.types import Completion, Job, Prompt, Request, Sampling
from tests.commands import wait_for

ORDER: Any = None


class Engine:
    """Draws a token in each step that the test allows, and finishes a request after as many as it asks for."""

    num_ranks, warnings = 1, ("no FlashInfer",)

    def __init__(self) -> None:
        self.drawn: dict[int, tuple[Request, int]] = {}
        self.allowed = threading.Semaphore(0)
        self.told: list[Any] = []
        self.tokens_drawn, self.policy_version = 0, 3

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
        self.tokens_drawn += len(self.drawn)
        self.drawn = {number: (request, drawn + 1) for number, (request, drawn) in self.drawn.items()}
        ended = [number for number, (request, drawn) in self.drawn.items() if drawn == request.sampling.max_new_tokens]
        for number in ended:
            del self.drawn[number]
        return [
            Completion(number, np.zeros(1, np.int32), np.zeros(1, np.float32), ((0, 3),), "stop") for number in ended
        ]


class Driver:
    """One turn for each episode, which its environment begins when the test lets it, and ends. Only even requests are episodes."""

    num_held = 3

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.open: set[int] = set()
        self.answers = threading.Event()
        self.num_open = 0

    def begin(self, requests: Sequence[Request]) -> list[Request]:
        self.waiting += [request for request in requests if request.request_id % 2 == 0]
        self.open |= {request.request_id for request in self.waiting}
        self.num_open = len(self.open)
        return [request for request in requests if request.request_id % 2]

    def cancel(self, request_ids: Collection[int]) -> None:
        self.open -= set(request_ids)
        self.waiting = [request for request in self.waiting if request.request_id in self.open]
        self.num_open = len(self.open)

    def due(self, engine_draws: bool, wait_s: float | None) -> list[Request] | None:
        if self.waiting and not self.answers.wait(wait_s):
            return None
        due, self.waiting = self.waiting, []
        return due

    def abandoned_turns(self) -> Collection[int]:
        return ()

    def lend(self, most: int) -> list[Request]:
        return [request_of(job(2 * number, 1)) for number in range(most)]

    def take(self, completions: Sequence[Completion]) -> list[Completion]:
        self.cancel([found.request_id for found in completions])
        return list(completions)


class Receiver:
    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def join(self, spec: Any, bridge: str) -> None:
        self.told.append("join")

    def sync(self, version: int, only: Any) -> None:
        self.told.append(("sync", version))
        if version < 0:
            raise ValueError("no such version")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EngineHost, Engine]]:
    """A lead that serves."""
    engine: Any = Engine()
    monkeypatch.setattr(module, "end_with_parent", lambda _: None)

    def build(self: EngineHost, *_: Any) -> None:
        self._engine, self._receiver = engine, Receiver(engine.told)  # type: ignore[assignment]

    monkeypatch.setattr(EngineHost, "_build", build)
    host = EngineHost()
    assert host.start(ORDER, RankRendezvous((Location("", 0),), 0), 1) == [
        "kernels: engine attention TRITON_ATTN",
        "no FlashInfer",
    ]
    host.resume()
    yield host, engine
    engine.allowed.release(100)


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


def test_weights_come_between_two_steps_and_requests_after_them(started: tuple[EngineHost, Engine]) -> None:
    host, engine = started
    host.submit([job(1, 1), job(2, 2)])
    engine.allowed.release()
    report = host.report(20)
    assert [found.number for found in report.outcomes] == [1]
    assert (report.tokens_drawn, report.num_in_flight, report.version) == (2, 1, 3)
    assert (report.work.steps, report.work.preemptions) == (1, 2)
    engine.allowed.release()  # of the step that it may have begun: pause waits for its end
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
    assert told[0] == [1, 2] and told.index([3]) > told.index(("sync", 4)) > told.index("join") > told.index("step")
    assert "step" not in told[told.index("join") : told.index([3])]


class AheadEngine(engines.Engine):
    """Has begun a pass when weights arrive, as vLLM's asynchronous scheduling has: what ends in it is finished by the sync."""

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

    def _num_drawn(self) -> dict[int, int]:
        return dict.fromkeys(self._in_flight, 1)

    def close(self) -> None: ...


def test_a_response_that_finishes_while_weights_arrive_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AheadEngine()
    monkeypatch.setattr(module, "end_with_parent", lambda _: None)

    class Loads(Receiver):
        def sync(self, version: int, only: Any) -> None:
            engine.load_weights([], version=version)

    def build(self: EngineHost, *_: Any) -> None:
        self._engine, self._receiver = engine, Loads([])  # type: ignore[assignment]

    monkeypatch.setattr(EngineHost, "_build", build)
    host = EngineHost()
    host.start(ORDER, RankRendezvous((Location("", 0),), 0), 1)
    host.resume()
    host.submit([job(1, 1), job(2, 1)])
    wait_for(lambda: engine.num_in_flight == 2, 60)
    host.pause()
    host.sync(4)
    host.resume()
    finished: list[int] = []
    for _ in range(3):
        finished += [found.number for found in host.report(2).outcomes]
    assert sorted(finished) == [1, 2] and engine.num_in_flight == 0


def test_an_engine_waits_for_environments_and_is_paused_meanwhile(started: tuple[EngineHost, Engine]) -> None:
    host, engine = started
    engine.allowed.release(100)
    host.pause()
    host._episodes = driver = Driver()  # type: ignore[assignment]
    host.resume()
    host.submit([job(1, 1), job(2, 1), job(4, 1)])
    waits = 0
    while waits < 2:  # and counts as progress
        waits = host.report(0.1).num_waits
    assert (engine.told, host.report(0).tokens_drawn) == ([[1]], 0)
    host.pause()
    host.sync(4)
    host.cancel([4])
    driver.answers.set()
    host.resume()
    finished: list[int] = []
    while len(finished) < 2:
        finished += [found.number for found in host.report(20).outcomes]
    assert sorted(finished) == [1, 2] and [told for told in engine.told if told] == [[1], ("sync", 4), [2], "step"]


def test_fault_36_what_is_drawn_afresh_finds_nothing_of_what_came_before(started: tuple[EngineHost, Engine]) -> None:
    host, engine = started
    engine.allowed.release(100)
    host.submit([job(1, 1)])
    assert [found.number for found in host.report(20).outcomes] == [1]
    host.submit([job(2, 1), job(4, 1)], True)
    assert [found.number for found in host.report(20).outcomes] == [2, 4]
    assert engine.told == [[1], "step", "forget", [2, 4], "step"]


def test_what_ends_the_engine_is_reported(started: tuple[EngineHost, Engine]) -> None:
    host, engine = started
    engine.step = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    host.submit([job(1, 1)])
    with pytest.raises(ZeroDivisionError):
        host.report(20)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        host.pause()


def test_a_lead_lends_turns_and_takes_them_back(started: tuple[EngineHost, Engine]) -> None:
    host, engine = started
    driver: Any = Driver()
    host._episodes = driver
    driver.answers.set()
    engine.allowed.release(100)
    host.submit([job(1, 1)])  # the thread that waits for it does not know of the driver
    assert len(host.report(20).outcomes) == 1
    host.lend(2)
    report = host.report(20)
    assert [turn.request_id for turn in report.lent] == [0, 2] and not report.outcomes
    host._work[2] = job(2, 1)
    host.take_back(2, Completion(0, np.zeros(1, np.int32), np.zeros(1, np.float32), ((0, 3),), "stop"))
    [back] = host.report(20).outcomes
    assert back.number == 2 and not host.report(0).lent
    host.submit([job(4, 1)])
    assert [each.number for each in host.report(20).outcomes] == [4] and host.report(0).num_held == 3


def test_a_rank_that_is_lost_is_told_without_the_source_of_gloo(
    started: tuple[EngineHost, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, engine = started
    text = "[/w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:56724: Connection reset by peer. Check the logs. GLHF!"

    def lose() -> list[Completion]:
        raise RuntimeError(text)

    monkeypatch.setattr(engine, "step", lose)
    host.submit([job(1, 1)])
    with pytest.raises(PeersLost) as raised:
        host.report(20)
    told = "one of its ranks is lost to the others (Read error [127.0.0.1]:56724: Connection reset by peer)"
    assert str(raised.value) == told
