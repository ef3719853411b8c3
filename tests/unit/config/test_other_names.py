"""Keys that people bring from other trainers are told what they are called here."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore.config import other_names
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, is_group
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.other_names import find_other_name, hint


def test_a_name_of_another_trainer() -> None:
    for theirs, ours in [
        # what anybody would type
        ("learning_rate", ["actor.optimizer.lr"]),
        ("trainer.lr", ["actor.optimizer.lr"]),
        ("critic.learning_rate", ["critic.optimizer.lr"]),
        ("rollout.n", ["rollout.sampling.n"]),
        ("batch_size", ["trainer.prompts_per_step", "trainer.minibatch_size"]),
        ("model.name", ["model.path"]),
        ("rollout.tp", ["rollout.layout.tp"]),
        ("optimizer.lr", ["actor.optimizer.lr"]),
        ("LEARNING-RATE", ["actor.optimizer.lr"]),
        # verl
        ("data.train_batch_size", ["trainer.prompts_per_step"]),
        ("data.max_response_length", ["rollout.sampling.max_new_tokens"]),
        ("actor_rollout_ref.rollout.n", ["rollout.sampling.n"]),
        ("actor_rollout_ref.actor.optim.lr", ["actor.optimizer.lr"]),
        ("actor_rollout_ref.actor.clip_ratio_high", ["algorithm.clip_high"]),
        ("critic.optim.lr", ["critic.optimizer.lr"]),
        ("trainer.n_gpus_per_node", ["trainer.world_size"]),
        ("trainer.test_freq", ["evaluate.every"]),
        ("algorithm.adv_estimator", ["algorithm.advantage"]),
        ("custom_reward_function.path", ["reward.function"]),
        # TRL
        ("num_generations", ["rollout.sampling.n"]),
        ("max_completion_length", ["rollout.sampling.max_new_tokens"]),
        ("beta", ["algorithm.kl.coef"]),
        ("epsilon", ["algorithm.clip_low", "algorithm.clip_high"]),
        ("per_device_train_batch_size", ["trainer.max_tokens_per_microbatch"]),
        ("report_to", ["logging.trackers"]),
        # OpenRLHF
        ("--actor_learning_rate", ["actor.optimizer.lr"]),
        ("--init_kl_coef", ["algorithm.kl.coef"]),
        ("--n_samples_per_prompt", ["rollout.sampling.n"]),
        ("rollout.batch_size", ["trainer.prompts_per_step"]),
        # slime
        ("--rollout-max-response-len", ["rollout.sampling.max_new_tokens"]),
        ("--hf-checkpoint", ["model.path"]),
        ("--num-rollout", ["trainer.num_steps"]),
        ("trainer.total_epochs", ["trainer.num_epochs"]),
        ("num_train_epochs", ["trainer.num_epochs"]),
        # NeMo-RL
        ("grpo.num_prompts_per_step", ["trainer.prompts_per_step"]),
        ("policy.megatron_cfg.tensor_model_parallel_size", ["actor.layout.tp"]),
        ("policy.generation.vllm_cfg.tensor_parallel_size", ["rollout.layout.tp"]),
        ("loss_fn.reference_policy_kl_penalty", ["algorithm.kl.coef"]),
        ("cluster.gpus_per_node", ["trainer.world_size"]),
    ]:
        found = find_other_name(theirs)
        assert found is not None
        assert list(found.keys) == ours


def test_what_we_lack_is_said() -> None:
    for theirs, part in [
        ("lora.rank", "adapters are trained with actor.lora"),
        ("actor.lora_rank", "adapters are trained with actor.lora"),
        ("actor_rollout_ref.model.lora_rank", "adapters are trained with actor.lora"),
        ("use_peft", "adapters are trained with actor.lora"),
        ("load_in_4bit", "quantised weights cannot be trained"),
        ("actor.fsdp_config.param_offload", "models are cut by Megatron-core"),
        ("zero_stage", "models are cut by Megatron-core"),
        ("rollout.repetition_penalty", "temperature, top_p and top_k alone"),
        ("gradient_accumulation_steps", "it follows from trainer.minibatch_size"),
        ("push_to_hub", "rlhf-mcore push"),
        ("model.trust_remote_code", "is never run"),
    ]:
        found = find_other_name(theirs)
        assert found is not None and not found.keys
        assert part in hint(theirs)


def test_every_answer_is_a_key_and_none_is_a_group() -> None:
    for ours, names in other_names._NAMES.items():
        assert ours in KEYS and not is_group(ours), ours
        assert len(names.split()) == len(set(names.split())), ours


def test_no_name_of_ours_is_in_the_table() -> None:
    """A key that there is never gets here; with a group before it (`data.val`) it may."""
    single = {name for names in other_names._NAMES.values() for name in names.split()}
    assert {name for name in single if name in KEYS and not is_group(name)} == set()


def test_a_single_answer_comes_with_the_keys_beside_it_several_with_their_meaning() -> None:
    assert hint("rollout.n") == (
        "did you mean rollout.sampling.n? The keys of rollout.sampling are: n, temperature, top_p, top_k, max_new_tokens"
    )
    assert hint("batch_size") == (
        "did you mean trainer.prompts_per_step (prompts of a step, over all ranks) or trainer.minibatch_size "
        "(prompts per optimizer update)?"
    )
    assert hint("learnin_rate").startswith("did you mean actor.optimizer.lr?")
    assert hint("seed.x") == "seed has no keys of its own; give it a value: int"


def test_a_key_of_a_whole_configuration_names_migrate() -> None:
    assert hint("actor_rollout_ref.rollout.n").endswith(
        "; `rlhf-mcore migrate` carries a whole configuration of verl over"
    )
    assert "migrate" not in hint("data.train_batch_size")


def test_groups_of_others_are_reported_by_what_is_in_them(workspace: Any) -> None:
    for text, starts in [
        ("lora: {rank: 8, alpha: 16}", ["unknown key lora; adapters are trained with actor.lora"]),
        ("actor_rollout_ref: {rollout: {n: 3}}", ["unknown key actor_rollout_ref; it is a key of verl's"]),
        ("traner: {num_steps: 3}", ["unknown key traner; did you mean trainer?"]),
        (
            "grpo: {num_prompts_per_step: 3, max_num_steps: 4}",
            [
                "unknown key grpo.num_prompts_per_step; did you mean trainer.prompts_per_step?",
                "unknown key grpo.max_num_steps; did you mean trainer.num_steps?",
            ],
        ),
        ("optim: {lr: 1.0e-5}", ["unknown key optim.lr; did you mean actor.optimizer.lr?"]),
    ]:
        workspace.write("run.yaml", f"model: {{path: m}}\n{text}\n")
        with pytest.raises(ConfigError) as caught:
            load_config("run.yaml")
        problems = caught.value.problems
        assert len(problems) == len(starts)
        assert all(f"run.yaml:2: {start}" in problem for problem, start in zip(problems, starts, strict=True)), problems
