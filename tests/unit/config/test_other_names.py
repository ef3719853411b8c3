"""A user of another trainer finds the key here, and a misspelt key finds the right one."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, is_group
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.other_names import SYNONYMS, hint, synonyms


def test_keys_of_other_trainers_are_translated() -> None:
    for theirs, ours in [
        # TRL
        ("learning_rate", ["actor.optimizer.lr"]),
        ("num_generations", ["rollout.sampling.n"]),
        ("max_completion_length", ["rollout.sampling.max_new_tokens"]),
        ("beta", ["algorithm.kl.coef"]),
        ("epsilon", ["algorithm.clip_low", "algorithm.clip_high"]),
        ("per_device_train_batch_size", ["trainer.max_tokens_per_microbatch"]),
        # verl
        ("data.train_batch_size", ["trainer.prompts_per_step"]),
        ("actor_rollout_ref.rollout.n", ["rollout.sampling.n"]),
        ("actor_rollout_ref.actor.optim.lr", ["actor.optimizer.lr"]),
        ("critic.optim.lr", ["critic.optimizer.lr"]),
        ("trainer.n_gpus_per_node", ["trainer.world_size"]),
        ("custom_reward_function.path", ["reward.function"]),
        # OpenRLHF
        ("--actor_learning_rate", ["actor.optimizer.lr"]),
        ("rollout.batch_size", ["trainer.prompts_per_step"]),
        # slime
        ("--rollout-max-response-len", ["rollout.sampling.max_new_tokens"]),
        ("--hf-checkpoint", ["model.path"]),
        # NeMo-RL
        ("grpo.num_prompts_per_step", ["trainer.prompts_per_step"]),
        ("policy.megatron_cfg.tensor_model_parallel_size", ["actor.layout.tp"]),
        ("policy.generation.vllm_cfg.tensor_parallel_size", ["rollout.layout.tp"]),
    ]:
        assert list(synonyms(theirs)) == ours, theirs


def test_a_key_without_a_counterpart_gets_what_to_do_instead() -> None:
    for theirs, part in [
        ("lora.rank", "actor.lora"),
        ("actor_rollout_ref.model.lora_rank", "actor.lora"),
        ("load_in_4bit", "rollout.quantization"),
        ("actor.fsdp_config.param_offload", "actor.layout"),
        ("rollout.repetition_penalty", "rollout.sampling"),
        ("gradient_accumulation_steps", "trainer.minibatch_size"),
        ("push_to_hub", "rlhf-mcore push"),
        ("model.trust_remote_code", "never run"),
    ]:
        assert part in hint(theirs), theirs


def test_the_table_names_keys_that_exist() -> None:
    assert {key for key in SYNONYMS if key not in KEYS or is_group(key)} == set()
    names = {name for names in SYNONYMS.values() for name in names.split()}
    assert {name for name in names if name in KEYS and not is_group(name)} == set()


def test_what_an_unknown_key_is_answered_with() -> None:
    assert hint("rollout.n") == "did you mean rollout.sampling.n?"
    for part in ("trainer.prompts_per_step (prompts per step", "trainer.minibatch_size (prompts per optimizer update"):
        assert part in hint("batch_size")
    assert hint("actor.lora.rnak") == "did you mean actor.lora.rank?"
    assert hint("seed.x") == "seed contains no keys; give it a value: int"
    assert "rlhf-mcore migrate" in hint("actor_rollout_ref.rollout.n")
    assert "migrate" not in hint("data.train_batch_size")


def test_keys_inside_another_trainers_group_are_reported_one_by_one(workspace: Any) -> None:
    for text, starts in [
        ("lora: {rank: 8, alpha: 16}", ["unknown key lora; adapters are trained with actor.lora"]),
        ("traner: {num_steps: 3}", ["unknown key traner; did you mean trainer?"]),
        (
            "grpo: {num_prompts_per_step: 3, max_num_steps: 4}",
            [
                "unknown key grpo.num_prompts_per_step; did you mean trainer.prompts_per_step?",
                "unknown key grpo.max_num_steps; did you mean trainer.num_steps?",
            ],
        ),
        (
            "actor_rollout_ref: {rollout: {n: 3}}",
            ["unknown key actor_rollout_ref.rollout.n; did you mean rollout.sampling.n?"],
        ),
    ]:
        workspace.write("run.yaml", f"model: {{path: m}}\n{text}\n")
        with pytest.raises(ConfigError) as caught:
            load_config("run.yaml")
        problems = caught.value.problems
        assert len(problems) == len(starts)
        assert all(f"run.yaml:2: {start}" in problem for problem, start in zip(problems, starts, strict=True)), problems
