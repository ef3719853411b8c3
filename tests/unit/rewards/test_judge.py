"""Score with a judge behind a chat API: its requests, and the scores from its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import JudgeConfig, RewardConfig, RuleConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.trainer.evaluation import is_correct
from rlhf_mcore.types import Prompt, Score, Trajectory
from tests.episodes import single_turn
from tests.unit.rewards.http_server import Request, answer, scores_of, serve_script


def trajectory(text: str, index: int = 0) -> Trajectory:
    prompt = Prompt(f"train-{index}", index, [1], "What is 6 x 7?", data_source="sums", ground_truth="42")
    return single_turn(prompt, 0, [5], [-0.1], text, "stop", 0)


def says(content: Any) -> bytes:
    return answer({"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]})


def judge_responses(
    given: list[Trajectory], url: str, rules: list[RuleConfig] | None = None, **settings: Any
) -> list[Score]:
    judge = JudgeConfig(url=f"{url}/v1/", model="m", **{"timeout_s": 20.0, **settings})
    return scores_of(RewardConfig(rules=rules or [], judge=judge, on_error="zero"), given, 2, 30.0)


pytestmark = pytest.mark.usefixtures("short_pauses")


def test_its_weighted_grade_is_added_to_the_rules() -> None:
    def reply(request: Request) -> bytes:
        content = request.json()["messages"][0]["content"]
        return says("A good one.\nScore: 7.5" if "#### 42" in content else "Score: 9, no.\n**Score:** 2")

    with serve_script(reply) as server:
        found = judge_responses(
            [trajectory("#### 42"), trajectory("#### 41", 1)], server.url, [RuleConfig(name="final_number")], weight=2.0
        )
    assert found == [Score(2.5, {"final_number": 1.0, "judge": 0.75}), Score(0.4, {"final_number": 0.0, "judge": 0.2})]
    assert [is_correct(score.value, score.parts) for score in found] == [True, False]  # the rule decides
    assert [is_correct(value, {"judge": value}) for value in (1.0, 0.9)] == [True, False]


def test_it_is_asked_once_for_each_response_at_temperature_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    rubric = "Of {data_source}: {prompt} -> {response} ({ground_truth}) {unknown} {{response}}"
    with serve_script(lambda request: says("score 3")) as server:
        judge_responses(
            [trajectory("{ground_truth} \\1 é\ud800")],
            server.url,
            rubric=rubric,
            max_score=4.0,
            max_tokens=7,
            token_env="JUDGE_KEY",
        )
        (seen,) = server.seen
    # Texts of a response are inserted unchanged. A lone surrogate has no UTF-8 form.
    text = "{ground_truth} \\1 é\ud800"
    content = f"Of sums: What is 6 x 7? -> {text} (42) {{unknown}} {{{text}}}"
    assert seen.path == "/v1/chat/completions" and seen.headers["authorization"] == "Bearer s3cret"
    assert seen.json() == {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 7,
    }


def test_a_rubric_of_our_own_shows_everything_and_the_scale() -> None:
    with serve_script(lambda request: says("Score: 5")) as server:
        assert judge_responses([trajectory("It is 42.")], server.url, max_score=5.0) == [Score(1.0, {"judge": 1.0})]
        content = server.seen[0].json()["messages"][0]["content"]
    for words in ("What is 6 x 7?", "It is 42.", "<reference>\n42\n", "to 5 (right"):
        assert words in content


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("It is fine.", "gave no score that reward.judge.parse finds: 'It is fine.'"),
        ("", "gave no score"),
        ("\ud800 no", "gave no score that reward.judge.parse finds: '? no'"),
        ("Score: 11", "gave the score '11', which is not between 0 and reward.judge.max_score=10"),
        ("Score: -1", "gave the score '-1'"),
        ("Score (0-10): great", "gave no score"),
        ("Score: " + "9" * 400, "gave the score '999"),
        (None, "answered without a text"),
        (["a"], "answered without a text"),
    ],
)
def test_an_answer_without_a_score_is_no_zero(content: Any, cause: str) -> None:
    """The response gets no score, which differs from the worst score.

    There is no retry, because the answer at temperature 0 would be the same.
    """
    with serve_script(lambda request: says(content)) as server:
        (score,) = judge_responses([trajectory("x")], server.url, [RuleConfig(name="exact_match")])
        assert len(server.seen) == 1
    assert (score.value, score.failure, score.parts) == (0.0, "error", {"exact_match": 0.0})
    assert cause in score.cause and "reward.judge.url=" in score.cause and "prompt 'train-0'" in score.cause


@pytest.mark.parametrize("value", [{}, {"choices": []}, [], {"choices": [{"message": None}]}, {"error": "overloaded"}])
def test_what_is_no_chat_completion_is_asked_for_again(value: Any) -> None:
    with serve_script(lambda request: answer(value)) as server:
        (score,) = judge_responses([trajectory("x")], server.url)
        assert score.failure == "error" and "is not a chat completion" in score.cause and len(server.seen) == 2


def test_a_slow_expression_is_none(tmp_path: Path) -> None:
    """RE2 is linear in the answer. This answer stalls an expression that backtracks."""
    with serve_script(lambda request: says("a" * 100_000 + "!")) as server:
        (score,) = judge_responses([trajectory("x")], server.url, parse=r"(a+)+$|(\d+)")
    assert score.failure == "error"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": None}, r"reward\.judge\.model is null"),
        ({"rubric": "Grade it."}, r"reward\.judge\.rubric='Grade it.' has no \{response\} in it.* add \{response\}"),
        ({"rubric": "/no/such/file"}, r"reward\.judge\.rubric='/no/such/file' .*correct the path"),
        ({"rubric": "{response}" + "x" * 2**16}, "more than 65,536 characters"),
        ({"parse": "(["}, r"reward\.judge\.parse='\(\[' is not a valid RE2 expression"),
        ({"parse": r"\d+"}, r"reward\.judge\.parse='\\\\d\+' has no group"),
        ({"parse": r"(?=x)(y)"}, "is not a valid RE2 expression"),
        ({"token_env": "NOT_SET"}, r"reward\.judge\.token_env is 'NOT_SET'"),
        ({"url": "host/v1"}, r"reward\.judge\.url='host/v1' is not a URL"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], problem: str) -> None:
    judge = JudgeConfig(**{"url": "http://127.0.0.1:1/v1", "model": "m", **settings})
    with pytest.raises(ConfigError, match=problem):
        build_reward(RewardConfig(judge=judge)).close()


def test_a_rubric_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("Wie gut ist {response}? Note: ", encoding="utf-8")
    with serve_script(lambda request: says("Note 1")) as server:
        settings = {"rubric": str(tmp_path / "rubric.txt"), "parse": r"Note (\d)", "max_score": 2.0}
        assert judge_responses([trajectory("x")], server.url, **settings)[0].value == 0.5
        assert server.seen[0].json()["messages"][0]["content"] == "Wie gut ist x? Note: "


def test_a_judge_that_reads_images_is_shown_those_of_the_prompt(tmp_path: Path) -> None:
    seen = trajectory("It is red.")
    seen.prompt.images = ("a1", "b2")
    (tmp_path / "a1").write_bytes(b"\x89PNG1")
    (tmp_path / "b2").write_bytes(b"\xff\xd8\xff")
    with serve_script(lambda request: says("Score: 5")) as server:
        for images in (True, False):
            judge = JudgeConfig(url=f"{server.url}/v1", model="m", rubric="{prompt}|{response}", images=images)
            reward = build_reward(RewardConfig(rules=[], judge=judge), images=tmp_path)
            assert run(reward.score([seen])) == [Score(0.5, {"judge": 0.5})]
            reward.close()
        shown, plain = (request.json()["messages"][0]["content"] for request in server.seen)
    assert plain == "What is 6 x 7?|It is red."
    assert shown == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORzE="}},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/"}},
        {"type": "text", "text": plain},
    ]
