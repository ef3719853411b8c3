"""Derive values from a user's settings."""

from __future__ import annotations

from typing import Any

import pyarrow
import pyarrow.parquet

from rlhf_mcore.cli.train import epochs_text
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.questions import needs_critic
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.schema.group import to_dict

PPO = "algorithm=ppo"
SCORER = "reward.model.path=scorer"


def test_what_an_algorithm_leaves_open_is_derived(workspace: Any) -> None:
    cfg = resolve(load_config("run.yaml", ["algorithm=dapo", "rollout.sampling.max_new_tokens=100"]))
    assert (cfg.algorithm.overlong.max_tokens, cfg.algorithm.overlong.cache_tokens) == (100, 20)
    assert cfg.algorithm.constant_length == 100
    assert cfg.algorithm.kl.controller.steps == cfg.trainer.num_steps == 100
    set_by_user = ["algorithm.overlong={max_tokens: 50, cache_tokens: 7}", "algorithm.kl.controller.steps=3"]
    cfg = resolve(load_config("run.yaml", set_by_user))
    assert (cfg.algorithm.overlong.max_tokens, cfg.algorithm.overlong.cache_tokens) == (50, 7)
    assert cfg.algorithm.kl.controller.steps == 3


def test_parts_of_scores_are_the_rules_with_their_weights_unless_they_are_given(workspace: Any) -> None:
    rules = "reward.rules=[{name: math}, {name: format, weight: 0.5}, {name: length, weight: 0.2, correct: 0, incorrect: 1}]"
    assert resolve(load_config("run.yaml", [rules, "algorithm=gdpo"])).algorithm.reward_weights == {
        "math": 1.0,
        "format": 0.5,
        "length": -0.2,
    }
    given = [rules, "algorithm=gdpo", "algorithm.reward_weights={math: 2}"]
    assert resolve(load_config("run.yaml", given)).algorithm.reward_weights == {"math": 2.0}
    assert resolve(load_config("run.yaml", [rules])).algorithm.reward_weights is None


def test_epochs_are_steps_by_the_rows_of_all_files(workspace: Any) -> None:
    for num_epochs, num_steps in [("1", 4), ("2", 7), ("0.5", 2), ("0.001", 1)]:
        workspace.write("a.jsonl", '{"prompt": "x", "answer": "1"}\n\n' * 6 + '{"prompt": "x", "answer": "1"}')
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"] * 6, "answer": ["1"] * 6}), "b.parquet")
        overrides = [
            "data.train=[a.jsonl, b.parquet]",
            f"trainer.num_epochs={num_epochs}",
            "trainer.prompts_per_step=4",
        ]
        given = load_config("run.yaml", overrides)
        cfg = resolve(given)
        assert (cfg.trainer.num_steps, cfg.trainer.num_epochs) == (num_steps, None)
        assert cfg.algorithm.kl.controller.steps == cfg.actor.optimizer.schedule.total_updates == num_steps
        assert epochs_text(given) == f"trainer.num_epochs={num_epochs}: {num_steps} steps of 4 for 13 rows"
        given.data.overlong_prompts = "drop"
        assert str(epochs_text(given)).endswith(
            "rows that data.transform or data.overlong_prompts=drop skips are counted"
        )


def test_epochs_of_files_that_are_not_here_tell_nothing(workspace: Any) -> None:
    assert resolve(load_config("run.yaml", ["data.train=[no.jsonl]", "trainer.num_epochs=3"])).trainer.num_steps == 100


def test_a_nucleus_is_sampled_from_as_many_tokens_as_can_be_recorded(workspace: Any) -> None:
    for overrides, top_k in [
        ([], -1),
        (["rollout.sampling.top_p=0.9"], 512),
        (["rollout.sampling={top_p: 0.9, top_k: 20}"], 20),
    ]:
        cfg = resolve(load_config("run.yaml", [*overrides, "evaluate.top_p=0.9", "evaluate.temperature=1"]))
        assert cfg.rollout.sampling.top_k == top_k and cfg.evaluate.top_k == -1


def test_an_asynchronous_run_weighs_tokens_and_continues_unless_it_is_told_otherwise(workspace: Any) -> None:
    for overrides, mode, at_publish in [
        ([], "off", None),
        (["trainer.max_staleness=1"], "token", "continue"),
        (["trainer.max_staleness=1", "algorithm.rollout_correction.mode=off"], "off", "continue"),
        (["trainer.max_staleness=1", "rollout.deterministic_order=true"], "token", "drain"),
        (["algorithm.rollout_correction.mode=sequence"], "sequence", None),
    ]:
        cfg = resolve(load_config("run.yaml", overrides))
        assert (cfg.algorithm.rollout_correction.mode, cfg.rollout.at_publish) == (mode, at_publish)


def test_who_needs_a_critic(workspace: Any) -> None:
    for overrides, needed in [
        ([], False),
        (["algorithm=ppo"], True),
        (["algorithm.advantage=mine.py:f"], False),
        (["algorithm.advantage=mine.py:f", "algorithm.use_critic=true"], True),
    ]:
        assert needs_critic(load_config("run.yaml", overrides)) is needed


def test_default_world_size(workspace: Any) -> None:
    for overrides, expected in [
        ([], 1),
        (["actor.layout.tp=2", "actor.layout.pp=3", "rollout.layout.tp=4"], 12),
        (["actor.layout.tp=2", "rollout.layout.tp=2"], 2),
        (["actor.layout.tp=2", "rollout.layout.tp=3", "rollout.placement=disaggregated"], 2),
        (["actor.layout.tp=2", "actor.layout.ep=3", "actor.layout.pp=2"], 12),
        (["actor.layout.tp=2", "actor.layout.ep=2", "actor.layout.etp=1"], 2),
        (["actor.layout.tp=2", "trainer.world_size=8"], 8),
        (["critic.layout.tp=2"], 1),  # the run has no critic
        ([PPO, "critic.layout.tp=2", "actor.layout.pp=3"], 6),
        ([SCORER, "reward.model.layout.tp=4"], 4),
        ([PPO, "actor.ranks=[0,2]", "critic.ranks=[2,5]"], 5),
        ([PPO, "actor.ranks=[0,2]", "critic.ranks=[2,5]", "rollout.layout.tp=2"], 6),
        ([PPO, "critic.ranks=[2,3]", "actor.layout.tp=2"], 4),  # the actor uses all ranks, an even number
        ([PPO, "critic.ranks=[2,4]", "critic.layout.tp=2"], 4),
        ([PPO, "critic.ranks=[0,1]", "trainer.world_size=3"], 3),
    ]:
        assert default_world_size(load_config("run.yaml", overrides)) == expected


def test_resolve_fills_what_is_derived(workspace: Any) -> None:
    overrides = [
        "trainer.num_steps=10",
        "trainer.prompts_per_step=12",
        "trainer.minibatch_size=4",
        "trainer.ppo_epochs=2",
    ]
    cfg = load_config("run.yaml", [*overrides, "rollout.sampling.max_new_tokens=100", "data.max_prompt_tokens=50"])
    done = resolve(cfg)
    assert done.actor.optimizer.schedule.total_updates == 60  # 10 steps * 2 passes * 3 minibatches
    assert (done.rollout.max_model_len, done.algorithm.constant_length, done.evaluate.max_new_tokens) == (150, 100, 100)
    assert (done.trainer.minibatch_size, done.model.tokenizer_path, done.model.dtype) == (4, "model", "auto")
    assert cfg.rollout.max_model_len is None  # the original stays unchanged
    assert resolve(done) == done


def test_resolve_gives_the_critic_the_actors_updates_or_its_own(workspace: Any) -> None:
    sizes = ["trainer.num_steps=10", "trainer.prompts_per_step=12", "trainer.minibatch_size=4", "trainer.ppo_epochs=2"]
    critic = resolve(load_config("run.yaml", [PPO, *sizes])).critic
    assert (critic.minibatch_size, critic.ppo_epochs, critic.optimizer.schedule.total_updates) == (4, 2, 60)
    own = ["critic.minibatch_size=2", "critic.ppo_epochs=1"]
    critic = resolve(load_config("run.yaml", [PPO, *sizes, *own])).critic
    assert (critic.minibatch_size, critic.ppo_epochs, critic.optimizer.schedule.total_updates) == (2, 1, 60)
    critic = resolve(load_config("run.yaml", [PPO, *sizes, "critic.ppo_epochs=4"])).critic
    assert (critic.minibatch_size, critic.ppo_epochs, critic.optimizer.schedule.total_updates) == (4, 4, 120)


def test_resolve_keeps_what_is_set_and_makes_room_for_evaluation(workspace: Any) -> None:
    done = resolve(load_config("run.yaml", ["evaluate.max_new_tokens=300", "algorithm.constant_length=7"]))
    assert (done.trainer.minibatch_size, done.algorithm.constant_length) == (32, 7)
    assert done.rollout.max_model_len == 512 + 300
    assert to_dict(done)["actor"]["optimizer"]["schedule"]["total_updates"] == 100
