"""The file that docs/algorithms/custom.md shows, run as a user would run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_mcore.algorithms.registry import find_advantage_estimator, find_policy_loss
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import AlgorithmConfig
from rlhf_mcore.config.validate import validate
from tests.rows import advantage_inputs
from tests.unit.algorithms.tokens import loss_inputs

PAGE = Path(__file__).resolve().parents[3] / "docs" / "algorithms" / "custom.md"


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return text


@pytest.fixture
def example_config(workspace: Any) -> AlgorithmConfig:
    """The page's two blocks as a user's files, and the configuration they make."""
    workspace.write("my_algorithm.py", block("python"))
    workspace.write("base.yaml", (workspace.root / "run.yaml").read_text(encoding="utf-8"))
    workspace.write("run.yaml", "base: base.yaml\n" + block("yaml"))
    cfg = load_config("run.yaml")
    validate(cfg)
    return cfg.algorithm


def test_it_is_short() -> None:
    assert len(block("python").splitlines()) + len(block("yaml").splitlines()) < 40


def test_its_advantages(example_config: AlgorithmConfig) -> None:
    rewards = torch.tensor([[9.0, 1.0, 0.0], [9.0, 0.0, 4.0], [9.0, 0.5, 0.0], [9.0, 2.0, 3.0]])
    mask = torch.tensor([[False, True, True]] * 4)
    made = advantage_inputs(rewards, mask, torch.tensor([5, 5, 5, 2]), torch.zeros(4).bool())
    result = find_advantage_estimator(example_config.advantage)(made, example_config)
    # Outcomes 1, 4, 0.5 with median 1; 5 alone.
    assert result.advantages.view(4, 3).tolist() == [[0, 0, 0], [0, 3, 3], [0, -0.5, -0.5], [0, 0, 0]]


def test_its_loss(example_config: AlgorithmConfig) -> None:
    logprobs = torch.tensor([[1.5, 0.5, float("nan")]]).log().requires_grad_()
    advantages, weights = torch.tensor([[2.0, -1.0, 7.0]]), torch.tensor([[0.5, 0.5, 0.0]])
    made = loss_inputs(logprobs, torch.zeros(1, 3), advantages, weights)
    loss, metrics = find_policy_loss(example_config)(made)
    loss.backward()
    # clip_high 0.2: pulls 2 * 0.25 / 0.4 = 1.25 and 0.625; (1.25 - 3)/2 + (0.625 + 0.5)/2.
    assert loss.item() == pytest.approx(-0.3125)
    # r (2 |A| (r - 1) / 0.4 - A) / 2: 1.5 (5 - 2)/2 and 0.5 (-2.5 + 1)/2.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[2.25, -0.375, 0.0]]))
    assert metrics["importance_ratio"].item() == pytest.approx(2.0)
    assert example_config.loss_aggregation == "token"
