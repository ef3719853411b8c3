"""Find functions by their names in a configuration, built in or from a user's file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rlhf_mcore.algorithms.interfaces import (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageInputs,
    advantage_estimator,
    fields_read,
)
from rlhf_mcore.algorithms.kl import ESTIMATORS as KL_ESTIMATORS
from rlhf_mcore.algorithms.registry import find_advantage_estimator, find_policy_loss
from rlhf_mcore.config import choices
from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import AlgorithmConfig
from tests.messages import expect_error
from tests.rows import advantage_inputs
from tests.unit.algorithms.tokens import loss_inputs

DOCS = Path(__file__).resolve().parents[3] / "docs"


def inputs() -> AdvantageInputs:
    """Build one prompt with two responses of two tokens and the scores 1 and 0."""
    return advantage_inputs(
        rewards=torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        loss_mask=torch.tensor([[False, True, True], [False, True, True]]),
        group_ids=torch.tensor([0, 0]),
        truncated=torch.tensor([False, False]),
    )


def test_the_names_that_validation_knows_are_those_of_the_tables():
    assert set(choices.ADVANTAGES) == set(ADVANTAGE_ESTIMATORS)
    assert set(choices.POLICY_LOSSES) == set(POLICY_LOSSES)
    assert set(choices.KL_ESTIMATORS) == set(KL_ESTIMATORS)


def test_what_validation_knows_of_them():
    told = choices.ADVANTAGES
    compared = {"grpo", "rloo", "opo", "gdpo", "reinforce_plus_plus_baseline"}
    assert {name for name in told if told[name].compares_group} == compared
    assert [name for name in told if not told[name].credits_turns] == ["opo", "gdpo", "remax"]
    assert [name for name in told if told[name].needs_values] == ["gae"]
    assert [name for name in told if not told[name].reads_scores] == ["distillation"]
    assert set(told) - {name for name in told if told[name].whitens} == {
        "grpo",
        "rloo",
        "opo",
        "gdpo",
        "remax",
        "distillation",
    }
    assert [name for name in told if told[name].needs_greedy] == ["remax"]
    assert set(choices.READS_COVARIANCE) <= set(choices.POLICY_LOSSES)
    assert set(choices.KL_ESTIMATORS) - set(choices.KL_IN_LOSS) == {"k1"}


@pytest.mark.parametrize("name", ["grpo", "not_declared"])
def test_a_name_is_registered_once_and_only_where_a_configuration_can_choose_it(name: str):
    complaint = "registered twice" if name == "grpo" else r"not declared in rlhf_mcore/config"
    with pytest.raises(AssertionError, match=complaint):
        advantage_estimator(name)


def test_presets_name_functions_that_are_there() -> None:
    for preset in PRESETS:
        advantage = PRESETS[preset].get("advantage", AlgorithmConfig().advantage)
        policy_loss = PRESETS[preset].get("policy_loss", AlgorithmConfig().policy_loss)
        assert find_advantage_estimator(advantage) is ADVANTAGE_ESTIMATORS[advantage]
        assert find_policy_loss(AlgorithmConfig(policy_loss=policy_loss)).__wrapped__ is POLICY_LOSSES[policy_loss]


@pytest.mark.parametrize("page", ["algorithms/losses.md", "reference/config/algorithm.md"])
def test_the_documents_name_every_function(page: str):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [name for name in (*choices.ADVANTAGES, *choices.POLICY_LOSSES) if f"`{name}`" not in text] == []


def test_unknown_names_are_refused_with_the_known_ones():
    with expect_error(
        ConfigError, field="algorithm.advantage", value="'gea'", remedy=("gae", "grpo", "path/to/file.py:name")
    ):
        find_advantage_estimator("gea")


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_function_of_a_users_file(tmp_path: Path):
    path = write(
        tmp_path,
        "from rlhf_mcore.algorithms.interfaces import Advantages, reads, takes\n"
        "def constant(inputs, cfg):\n"
        "    return Advantages(cfg.clip_low * inputs.loss_mask)\n"
        "@reads('old_values')\n"
        "def half(inputs, cfg):\n"
        "    return inputs.logprobs.sum() * cfg.clip_low, {}\n"
        "@takes('clip_high', 'sapo.tau_negative')\n"
        "def declared(inputs, *, clip_high, tau_negative):\n"
        "    return inputs.logprobs.sum() * clip_high * tau_negative, {}\n",
    )
    result = find_advantage_estimator(f"{path}:constant")(inputs(), AlgorithmConfig(clip_low=0.5))
    assert result.advantages.tolist() == [0, 0.5, 0.5, 0, 0.5, 0.5]
    loss = find_policy_loss(AlgorithmConfig(policy_loss=f"{path}:half", clip_low=0.5))
    made = loss_inputs(*(torch.ones(1, 2) for _ in range(4)))
    assert loss(made)[0].item() == 1.0 and fields_read(loss) == ("old_values",)
    settings = {"policy_loss": f"{path}:declared", "clip_high": 0.25, "sapo": {"tau_negative": 4.0}}
    assert find_policy_loss(AlgorithmConfig(**settings))(made)[0].item() == 2.0


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return inputs.rewards", "returned Tensor; return an Advantages"),
        ("return Advantages(inputs.rewards.view(2, 3))", "returned advantages of shape [2, 3], not [6]"),
        ("return Advantages(inputs.rewards, inputs.rewards[:1])", "returned returns of shape [1], not [6]"),
    ],
)
def test_a_result_of_the_wrong_kind_is_named(tmp_path: Path, body: str, complaint: str):
    imports = "from rlhf_mcore.algorithms.interfaces import Advantages\n"
    path = write(tmp_path, f"{imports}def mine(inputs, cfg):\n    {body}\n")
    with pytest.raises(ValueError, match=re.escape(f"mine.py:mine {complaint}")):
        find_advantage_estimator(f"{path}:mine")(inputs(), AlgorithmConfig())


@pytest.mark.parametrize(
    ("find", "key"),
    [
        (find_advantage_estimator, "algorithm.advantage"),
        (lambda name: find_policy_loss(AlgorithmConfig(policy_loss=name)), "algorithm.policy_loss"),
    ],
)
def test_a_missing_file_or_name_is_said_under_its_key(tmp_path: Path, find, key: str):
    with pytest.raises(ConfigError, match=rf"{re.escape(key)} is .*there is no file"):
        find(f"{tmp_path}/absent.py:f")
    path = write(tmp_path, "x = 1\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(key)} is .*defines no 'f'"):
        find(f"{path}:f")
