"""Run the examples of the pages in docs/guide/rewards."""

from __future__ import annotations

import re
import runpy
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.rules.reward import rule_problems, service_problems
from rlhf_mcore.config.schema import RemoteRewardConfig, RewardConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.types import Prompt, Score
from tests.episodes import single_turn

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((DOCS / "guide" / "rewards").glob("*.md"))}
SNIPPETS = [code for page in PAGES.values() for code in re.findall(r"^```yaml\n(reward:\n.*?)^```$", page, re.M | re.S)]


def test_a_server_of_your_own(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["services.md"], re.DOTALL)
    (tmp_path / "server.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "server.py"), run_name="server")
    with ThreadingHTTPServer(("127.0.0.1", 0), names["Rewards"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/score"
        reward = build_reward(RewardConfig(remote=RemoteRewardConfig(url=url, batch_size=2)))
        made = [
            single_turn(Prompt(text, n, [1], "", ground_truth="42"), 0, [1], [0.0], text, "stop", 0)
            for n, text in enumerate(["It is 42", "It is 41", "42 "])
        ]
        assert run(reward.score(made)) == [
            Score(1.0, {"length": 8.0}),
            Score(0.0, {"length": 8.0}),
            Score(1.0, {"length": 3.0}),
        ]
        reward.close()
        server.shutdown()


@pytest.mark.parametrize("page", ["get-started/train-your-model.md", "guide/rewards/functions.md"])
def test_a_function_of_your_own(page: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(def grade.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_reward.py").write_text(code)
    grade = runpy.run_path(str(tmp_path / "my_reward.py"))["grade"]
    made = [grade("openai/gsm8k", response, "42", {}) for response in ("It is 42", "It is 41", "")]
    assert [score["score"] if isinstance(score, dict) else score for score in made] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[snippet.splitlines()[1].strip()[:30] for snippet in SNIPPETS])
def test_a_configuration_is_one(snippet: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(snippet)
    cfg = load_config(tmp_path / "run.yaml", ["model.path=none"]).reward
    assert [*service_problems(cfg), *rule_problems(cfg)] == []


def test_there_are_snippets_of_everything() -> None:
    assert len(SNIPPETS) >= 6
    assert all(
        any(word in snippet for snippet in SNIPPETS)
        for word in ("rules", "sources", "function", "pool", "remote", "judge")
    )
