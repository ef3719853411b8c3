from __future__ import annotations

import json
from pathlib import Path

from rlhf_mcore.observability.run_directory import rollout_record, write_rollouts
from rlhf_mcore.types import Prompt, Score, Trajectory
from tests.episodes import single_turn


def trajectory(sample: int, text: str) -> Trajectory:
    prompt = Prompt("train#4", 4, [1, 2], "1+1=", ground_truth="2")
    return single_turn(prompt, sample, [5, 6, 7], [-0.1, -0.2, -0.3], text, "stop", policy_version=12)


def test_one_line_per_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "step-000013.jsonl"
    scores = [Score(1.0, {"exact": 1.0}), Score(float("nan"))]
    trajectories = [trajectory(0, "2"), trajectory(1, "zwei \udc80\u2028\n")]
    write_rollouts(path, [rollout_record(t, s, 13) for t, s in zip(trajectories, scores, strict=True)])
    first, second = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    assert json.loads(first) == {
        "step": 13,
        "prompt_id": "train#4",
        "sample": 0,
        "prompt": "1+1=",
        "response": "2",
        "ground_truth": "2",
        "score": 1.0,
        "parts": {"exact": 1.0},
        "failure": None,
        "num_tokens": 3,
        "finish_reason": "stop",
        "policy_version": 12,
    }
    assert json.loads(second)["response"] == "zwei �\u2028\n"
    assert json.loads(second)["score"] is None
    assert [file.name for file in tmp_path.iterdir()] == ["step-000013.jsonl"]


def test_a_prompt_with_images_is_recorded_with_their_digests() -> None:
    prompt = Prompt("train#4", 4, [1, 2], "what?", images=("0a" * 16, "0b" * 16))
    seen = single_turn(prompt, 0, [5], [-0.1], "2", "stop", policy_version=1)
    assert rollout_record(seen, Score(1.0), 1)["images"] == ["0a" * 16, "0b" * 16]
