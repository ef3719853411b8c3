from __future__ import annotations

import pytest

from rlhf_mcore_contrib.migrate import openrlhf, sources
from rlhf_mcore_contrib.migrate.table import Migration, apply

IS = "--algo.advantage.is_correction"


def migrate_flags(flags: str) -> Migration:
    return apply(openrlhf.TABLE, sources.read_flags(flags.split()))


def test_flags() -> None:
    text = "python -m x --not mine -m openrlhf.cli.train_ppo_ray --a.b 1 --c --d=2.5 --e 0.1 0.2 --f x/y"
    words = text.split(" ")
    assert sources.read_flags(words) == {"a.b": 1, "c": True, "d": 2.5, "e": [0.1, 0.2], "f": "x/y"}


def test_what_is_carried_over() -> None:
    for flags, expected in [
        (
            "",
            {
                "seed": 42,
                "actor.optimizer.schedule.warmup": 0.03,
                "data.apply_chat_template": "false",
                "algorithm.advantage": "gae",
                "algorithm.kl.coef": 0.01,
                "algorithm.kl.estimator": "k1",
                "algorithm.kl.placement": "reward",
                "actor.optimizer.beta2": 0.95,
                "actor.optimizer.schedule.name": "cosine",
                "actor.optimizer.schedule.min_lr": pytest.approx(1e-7),
                "rollout.sampling.n": 1,
                "trainer.prompts_per_step": 1024,
                "trainer.minibatch_size": 128,
                "trainer.world_size": 8,
                "checkpoint.resume": "never",
            },
        ),
        ("--algo.advantage.estimator group_norm", {"algorithm.advantage": "grpo", "algorithm.normalize_std": True}),
        ("--algo.advantage.estimator dr_grpo", {"algorithm.advantage": "grpo", "algorithm.normalize_std": False}),
        ("--algo.advantage.estimator reinforce", {"algorithm.advantage": "reinforce_plus_plus"}),
        # train.batch_size counts responses
        (
            "--rollout.n_samples_per_prompt 8 --train.batch_size 1024",
            {"rollout.sampling.n": 8, "trainer.minibatch_size": 128},
        ),
        (
            "--data.max_len 4096 --rollout.max_new_tokens 3072",
            {
                "data.max_prompt_tokens": 1024,
                "rollout.sampling.max_new_tokens": 3072,
                "trainer.max_tokens_per_microbatch": 4096,
            },
        ),
        (
            "--prompt_max_len 512 --generate_max_len 256 --micro_train_batch_size 4",
            {
                "data.max_prompt_tokens": 512,
                "rollout.sampling.max_new_tokens": 256,
                "trainer.max_tokens_per_microbatch": 3072,
            },
        ),
        (
            "--train.dynamic_batch_enable --train.max_tokens_per_gpu 9000",
            {"trainer.max_tokens_per_microbatch": 9000},
        ),
        (
            "--train.dynamic_batch_enable --train.max_tokens_per_gpu 9000 --ds.ring_attn_size 2",
            {"trainer.max_tokens_per_microbatch": 18000, "actor.layout.cp": 2},
        ),
        ("--actor.eps_clip_low_high 0.2 0.28", {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28}),
        ("--actor.policy_loss_type gspo", {"algorithm.policy_loss": "gspo", "algorithm.loss_aggregation": "sequence"}),
        (
            "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3",
            {"algorithm.kl.coef": 1e-3, "algorithm.kl.estimator": "k3", "algorithm.kl.placement": "loss"},
        ),
        (
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop",
            {
                "algorithm.rollout_correction.mode": "token",
                "algorithm.rollout_correction.mask_low": 0.5,
                "algorithm.rollout_correction.mask_high": 5.0,
            },
        ),
        ("--num_episodes 2", {"trainer.num_epochs": 2.0}),
        (
            "--reward.overlong_buffer_len 512",
            {"algorithm.overlong.enabled": True, "algorithm.overlong.cache_tokens": 512},
        ),
        (
            "--eval.dataset a.parquet --eval.steps 10",
            {"data.eval": ["a.parquet"], "evaluate.every": 10, "evaluate.temperature": 0.6, "evaluate.samples": 4},
        ),
        (
            "--pretrain m --actor_learning_rate 5e-7 --l2 0.1",
            {"model.path": "m", "actor.optimizer.lr": 5e-7, "actor.optimizer.weight_decay": 0.1},
        ),
        (
            "--prompt_data a.jsonl,b.jsonl --input_key q --label_key a",
            {"data.train": ["a.jsonl", "b.jsonl"], "data.answer_key": "a"},
        ),
        ("--vllm_tensor_parallel_size 2 --enforce_eager", {"rollout.layout.tp": 2, "rollout.enforce_eager": True}),
        ("--load_checkpoint --max_ckpt_num 5", {"checkpoint.resume": "auto", "checkpoint.save_total_limit": 5}),
        ("--actor.lr_warmup_ratio 0.1", {"actor.optimizer.schedule.warmup": 0.1}),
        ("--apply_chat_template", {"data.apply_chat_template": "true"}),
        ("--actor.optim adam", {}),
        (
            "--critic_pretrain c --value_clip 0.3 --freezing_actor_steps 4",
            {"critic.path": "c", "critic.value_clip": 0.3, "critic.warmup_steps": 4, "critic.optimizer.lr": 9e-6},
        ),
        ("--algo.advantage.estimator rloo", {"critic.value_clip": None}),
        ("--reward_pretrain rm", {"reward.model.path": "rm"}),
    ]:
        migration = migrate_flags(flags)
        assert {key: migration.settings.get(key) for key in expected} == expected
        assert migration.lost == {}


@pytest.mark.parametrize(
    ("flags", "key", "reason"),
    [
        ("--algo.kl.use_loss", "algo.kl.use_loss", "expected gradient of zero"),
        ("--prompt_data some/dataset", "data.prompt_dataset", "rlhf-mcore prepare-data"),
        ("--train.batch_size 100 --rollout.n_samples_per_prompt 8", "train.batch_size", "100 is not divisible by 8"),
        ("--reward.remote_url http://x", "reward.remote_url", "reward group"),
        ("--zero_stage 3", "ds.zero_stage", "Megatron-core"),
        ("--async_train", "train.async_enable", "trainer.max_staleness"),
        ("--actor.optim muon", "actor.optim", "AdamW"),
        (
            f"{IS}_enable {IS}_type seq-mask-tis",
            "algo.advantage.is_correction_type",
            "no counterpart",
        ),
        ("--data.max_len 4096", "data.max_len", "was halved"),
        ("--use_wandb key --wandb_project p", "logger.wandb.key", "run `wandb login` or set WANDB_API_KEY"),
        ("--unheard_of 1", "unheard_of", "there is no such key here"),
        ("--ref_num_nodes 1", "ref.num_nodes", "share the processes"),
    ],
)
def test_what_is_lost_is_named_with_its_reason(flags: str, key: str, reason: str) -> None:
    migration = migrate_flags(flags)
    assert reason in migration.lost[key][1]


def test_wandb_goes_on_without_its_key_and_sleep_is_offload() -> None:
    migration = migrate_flags("--use_wandb 0123456789abcdef --deepspeed_enable_sleep")
    assert migration.settings["logging.trackers"] == ["tensorboard", "wandb"]
    assert migration.settings["actor.offload"] == "always"
    assert "0123456789abcdef" not in str(migration.settings)
