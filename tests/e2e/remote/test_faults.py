"""Real engines under a real Ray that are killed, stopped, silenced, added and removed while they generate, and lend turns."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.schema import EnvironmentConfig
from rlhf_mcore.environments.build import EpisodeSpec
from rlhf_mcore.own_processes import has_ended
from rlhf_mcore.rollout.remote.fleet import Fleet
from rlhf_mcore.rollout.remote.fleet_state import EnginesLost
from rlhf_mcore.rollout.vllm.tool_calls import ToolCallParser
from rlhf_mcore.types import Job, Prompt, Sampling, Trajectory
from tests.commands import descendants, wait_for
from tests.e2e.remote.fleets import MAX_MODEL_LEN, begin, collect, finished_of, jobs, plan, publish, running, tokens
from tests.e2e.rollout.tiny import save_model

NEW_TOKENS = 100
SLOTS = 8  # turns that an engine samples at once
AGENT = """
import os
from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="of no episode", max_retries=0)

async def play(task, base_url, api_key):
    client, messages = CLIENT.with_options(base_url=base_url, api_key=api_key), list(task["messages"])
    with open("begun", "a") as file:
        file.write(f"{os.getppid()}\\n")
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "tool", "content": "7"}]
    return 0.5
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        save_model(folder / name, "qwen3", seed)
        (folder / name / "chat_template.jinja").write_text(
            "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
        )
    return folder / "a", folder / "b"


@pytest.fixture(scope="module")
def pair(directories: tuple[Path, Path]) -> Iterator[tuple[Fleet, list[str]]]:
    """Start a Ray and two engines for all tests that leave them running."""
    folder = directories[0].parent
    (folder / "agent.py").write_text(AGENT)
    own = EnvironmentConfig(function="agent", max_turns=3, max_tokens=150, workers=1)
    own.agent.function = "agent.py:play"
    episodes = EpisodeSpec(
        own,
        tools=[],
        make_parser=ToolCallParser,
        chat_template="auto",
        tokenizer_dir=str(directories[0]),
        fails=True,
        overlap=True,
        folder=str(folder),
        num_engines=2,
        max_total=MAX_MODEL_LEN,
        make_reader=None,
        variables={},
    )
    made_of = {"timeout_s": 4.0, "max_num_seqs": SLOTS, "episodes": episodes.build}
    with running(plan(directories[0], num_engines=2, **made_of)) as made:
        yield made


@pytest.fixture
def expected_tokens(pair: tuple[Fleet, list[str]], directories: tuple[Path, Path]) -> dict[int, list[int]]:
    """Return the tokens of a test's requests without a fault."""
    fleet, notes = pair
    publish(fleet, 0, *directories)
    notes.clear()
    return tokens(collect(fleet, begin(fleet, jobs(6, 4, NEW_TOKENS)), *directories))


def pids(fleet: Fleet, directories: tuple[Path, Path], name: str) -> list[int]:
    """Process ids of the engines, in no order."""
    publish(fleet, 0, *directories, name=name)
    return [int(line) for line in (directories[0].parent / f"{name}.pids").read_text().split()]


def kill(pid: int, folder: Path) -> None:
    os.kill(pid, signal.SIGKILL)


def freeze(pid: int, folder: Path) -> None:
    os.kill(pid, signal.SIGSTOP)


def silence(pid: int, folder: Path) -> None:
    """Let an engine step and answer without sampling tokens."""
    (folder / f"silent.{pid}").touch()


@pytest.mark.parametrize(
    ("fault", "reason"), [(kill, ""), (freeze, "has not answered for 4 s"), (silence, "has drawn no token for 4 s")]
)
def test_fault_18_and_19_and_25_every_request_is_answered_once_whatever_happens_to_an_engine(
    pair: tuple[Fleet, list[str]],
    directories: tuple[Path, Path],
    expected_tokens: dict[int, list[int]],
    fault: Callable[[int, Path], None],
    reason: str,
) -> None:
    fleet, notes = pair
    victim = pids(fleet, directories, fault.__name__)[0]
    futures = begin(fleet, jobs(6, 4, NEW_TOKENS))
    fault(victim, directories[0].parent)
    drawn = collect(fleet, futures, *directories)
    assert tokens(drawn) == expected_tokens
    [note] = [note for note in notes if "is ready" not in note]
    assert "has failed and is started again" in note and reason in note
    while any(found.state == "starting" for found in fleet.status()):
        time.sleep(0.2)
    assert len(publish(fleet, 0, *directories)) == 2
    with pytest.raises(ProcessLookupError):  # even a stopped process is gone
        os.kill(victim, 0)


@pytest.fixture(scope="module")
def at_home(pair: tuple[Fleet, list[str]], directories: tuple[Path, Path]) -> list[Trajectory]:
    """Play an agent's episodes on an engine that runs all of their turns at once."""
    fleet, _ = pair
    publish(fleet, 0, *directories)
    fleet.pop_work()
    drawn = [*play(fleet, range(6)), *play(fleet, range(6, 12))]
    assert fleet.pop_work()[0].lent == 0
    return drawn


def play(fleet: Fleet, samples: range, meanwhile: Callable[[], None] = lambda: None) -> list[Trajectory]:
    """Play episodes of one prompt, which go to one engine."""
    text = "Which-number?"
    prompt = Prompt("p", 0, [5, 6, 7], text, messages=[{"role": "user", "content": text}])
    sampling = Sampling(max_new_tokens=30, seed=3)
    futures = begin(fleet, [Job(sample, prompt, sample, sampling, step=0) for sample in samples])
    meanwhile()
    drawn = collect(fleet, futures)
    return [drawn[sample] for sample in samples]


@pytest.mark.parametrize("lost", ["nobody", "the engine that they were lent to", "the engine of the episodes"])
def test_fault_18_turns_of_a_loaded_engine_are_drawn_by_another_and_episodes_are_those_of_one(
    pair: tuple[Fleet, list[str]], directories: tuple[Path, Path], at_home: list[Trajectory], lost: str
) -> None:
    fleet, notes = pair
    while any(found.state == "starting" for found in fleet.status()):
        time.sleep(0.2)
    engines, folder = pids(fleet, directories, f"lost-{lost}"), directories[0].parent
    (folder / "begun").unlink()
    fleet.pop_work(), notes.clear()
    players = [0, 0]

    def lend_and_lose() -> None:
        wait_for(lambda: fleet.pop_work()[0].lent > 0, 60)
        owner = int((folder / "begun").read_text().split()[0])
        players[:] = sorted(engines, key=lambda pid: pid != owner)
        if lost != "nobody":
            kill(players[lost == "the engine that they were lent to"], folder)
        (folder / "slow").unlink()

    (folder / "slow").touch()
    drawn = play(fleet, range(12), lend_and_lose)
    for found, expected in zip(drawn, at_home, strict=True):
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert {version for _, version in found.versions} == {0}
        assert found.num_sampled > 0 and [turn.writer for turn in found.turns].count("policy") == 3
        assert found.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=1e-5)
        assert found.sampled_logprobs.tolist() == pytest.approx(logprobs_of(found, directories[0]), abs=1e-4)
    starts = [int(line) for line in (folder / "begun").read_text().split()]
    again = 12 if lost == "the engine of the episodes" else 0  # else all stay with the engine that has their history
    assert [starts.count(pid) for pid in players] == [12, again] and len(starts) == 12 + again
    told = [note for note in notes if "is ready" not in note]
    assert len(told) == (lost != "nobody") and all("has failed and is started again, its " in note for note in told)


def logprobs_of(played: Trajectory, directory: Path) -> list[float]:
    """Compute logprobs of the policy's sampled tokens with transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor(played.token_ids.tolist())
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(directory).eval()(tokens[None]).logits[0, :-1]
    found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return [float(value) for value in found[torch.tensor(played.loss_mask[1:])]]


def test_fault_18_where_all_engines_are_killed_weights_come_first(
    pair: tuple[Fleet, list[str]], directories: tuple[Path, Path], expected_tokens: dict[int, list[int]]
) -> None:
    fleet, _ = pair
    victims = pids(fleet, directories, "all")
    futures = begin(fleet, jobs(6, 4, NEW_TOKENS))
    for victim in victims:
        kill(victim, directories[0])
    evaluated = begin(fleet, jobs(6, 4, NEW_TOKENS))  # at the same time, with the same numbers
    assert tokens(collect(fleet, futures, *directories)) == expected_tokens
    assert tokens(collect(fleet, evaluated, *directories)) == expected_tokens


def test_fault_33_engines_come_and_go_while_they_generate(
    pair: tuple[Fleet, list[str]], directories: tuple[Path, Path], expected_tokens: dict[int, list[int]]
) -> None:
    fleet, _ = pair
    before = [found.name for found in fleet.status()]
    while any(found.state != "serving" for found in fleet.status()):
        time.sleep(0.5)
        publish(fleet, 0, *directories)
    futures = begin(fleet, jobs(6, 4, NEW_TOKENS))
    [added] = fleet.add(1)
    fleet.drain(before[0])
    while len(finished_of(futures)) < 12 or next(e for e in fleet.status() if e.name == added).state == "starting":
        time.sleep(0.2)
    publish(fleet, 0, *directories)
    futures |= begin(fleet, jobs(6, 4, NEW_TOKENS, first=100))
    fleet.remove(before[1])
    drawn = collect(fleet, futures, *directories)
    assert tokens(drawn) == expected_tokens | {100 + number: found for number, found in expected_tokens.items()}
    assert [found.name for found in fleet.status()] == [added]


def test_fault_32_without_ray_there_is_one_message_and_no_wait(
    pair: tuple[Fleet, list[str]], directories: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """The last one: nothing is left of it."""
    fleet, _ = pair
    publish(fleet, 0, *directories)
    futures = begin(fleet, jobs(6, 4, NEW_TOKENS))
    head: Any = fleet._machines._head  # type: ignore[attr-defined]
    [raylet] = [pid for pid in descendants(head.pid) if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
    everything = descendants(head.pid)
    kill(raylet, directories[0])
    with pytest.raises(EnginesLost, match=r"^Ray on this machine has ended\. .* the same command continues it"):
        collect(fleet, futures, *directories)
    assert head.wait(120) == 0 and [pid for pid in everything if not has_ended(pid)] == []
    assert capfd.readouterr() == ("", "")
