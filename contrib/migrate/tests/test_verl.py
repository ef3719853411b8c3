from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore_contrib.migrate import sources, verl
from rlhf_mcore_contrib.migrate.table import Migration, apply

ACTOR = "actor_rollout_ref.actor."


def migrate_overrides(*overrides: str) -> Migration:
    return apply(verl.TABLE, sources.read_overrides(overrides))


def settings(*overrides: str) -> dict[str, Any]:
    return migrate_overrides(*overrides).settings


def test_their_defaults_are_written_out_where_ours_differ() -> None:
    found = settings()
    expected = {
        "rollout.sampling.n": 1,
        "rollout.layout.tp": 2,
        "rollout.sampling.max_new_tokens": 512,
        "trainer.prompts_per_step": 1024,
        "trainer.minibatch_size": 256,
        "trainer.world_size": 8,
        "actor.optimizer.weight_decay": 0.01,
        "algorithm.advantage": "gae",
        "algorithm.lam": 1.0,
        "algorithm.loss_aggregation": "token",
        "algorithm.dual_clip": 3.0,
        "algorithm.kl.coef": 0.0,
    }
    assert {key: found[key] for key in expected} == expected


def test_what_is_carried_over() -> None:
    for overrides, expected in [
        (["algorithm.adv_estimator=grpo"], {"algorithm.advantage": "grpo", "algorithm.whiten_advantages": False}),
        (["algorithm.adv_estimator=gae"], {"algorithm.preset": "ppo", "algorithm.whiten_advantages": True}),
        (
            [ACTOR + "optim.override_optimizer_config.optimizer_offload_fraction=1"],
            {"actor.optimizer.offload": 1.0},
        ),
        (["algorithm.norm_adv_by_std_in_grpo=False"], {"algorithm.normalize_std": False}),
        ([ACTOR + "clip_ratio=0.3"], {"algorithm.clip_low": 0.3, "algorithm.clip_high": 0.3}),
        ([ACTOR + "clip_ratio_high=0.28"], {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28}),
        (
            [ACTOR + "use_kl_loss=True", ACTOR + "kl_loss_coef=0.01", ACTOR + "kl_loss_type=mse"],
            {
                "algorithm.kl.coef": 0.01,
                "algorithm.kl.estimator": "k2",
                "algorithm.kl.placement": "loss",
                "algorithm.kl.clip": None,
            },
        ),
        ([ACTOR + "use_kl_loss=True", ACTOR + "kl_loss_type=low_var_kl"], {"algorithm.kl.clip": 10.0}),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.05"],
            {
                "algorithm.kl.coef": 0.001,
                "algorithm.kl.estimator": "k1",
                "algorithm.kl.placement": "reward",
                "algorithm.kl.controller.target": 0.05,
            },
        ),
        ([ACTOR + "loss_agg_mode=seq-mean-token-mean"], {"algorithm.loss_aggregation": "sequence"}),
        (
            [ACTOR + "loss_agg_mode=seq-mean-token-sum"],
            {"algorithm.loss_aggregation": "constant", "algorithm.constant_length": 1},
        ),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[format, right]",
                "algorithm.gdpo_reward_weights=[0.5, 1.0]",
            ],
            {"algorithm.advantage": "gdpo", "algorithm.reward_weights": {"format": 0.5, "right": 1.0}},
        ),
        (
            ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"],
            {"algorithm.preset": "remax", "algorithm.advantage": "remax", "rollout.sampling.n": 1},
        ),
        (
            [ACTOR + "policy_loss.loss_mode=kl_cov", ACTOR + "policy_loss.ppo_kl_coef=1.0"],
            {
                "algorithm.policy_loss": "kl_cov",
                "algorithm.covariance.share": 2e-4,
                "algorithm.covariance.kl_coef": 1.0,
            },
        ),
        (
            [ACTOR + "policy_loss.loss_mode=clip_cov", ACTOR + "policy_loss.clip_cov_ub=4.0"],
            {"algorithm.policy_loss": "clip_cov", "algorithm.covariance.low": 1.0, "algorithm.covariance.high": 4.0},
        ),
        ([ACTOR + "policy_loss.loss_mode=gspo"], {"algorithm.policy_loss": "gspo", "algorithm.dual_clip": None}),
        (
            ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=3"],
            {"algorithm.rollout_correction.mode": "token", "algorithm.rollout_correction.cap": 3.0},
        ),
        (
            [ACTOR + "megatron.tensor_model_parallel_size=4", ACTOR + "megatron.expert_model_parallel_size=2"],
            {"actor.layout.tp": 4, "actor.layout.ep": 2, "actor.layout.sequence_parallel": True},
        ),
        (
            [ACTOR + "optim.lr=1e-6", ACTOR + "optim.betas=[0.9,0.95]"],
            {"actor.optimizer.lr": 1e-6, "actor.optimizer.beta2": 0.95},
        ),
        # verl advances its schedule once per step, and we once per update: 1024 / 128 = 8 updates.
        (
            [ACTOR + "optim.lr_warmup_steps=10", ACTOR + "ppo_mini_batch_size=128"],
            {"actor.optimizer.schedule.warmup": 80},
        ),
        (
            [ACTOR + "optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50"],
            {"actor.optimizer.schedule.warmup": 0.1, "trainer.num_steps": 50, "trainer.num_epochs": None},
        ),
        (["trainer.total_epochs=15"], {"trainer.num_epochs": 15.0, "trainer.num_steps": None}),
        (
            [ACTOR + "use_dynamic_bsz=True", ACTOR + "ppo_max_token_len_per_gpu=9000"],
            {"trainer.max_tokens_per_microbatch": 9000},
        ),
        # verl counts the tokens of one context-parallel rank.
        (
            [
                ACTOR + "use_dynamic_bsz=True",
                ACTOR + "ppo_max_token_len_per_gpu=9000",
                ACTOR + "megatron.context_parallel_size=2",
            ],
            {"trainer.max_tokens_per_microbatch": 18000, "actor.layout.cp": 2},
        ),
        ([ACTOR + "ppo_micro_batch_size_per_gpu=4"], {"trainer.max_tokens_per_microbatch": 4096}),
        (["data.filter_overlong_prompts=True", "data.truncation=error"], {"data.overlong_prompts": "drop"}),
        (["data.train_files=~/a.parquet"], {"data.train": ["${oc.env:HOME}/a.parquet"]}),
        (["data.train_files=['a','b']"], {"data.train": ["a", "b"]}),
        (["trainer.save_freq=-1", "trainer.test_freq=5"], {"checkpoint.save_steps": 0, "evaluate.every": 5}),
        (["trainer.nnodes=2"], {"trainer.world_size": 16}),
        ([ACTOR + "optim.lr_warmup_steps_ratio=0.1"], {"actor.optimizer.schedule.warmup": 0.1}),
        (["critic.optim.lr_warmup_steps_ratio=0.05"], {"critic.optimizer.schedule.warmup": 0.05}),
        (["trainer.logger=['console','tensorboard']"], {"logging.trackers": ["tensorboard"]}),
        (["trainer.logger=['console','wandb','swanlab']"], {"logging.trackers": ["wandb", "swanlab"]}),
        (["trainer.logger=console"], {"logging.trackers": []}),
        *(
            (
                [f"+{prefix}.enable=True", f"{prefix}.len=4096", f"{prefix}.penalty_factor=0.5"],
                {
                    "algorithm.overlong.enabled": True,
                    "algorithm.overlong.cache_tokens": 4096,
                    "algorithm.overlong.penalty": 0.5,
                },
            )
            for prefix in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
        ),
        (
            ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=7"],
            {"algorithm.dynamic_sampling.enabled": True, "algorithm.dynamic_sampling.max_batches": 7},
        ),
        ([ACTOR + "clip_ratio_low=10"], {"algorithm.clip_low": 1.0}),
        (["trainer.resume_mode=disable"], {"checkpoint.resume": "never"}),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=x/y"], {"checkpoint.resume": "x/y"}),
        (
            ["trainer.default_local_dir=ckpt/p/e", "trainer.project_name=p", "trainer.experiment_name=e"],
            {"output_dir": "ckpt", "project": "p", "experiment": "e"},
        ),
        (["custom_reward_function.path=r.py", "custom_reward_function.name=f"], {"reward.function": "r.py:f"}),
        (
            ["actor_rollout_ref.rollout.val_kwargs.do_sample=True"]
            + [f"actor_rollout_ref.rollout.val_kwargs.{key}" for key in ("n=4", "temperature=0.6", "top_p=0.9")],
            {"evaluate.samples": 4, "evaluate.temperature": 0.6, "evaluate.top_p": 0.9},
        ),
        (
            [
                "critic.model.path=c",
                "critic.optim.lr=2e-5",
                "critic.megatron.tensor_model_parallel_size=2",
                "trainer.critic_warmup=3",
            ],
            {
                "critic.path": "c",
                "critic.optimizer.lr": 2e-5,
                "critic.layout.tp": 2,
                "critic.layout.sequence_parallel": True,
                "critic.warmup_steps": 3,
                "critic.value_clip": 0.5,
            },
        ),
        (
            [
                "reward_model.enable=True",
                "reward_model.model.path=rm",
                "reward_model.megatron.tensor_model_parallel_size=4",
            ],
            {"reward.model.path": "rm", "reward.model.layout.tp": 4, "reward.rules": []},
        ),
        (["reward_model.enable=False", "reward_model.model.path=rm"], {"reward.model.path": None}),
        (["trainer.logger=['console','tensorboard']"], {"logging.trackers": ["tensorboard"]}),
        (["+actor_rollout_ref.rollout.n=6"], {"rollout.sampling.n": 6}),
    ]:
        migration = migrate_overrides(*overrides)
        assert {key: migration.settings.get(key) for key in expected} == expected
        assert migration.lost == {}


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("algorithm.adv_estimator=grpo_passk", "'grpo_passk' has no counterpart; supported: gae, grpo"),
        (ACTOR + "policy_loss.loss_mode=dro", "'dro' has no counterpart"),
        ("actor_rollout_ref.rollout.name=sglang", "'sglang' has no counterpart; supported: hf, server, vllm"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "see environment"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4", "max_tokens_per_microbatch"),
        ("critic.model.fsdp_config.param_offload=True", "critic.layout"),
        ("actor_rollout_ref.model.exclude_modules=lm_head", "actor.lora.targets"),
        ("trainer.something_new=1", "there is no such key here"),
        ("data.truncation=left", "prompts are never truncated"),
        ("data.train_batch_size=many", "a value of this type"),
        ("data.gen_batch_size=1536", "every batch contains"),
        ("trainer.logger=['console','clearml']", "clearml is not supported; available trackers: tensorboard, wandb"),
    ],
)
def test_what_is_lost_is_named_with_its_reason(override: str, reason: str) -> None:
    migration = migrate_overrides(override)
    key = override.partition("=")[0]
    assert reason in migration.lost[key][1]
    assert key not in migration.carried


def test_k1_in_the_loss_is_refused_where_it_would_do_nothing() -> None:
    migration = migrate_overrides(ACTOR + "use_kl_loss=True", ACTOR + "kl_loss_type=kl")
    assert "expected gradient of zero" in migration.lost[ACTOR + "kl_loss_type"][1]
    assert "algorithm.kl.coef" not in migration.settings


def test_a_key_that_one_use_of_it_needs_is_not_lost_by_another() -> None:
    migration = migrate_overrides("data.train_batch_size=64", ACTOR + "optim.lr_warmup_steps=10")
    assert migration.settings["trainer.prompts_per_step"] == 64
    assert migration.lost.keys() == {ACTOR + "optim.lr_warmup_steps"}  # 64 prompts are not a multiple of 256


def test_every_key_ends_in_one_place() -> None:
    said = [
        "trainer.total_epochs=3",
        "trainer.save_freq=1",
        "a.b=1",
        "data.seed=4",
        "actor_rollout_ref.actor.shuffle=True",
    ]
    migration = migrate_overrides(*said)
    assert migration.carried | migration.lost.keys() == {key.partition("=")[0] for key in said} - {"a.b"}
    assert not migration.carried & migration.lost.keys()


def test_references_in_a_tree_are_resolved_and_what_is_null_is_not_said() -> None:
    tree = {
        "data": {"max_prompt_length": 100, "max_response_length": "${data.max_prompt_length}", "seed": None},
        "actor_rollout_ref": {"actor": {"_target_": "x", "optim": {"lr": "3e-6"}, "lost": "${nowhere}"}},
        "hydra": {"run": 1},
    }
    assert sources.read_tree(tree) == {
        "data.max_prompt_length": 100,
        "data.max_response_length": 100,
        "actor_rollout_ref.actor.optim.lr": 3e-6,
        "actor_rollout_ref.actor.lost": "${nowhere}",
    }


def test_an_estimator_without_a_critic_leaves_its_keys_out() -> None:
    keys = [
        "critic.optim.lr=1e-5",
        "critic.model.path=model",
        "critic.megatron.tensor_model_parallel_size=2",
        "trainer.critic_warmup=3",
    ]
    with_critic, without = (
        migrate_overrides("algorithm.adv_estimator=gae", *keys),
        migrate_overrides("algorithm.adv_estimator=grpo", *keys),
    )
    assert with_critic.settings["critic.optimizer.lr"] == 1e-5 and with_critic.settings["critic.warmup_steps"] == 3
    assert not [key for key in without.settings if key.startswith("critic.")]
    for key in (text.partition("=")[0] for text in keys):
        assert without.lost[key][1] == "grpo has no critic" and key not in without.carried


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["lora_rank=8"], {"rank": 8, "alpha": 16.0, "targets": ["all-linear"]}),
        (
            ["lora_rank=32", "lora_alpha=64", "target_modules=[q_proj,v_proj]", "lora_adapter_path=~/adapter"],
            {"rank": 32, "alpha": 64.0, "targets": ["q_proj", "v_proj"], "path": "${oc.env:HOME}/adapter"},
        ),
        (["lora_rank=0", "lora_alpha=64"], {}),
    ],
)
def test_adapters(theirs: list[str], ours: dict[str, object]) -> None:
    migration = migrate_overrides(*(f"actor_rollout_ref.model.{setting}" for setting in theirs))
    prefix = "actor.lora."
    assert {key.removeprefix(prefix): value for key, value in migration.settings.items() if prefix in key} == ours
    assert migration.lost == {}


def test_adapters_of_layers_that_a_regular_expression_names_are_lost() -> None:
    migration = migrate_overrides(
        "actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules='.*_proj'"
    )
    assert "actor.lora.targets" in migration.lost["actor_rollout_ref.model.target_modules"][1]
