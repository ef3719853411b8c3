"""docs/guide/environments/index.md: its class plays, its keys are known, its table names every reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.rules.environment import environment_problems
from rlhf_mcore.config.rules.reward import reward_problems
from rlhf_mcore.coroutines import run
from rlhf_mcore.environments.sessions import Sessions, StepResult
from rlhf_mcore.rewards.pool import WorkerLimits
from rlhf_mcore.types import LIMITS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "guide" / "environments" / "index.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The only code of a language on the page."""
    [text] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("guess.py").write_text(block("python"))
    Path("run.yaml").write_text(f"base: {ROOT}/configs/base.yaml\n" + block("yaml"))
    cfg = load_config("run.yaml", ["model.path=model", "data.train=[a.jsonl]"])
    assert [*reward_problems(cfg), *environment_problems(cfg)] == []
    own = cfg.environment
    assert own.function is not None and own.options is not None
    sessions = Sessions(own.function, own.options, WorkerLimits(workers=1))

    async def guess() -> StepResult:
        session = sessions.open({}, seed=3)
        answer = await session.reset()
        assert answer.messages == [{"role": "user", "content": "Guess my number, from 1 to 7."}]
        low, high = 1, 7
        for _ in range(own.max_turns):
            guess = (low + high) // 2
            answer = await session.step(str(guess))
            if answer.done:
                break
            low, high = (guess + 1, high) if answer.messages[0]["content"] == "higher" else (low, guess - 1)
        return answer

    answer = run(guess())
    assert (answer.done, answer.reward) == (True, 1.0)
    sessions.close_all()


def test_every_reason_is_in_the_table() -> None:
    section = PAGE.partition("## What ends an episode")[2].partition("\n## ")[0]
    assert {"finish_reason", "stop", "environment", *LIMITS} == set(
        re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    )


@pytest.mark.parametrize("name", ["guess", "calculator"])
def test_the_examples_are_configurations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cfg = load_config(f"configs/quickstart/{name}.yaml", [])
    assert [*reward_problems(cfg), *environment_problems(cfg)] == []
    assert f"configs/quickstart/{name}.yaml" in PAGE and f"tools/make_environments.py {name}" in PAGE


def test_a_misspelt_name_is_told_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cfg = load_config("configs/quickstart/guess.yaml", ["environment.function=gymnasum"])
    assert "neither path/to/file.py:Class nor one of tools, gymnasium, openenv" in next(environment_problems(cfg))
