"""Training uses exactly the tokens that a real engine sampled for an agent, for any moves of the agent and any weight changes."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Qwen2Config

from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.data.episodes import token_versions
from rlhf_mcore.environments.agents.conversation import Conversation
from rlhf_mcore.environments.agents.dialects import ClientRequest, RequestError, TurnInput
from rlhf_mcore.environments.agents.endpoint import ServedEpisode
from rlhf_mcore.environments.agents.episode import AgentRollout, AgentRules
from rlhf_mcore.environments.sessions import StepResult
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.hf.engine import HFEngine
from rlhf_mcore.sampling.engine_loop import EngineLoop
from rlhf_mcore.sampling.followers import EnginePass, run_pass
from rlhf_mcore.sampling.rollouts import LocalPlayer, RolloutLimits, RolloutSetup
from rlhf_mcore.types import Completion, Job, Prompt, Sampling, Trajectory

PROMPT = Prompt("p", 0, [1, 2], "prompt", messages=[])
VERSIONS = 4


class Desk:
    """Replaces an endpoint and its sessions. It opens a single episode, and ends it on request."""

    name, url = "agent", ""
    episode: ServedEpisode

    def __init__(self) -> None:
        self.end: asyncio.Future[StepResult] = asyncio.get_running_loop().create_future()

    def open(self, what: Any, *seed: int) -> Any:
        if seed:
            return self  # a session
        self.episode = what
        return "key"

    async def reset(self) -> StepResult:
        return StepResult()

    async def step(self, action: Any) -> StepResult:
        return await self.end

    def close(self, *key: str) -> None: ...


class Episode:
    """An episode with an engine, move by move. ``heard``: tokens and logprobs of the answers since the agent's last start."""

    def __init__(self, engine: HFEngine, tokenizer: PreTrainedTokenizerBase, weights: list[Any]) -> None:
        self.engine, self.weights, self.desk = engine, weights, Desk()
        desk: Any = self.desk
        rollout = AgentRollout(desk, desk, Conversation(tokenizer), AgentRules())
        setup = RolloutSetup(rollout, RolloutLimits(max_turns=60, max_total=200), in_order=False)
        self.histories: list[list[dict[str, Any]]] = [[user("q")]]
        self.asked: list[asyncio.Task[None]] = []
        self.heard: list[tuple[str, float]] = []
        self.drawn: dict[float, int] = {}  # every token of the engine, by its logprob
        engine.cancel(range(9999))  # left by a failed example
        self.publish(0)
        self.loop = EngineLoop(engine, self.run_pass, in_order=False)
        job = Job(0, PROMPT, 0, Sampling(max_new_tokens=6, seed=5), 3)
        [self.whole] = LocalPlayer(self.loop, lambda rows: [""], setup).begin([job])

    def publish(self, version: int) -> None:
        self.engine.load_weights(self.weights[version].items(), version=version)

    def ask(self, history: list[dict[str, Any]], **how: Any) -> asyncio.Task[None]:
        order, episode = ClientRequest([TurnInput(history)], **how), self.desk.episode

        async def ask() -> None:
            with suppress(RequestError):
                for said in await episode.ask(order, time.monotonic()):
                    self.heard += said.tokens
                    self.histories.append([*history, dict(said.message), user("next")])

        self.asked.append(task := asyncio.create_task(ask()))
        return task

    async def begin_again(self) -> None:
        await self.step()  # requests before it are taken before it
        await self.desk.episode.restart()
        await self.settle()
        self.heard, self.asked = [], []

    async def settle(self) -> None:
        """Let all coroutines come to their next wait."""
        for _ in range(100):
            await asyncio.sleep(0)
        while [task for task in asyncio.all_tasks() if "_find_all" in repr(task)]:
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)

    async def step(self) -> None:
        await self.settle()
        if self.loop._can_pass:
            self.loop._make_pass()
        await self.settle()

    def run_pass(self, made: EnginePass) -> list[Completion]:
        finished = run_pass(self.engine, None, made)
        for each in finished:
            self.drawn |= dict(zip(each.logprobs.tolist(), each.token_ids.tolist(), strict=True))
        return finished

    async def end(self) -> Trajectory:
        while not all(task.done() for task in self.asked):
            await self.step()
        self.desk.end.set_result(StepResult(reward=1.0, done=True))
        return await self.whole


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def engine_and_model(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase
) -> tuple[HFEngine, Any, list[Any]]:
    """An engine, the same model for recomputing, and its weights by version: from one to the next all probabilities differ."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = Qwen2Config(vocab_size=128, initializer_range=0.3, tie_word_embeddings=False, **shape)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    weights = []
    for seed in range(VERSIONS):
        torch.manual_seed(seed)
        weights.append({k: v.clone() for k, v in AutoModelForCausalLM.from_config(config).state_dict().items()})
    rollout = RolloutConfig(engine="hf", at_publish="resubmit", max_num_seqs=8)
    engine = HFEngine(rollout, EngineModel(str(folder), str(folder), "fp32", 256, 0))
    return engine, AutoModelForCausalLM.from_config(config).eval(), weights


MOVES = ["ask", "ask", "two", "stop", "step", "step", "step", "publish", "edit", "drop", "fork", "leave", "again"]


async def play(
    engine: HFEngine, tokenizer: PreTrainedTokenizerBase, weights: list[Any], data: st.DataObject
) -> tuple[Episode, Trajectory]:
    episode, version, waiting = Episode(engine, tokenizer, weights), 0, list[asyncio.Task[None]]()
    await episode.settle()
    waiting.append(episode.ask(episode.histories[0]))
    for move in data.draw(st.lists(st.sampled_from(MOVES), min_size=8, max_size=40)):
        history = episode.histories[data.draw(st.integers(0, len(episode.histories) - 1))]
        if move in ("ask", "two", "stop"):
            how = {"two": {"n": 2}, "stop": {"stop": ("a", "1"), "max_tokens": 4}}.get(move, {})
            waiting.append(episode.ask(list(history), **how))
        elif move == "step":
            await episode.step()
        elif move == "publish" and version + 1 < VERSIONS:
            version += 1
            episode.publish(version)
        elif move == "edit":
            place = data.draw(st.integers(0, len(history) - 1))
            episode.histories.append([*history[:place], {**history[place], "content": "other"}])
        elif move == "drop" and len(history) > 1:
            episode.histories.append(history[1:])
        elif move == "fork":
            episode.histories.append([*history, user("fork")])
        elif move == "leave":
            waiting[-1].cancel()
        elif move == "again" and data.draw(st.integers(0, 3)) == 0:
            await episode.begin_again()
    episode.ask([user("last")])  # an episode needs a turn
    return episode, await episode.end()


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_happens_what_is_learned_was_drawn_in_its_place_by_its_version(
    engine_and_model: tuple[HFEngine, Any, list[Any]], tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    engine, model, weights = engine_and_model
    episode, whole = run(play(engine, tokenizer, weights, data))

    learned, logprobs = whole.loss_mask, whole.logprobs
    assert sorted(logprobs[learned].tolist()) == sorted(
        logprob for _, logprob in episode.heard
    )  # each once, and no other
    assert whole.token_ids[learned].tolist() == [episode.drawn[value] for value in logprobs[learned].tolist()]
    versions = token_versions([whole]).numpy()
    start = 0
    for size in whole.sequences or (len(whole.token_ids),):
        own = slice(start, start := start + size)
        ids, mask = torch.from_numpy(whole.token_ids[own].astype(np.int64)), learned[own]
        for drawn_by in set(versions[own][mask].tolist()):
            model.load_state_dict(weights[drawn_by])
            with torch.no_grad():
                all_logprobs = model(ids[None]).logits[0].log_softmax(-1)
            recomputed = all_logprobs[:-1].gather(-1, ids[1:, None])[:, 0].numpy()
            its = np.flatnonzero(mask & (versions[own] == drawn_by))
            np.testing.assert_allclose(recomputed[its - 1], logprobs[own][its], atol=1e-5)
