"""Sample with top_p and top_k, and record the support of each token. The trainer's ratios use the recorded support."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, environment, run_command
from tests.distributed.world import run_world
from tests.e2e.truncated_worker import CASES, NEW_TOKENS
from tests.tiny_training import make_quickstart

DIGITS = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(str.isdigit, solution_str)) / max(len(solution_str), 1)
"""
LEARNING = [
    "actor.layout.tp=1",
    "actor.optimizer.lr=1e-3",
    "rollout.sampling.temperature=0.7",
    "rollout.sampling.top_p=0.9",
    "algorithm.rollout_correction.mode=sequence",
    "trainer.num_steps=10",
    "trainer.prompts_per_step=8",
    "trainer.minibatch_size=4",
    "reward.function=digits.py:score",
    "evaluate.every=0",
    "logging.console=plain",
]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_world("e2e.truncated_worker", 2, tmp_path_factory.mktemp("truncated"))


@pytest.mark.parametrize("case", CASES)
def test_what_engines_record_is_what_transformers_leaves(findings: Any, case: str) -> None:
    found = findings[case]
    assert found["different"] == 0
    assert 2 <= found["largest"] <= CASES[case][3]
    assert found["lengths"][-1] == NEW_TOKENS
    assert found["greedy_without"], "what an evaluation draws greedily has none"


@pytest.mark.parametrize("case", CASES)
def test_ratios_of_the_same_policy_are_one_to_rounding_also_of_300_tokens(findings: Any, case: str) -> None:
    found = findings[case]
    assert found["token"] == pytest.approx([1, 1, 1], abs=1e-4)
    assert found["token"][0] == pytest.approx(1, abs=1e-5)
    assert found["sequence"] == pytest.approx([1, 1, 1], abs=2e-3)  # 300 times 7e-6
    assert found["rollout/logprob_diff_mean"] < 1e-5, "the alarm on the agreement of engine and trainer looks at it"
    # Without the support, a token's ratio is the probability mass of its support, and a sequence's ratio is their product.
    assert found["token_without"][0] == pytest.approx(found["rollout/support_mass"], abs=1e-5)
    assert found["token_without"][0] < 0.999 and found["sequence_without"][0] < 0.5
    assert 2 <= found["rollout/support_size"] <= found["largest"]


def test_ratios_of_a_run_are_one_while_it_learns_from_a_nucleus(tmp_path: Path) -> None:
    """Ratios of whole sequences weight the responses. No alarm is reported."""
    make_quickstart(tmp_path)
    (tmp_path / "digits.py").write_text(DIGITS)
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    ended = run_command(
        [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, *LEARNING], tmp_path, environment(tmp_path)
    )
    assert ended.returncode == 0, ended.stderr
    assert "rollout/logprob_diff" not in ended.stdout
    lines = (tmp_path / "outputs" / "quickstart" / "grpo" / "metrics.jsonl").read_text().splitlines()
    steps = [found for found in map(json.loads, lines) if "reward/mean" in found and found["step"]]
    assert steps[0]["reward/mean"] < 0.2 and steps[-1]["reward/mean"] > 0.6
    for found in steps:
        assert [found[f"rollout/ratio_{kind}"] for kind in ("mean", "min", "max")] == pytest.approx([1] * 3, abs=2e-4)
        assert 0.9 <= found["rollout/support_mass"] < 0.999
    assert steps[-1]["rollout/support_size"] < steps[0]["rollout/support_size"] / 2, "as the policy becomes sure"
