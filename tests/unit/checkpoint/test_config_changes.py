from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_mcore.checkpoint.config_changes import FIXED, compare_configs, refuse
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.settings import load_yaml, to_yaml
from tests.messages import expect_error


def test_what_cannot_be_changed_is_told_from_what_can() -> None:
    saved, current = Config(), Config()
    current.seed, current.data.train = 1, ["b.jsonl"]
    current.actor.layout.tp, current.actor.optimizer.lr = 4, 2e-6
    current.output_dir, current.checkpoint.save_steps, current.logging.console = "elsewhere", 7, "off"
    fixed, other = compare_configs(to_yaml(saved), to_yaml(current))
    assert fixed == ["seed was 0 and is 1", "data.train was [] and is ['b.jsonl']"]
    assert other == ["actor.layout.tp was 1 and is 4", "actor.optimizer.lr was 1e-06 and is 2e-06"]
    assert compare_configs(to_yaml(saved), to_yaml(saved)) == ([], [])


def test_what_follows_from_other_keys_for_a_critic_is_listed_only_where_there_is_one() -> None:
    saved, current = Config(), Config()
    current.trainer.num_steps = 200
    current.critic.optimizer.schedule.total_updates, current.critic.minibatch_size = 200, 16
    assert compare_configs(to_yaml(saved), to_yaml(current))[1] == ["trainer.num_steps was 100 and is 200"]
    saved.algorithm.advantage = current.algorithm.advantage = "gae"
    assert "critic.minibatch_size was None and is 16" in compare_configs(to_yaml(saved), to_yaml(current))[1]


@pytest.mark.parametrize(("updates", "shown"), [(800, False), (801, True)])
def test_lengths_that_follow_from_that_of_the_run_are_not_said_again(updates: int, shown: bool) -> None:
    saved, current = Config(), Config()
    for cfg, steps in ((saved, 100), (current, 200)):
        cfg.algorithm.advantage = "gae"
        cfg.trainer.num_steps = cfg.algorithm.kl.controller.steps = steps
        for schedule in (cfg.actor.optimizer.schedule, cfg.critic.optimizer.schedule):
            schedule.total_updates = 4 * steps
    current.actor.optimizer.schedule.total_updates = updates
    own = ["actor.optimizer.schedule.total_updates was 400 and is 801"] if shown else []
    lines = compare_configs(to_yaml(saved), to_yaml(current))[1]
    assert sorted(lines) == [*own, "trainer.num_steps was 100 and is 200"]


def test_a_key_that_an_earlier_release_did_not_have_stands_for_what_it_did() -> None:
    """Only later keys that make this a different run are reported. Other later keys count as the former behaviour."""
    sample = Path(__file__).resolve().parents[2] / "data" / "checkpoint_v1" / "checkpoint-2" / "config.yaml"
    saved = sample.read_text(encoding="utf-8")
    now = load_yaml(to_yaml(Config()), "now")
    for group, content in load_yaml(saved, "saved").items():
        if isinstance(content, dict):
            merge(now[group], content)
        else:
            now[group] = content
    assert compare_configs(saved, yaml.safe_dump(now, sort_keys=False)) == (
        [],
        [
            "algorithm.bootstrap_truncated was True and is False",
            "algorithm.kl.clip was None and is 10.0",
            "data.apply_chat_template was 'false' and is 'auto'",
        ],
    )


def merge(tree: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict):
            merge(tree.setdefault(key, {}), value)  # a former group
        else:
            tree[key] = value


def test_keys_that_only_one_of_them_has_are_listed() -> None:
    fixed, other = compare_configs("seed: 0\nold: {key: 1}\n", "seed: 0\nnew: 2\n")
    assert fixed == [] and other == ["old.key was 1 and is not there", "new was not there and is 2"]


def test_all_refusals_come_at_once() -> None:
    refuse(Path("c"), [])
    with expect_error(
        ConfigError, field=("seed", "model.dtype", "checkpoint-5"), value=(0, 1), remedy=("restore", "new experiment")
    ):
        refuse(Path("run/checkpoint-5"), ["seed was 0 and is 1", "model.dtype was 'fp32' and is 'bf16'"])


@pytest.mark.parametrize("text", ["[1]", "a: [", "just text"])
def test_a_saved_file_that_is_none_is_refused(text: str) -> None:
    with expect_error(ConfigError, field="config.yaml", remedy="another checkpoint"):
        compare_configs(text, to_yaml(Config()))


def test_the_keys_that_a_run_which_resumes_cannot_change() -> None:
    data = (
        "train",
        "shuffle",
        "prompt_key",
        "answer_key",
        "response_key",
        "chosen_key",
        "rejected_key",
        "image_key",
        "image_pixels",
    )
    data += ("max_prompt_tokens", "overlong_prompts", "transform")
    algorithm = ("kind", "advantage", "policy_loss", "use_critic", "dpo.loss")
    adapters = ("rank", "alpha", "targets", "init", "use_rslora", "use_dora")
    groups = {"data": data, "algorithm": algorithm}
    keys = {f"{group}.{name}" for group, names in groups.items() for name in names}
    keys |= {
        "seed",
        "model.dtype",
        "rollout.placement",
        "teacher.weights",
        "actor.freeze",
        *(f"actor.lora.{name}" for name in adapters),
        *(f"critic.lora.{name}" for name in adapters),
        "actor.indexer",
        "actor.mtp.mode",
        "actor.vision.train",
        "actor.optimizer.name",
        "critic.optimizer.name",
    }
    assert keys == FIXED
