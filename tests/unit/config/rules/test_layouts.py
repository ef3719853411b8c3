"""Check layouts of models with experts, and roles with separate layouts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.commands import ROOT
from tests.unit.config.checking import check, only

PPO = "algorithm=ppo"
SCORER = "reward.model.path=scorer"
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "sliding_window": 8}
OLMO2 = {"architectures": ["Olmo2ForCausalLM"]}
DELTA_NETS = {"architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SPACES = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M*",
    "mamba_num_heads": 8,
    "n_groups": 2,
}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6}


def test_models_with_experts(workspace: Any) -> None:
    for model, overrides, world_size in [
        (QWEN_MOE, [], None),
        (QWEN_MOE, ["actor.layout.ep=3"], None),
        (QWEN_MOE | {"num_experts": None, "num_local_experts": 6}, ["actor.layout.ep=6", "actor.layout.pp=2"], 12),
        (QWEN_MOE, ["actor.layout.tp=2", "actor.layout.sequence_parallel=true", "actor.layout.ep=2"], 4),
        (
            QWEN_MOE,
            ["actor.layout.tp=2", "actor.layout.sequence_parallel=true", "actor.layout.ep=2", "actor.layout.etp=1"],
            2,
        ),
        (QWEN_MOE, ["actor.layout.ep=2", "actor.layout.etp=2"], 4),
        # 8 does not divide the dense MLP, but no layer has one. 8 divides the experts' 40.
        (QWEN_MOE | {"intermediate_size": 100}, ["actor.layout.tp=8", "actor.layout.sequence_parallel=true"], 8),
        (QWEN_MOE | {"norm_topk_prob": False, "num_experts_per_tok": 1}, ["actor.moe.aux_loss_coef=0.01"], None),
        (QWEN_MOE | {"sliding_window": 512, "use_sliding_window": False, "max_window_layers": 2}, [], None),
        (MIXTRAL, ["actor.layout.ep=2"], 2),
        (QWEN_MOE | {"moe_intermediate_size": 41}, ["rollout.layout.tp=2", "rollout.layout.ep=2"], 4),
        (DELTA_NETS, ["actor.layout.tp=2", "actor.layout.cp=4"], 8),
        (SPACES, ["actor.layout.tp=2", "actor.layout.cp=4"], 8),
    ]:
        workspace.write_hf_config(**model)
        assert check(*overrides, world_size=world_size) == []


@pytest.mark.parametrize(
    ("model", "overrides", "world_size", "words"),
    [
        (QWEN_MOE, ["actor.layout.ep=4"], 4, ["actor.layout.ep=4", "num_experts=6"]),
        (
            GPT_OSS,
            ["actor.layout.tp=2", "actor.layout.sequence_parallel=true"],
            2,
            ["actor.layout.etp=2: model.path stores all experts in one tensor", "ep > 1"],
        ),
        (
            GPT_OSS,
            ["rollout.layout.tp=4"],
            4,
            ["rollout.layout.tp=4: rollout.engine=vllm does not repeat", "choose a divisor of 2"],
        ),
        (SPACES, ["actor.layout.tp=4"], 4, ["actor.layout.tp=4", "n_groups=2"]),
        (
            OLMO2,
            ["rollout.layout.tp=4"],
            4,
            ["rollout.layout.tp=4: rollout.engine=vllm does not repeat", "choose a divisor of 2"],
        ),
        (QWEN_MOE, ["actor.layout.ep=2"], 3, ["ep*etp=2*1=2", "3 ranks of a pipeline stage"]),
        (QWEN_MOE, ["actor.layout.ep=2", "actor.layout.etp=3"], 6, ["actor.layout.etp=3", "40"]),
        (QWEN_MOE, ["actor.layout.tp=2"], 2, ["sequence_parallel=False", "actor.layout.tp=2", "set it to true"]),
        (QWEN_MOE, ["rollout.layout.tp=8"], 8, ["rollout.layout.tp=8", "6 experts"]),
        (
            QWEN_MOE,
            ["rollout.layout.tp=4", "rollout.layout.ep=4"],
            4,
            ["rollout.layout.ep=4 does not divide num_experts=6 of model.path", "choose a divisor of 6"],
        ),
        (
            QWEN_MOE,
            ["rollout.layout.tp=4", "rollout.layout.ep=2"],
            4,
            ["rollout.layout.ep=2 is neither 1 nor rollout.layout.tp*dp=4*1=4", "set it to 1 or 4"],
        ),
        (QWEN_MOE, ["rollout.layout.pp=8"], 8, ["rollout.layout.pp=8 is more than num_hidden_layers=4", "lower it"]),
        (QWEN_MOE, ["rollout.layout.pp=2"], 3, ["processes=3 is not divisible by rollout.layout.tp*pp=2"]),
        (
            {},
            ["rollout.layout.tp=2", "rollout.layout.ep=2"],
            2,
            ["rollout.layout.ep=2, but model.path has no experts; set it to 1"],
        ),
        ({}, ["rollout.layout.dp=2"], 2, ["rollout.layout.dp=2, but model.path has no experts", "use more engines"]),
        (
            QWEN_MOE | {"moe_intermediate_size": 41},
            ["rollout.layout.tp=2"],
            2,
            ["rollout.layout.tp=2", "moe_intermediate_size=41"],
        ),
        (QWEN_MOE | {"num_experts_per_tok": 7}, [], None, ["num_experts_per_tok=7", "num_experts=6"]),
        (QWEN_MOE | {"num_experts_per_tok": 1}, [], None, ["num_experts_per_tok=1"]),
        (QWEN_MOE | {"shared_expert_intermediate_size": 8}, [], None, ["shared_expert_intermediate_size"]),
    ],
)
def test_models_and_layouts_with_experts_that_are_refused(
    workspace: Any, model: Any, overrides: list[str], world_size: int | None, words: list[str]
) -> None:
    workspace.write_hf_config(**model)
    problem = only(check(*overrides, world_size=world_size))
    assert all(word in problem for word in words), problem


def test_where_one_size_is_left_no_choice_is_offered(workspace: Any) -> None:
    workspace.write_hf_config(**QWEN_MOE)
    assert only(check("rollout.layout.ep=2", world_size=2)).endswith("=1*1=1; set it to 1")


def test_a_reference_without_experts_does_not_fit_their_layout(workspace: Any) -> None:
    workspace.write_hf_config(**QWEN_MOE)
    workspace.write_hf_config("dense")
    workspace.write("dense/model.safetensors", "")
    problem = only(check("actor.layout.ep=2", "reference.path=dense", "algorithm.kl.coef=0.1", world_size=2))
    assert "actor.layout.ep=2, but reference.path has no experts" in problem


# --------------------------------------------------------------------------------------- roles with layouts of their own
@pytest.fixture
def scorer(workspace: Any) -> Any:
    """Return a workspace with a reward model."""
    workspace.write_hf_config("scorer", architectures=["LlamaForSequenceClassification"], id2label={"0": "score"})
    workspace.write("scorer/model.safetensors", "")
    return workspace


def test_roles_that_fit(scorer: Any) -> None:
    for overrides, world_size in [
        ([PPO, "critic.layout.tp=2", "actor.layout.pp=2"], 2),
        ([PPO, SCORER, "reward.model.layout.tp=4", "critic.layout.pp=2", "actor.layout.tp=2"], 8),
        ([PPO, "actor.ranks=[0,3]", "critic.ranks=[3,5]", "critic.layout.tp=2"], 5),  # 5 is not a multiple of 2
        ([PPO, "actor.ranks=[0,2]", "critic.ranks=[1,4]"], 4),  # roles may overlap
        ([SCORER, "reward.model.ranks=[3,4]"], 4),
        ([SCORER, "reward.rules=[]"], None),
        # Roles that the run does not use are ignored.
        (["critic.ranks=[9,1]", "critic.layout.tp=3", "critic.path=nowhere"], 4),
        (["reward.model.ranks=[9,1]", "reward.model.layout.cp=2"], 4),
    ]:
        assert check(*overrides, world_size=world_size) == []


def test_a_role_that_does_not_fit(scorer: Any) -> None:
    for settings, world_size, words in [
        (["layout.tp=2", "layout.pp=2"], 6, ["processes=6", "tp*pp*cp=2*2*1=4", "multiple of 4"]),
        (["layout.cp=2"], 3, ["processes=3", "tp*pp*cp=1*1*2=2", "multiple of 2"]),
        (["layout.ep=2"], 2, ["layout.ep=2", "no experts", "set it to 1"]),
        (["layout.etp=2"], 2, ["layout.etp=2", "layout.tp=1", "null"]),
        (["layout.vpp=2"], 1, ["layout.vpp=2", "layout.pp", "null"]),
        (["layout.vpp=4", "layout.pp=2"], 2, ["pp*vpp=8", "num_hidden_layers=4"]),
        (["layout.pp=3"], 3, ["layout.pp=3", "num_hidden_layers=4", "divisor"]),
        (["layout.sequence_parallel=true"], 1, ["sequence_parallel=True", "layout.tp"]),
        (["layout.tp=16"], 16, ["layout.tp=16", "num_attention_heads=8"]),
        (["ranks=[]"], 4, ["ranks=[]", "[first, end)", "processes=4"]),
        (["ranks=[2,2]"], 4, ["ranks=[2, 2]", "[first, end)"]),
        (["ranks=[-1,2]"], 4, ["ranks=[-1, 2]", "[first, end)"]),
        (["ranks=[2,5]"], 4, ["ranks=[2, 5]", "processes=4"]),
        (["ranks=[1,4]", "layout.tp=2"], 4, ["ranks=[1, 4]", "tp*pp*cp=2*1*1=2"]),
    ]:
        for group in ("actor", "critic", "reward.model"):
            overrides = [f"{group}.{setting}" for setting in settings]
            found = [p for p in check(PPO, SCORER, *overrides, world_size=world_size) if "num_key_value_heads" not in p]
            problem = only(found)
            assert f"{group}." in problem
            assert [word for word in words if word not in problem] == []


def test_ranks_outside_of_a_world_that_the_configuration_names(scorer: Any) -> None:
    problem = only(check(PPO, "critic.ranks=[2,4]", "trainer.world_size=3"))
    assert problem.startswith("critic.ranks=[2, 4] is not [first, end) within trainer.world_size=3")


def test_a_grid_of_experts_within_the_ranks_of_a_role(workspace: Any) -> None:
    workspace.write_hf_config(**QWEN_MOE)
    assert check(PPO, "critic.ranks=[1,5]", "critic.layout.ep=2", world_size=5) == []
    problem = only(check(PPO, "critic.ranks=[1,4]", "critic.layout.ep=2", world_size=5))
    assert "critic.layout.ep*etp=2*1=2 does not divide the 3 ranks of a pipeline stage" in problem


def test_a_critic_without_a_path_is_cut_as_model_path_says(workspace: Any) -> None:
    assert "num_hidden_layers=4 of model.path" in only(check(PPO, "critic.layout.pp=3", world_size=3))
    workspace.write_hf_config("other", num_hidden_layers=3)
    workspace.write("other/model.safetensors", "")
    assert check(PPO, "critic.path=other", "critic.layout.pp=3", world_size=3) == []
    assert "num_hidden_layers=3 of critic.path" in only(
        check(PPO, "critic.path=other", "critic.layout.pp=2", world_size=2)
    )


def test_heads_that_a_role_may_have(workspace: Any) -> None:
    for overrides, folder, architecture, accepted in [
        ([PPO, "critic.path=other"], "other", "Qwen2ForCausalLM", True),
        ([PPO, "critic.path=other"], "other", "Qwen2ForTokenClassification", True),
        ([PPO, "critic.path=other"], "other", "Qwen2ForSequenceClassification", False),
        (["reward.model.path=other"], "other", "Qwen2ForSequenceClassification", True),
        (["reward.model.path=other"], "other", "Qwen2ForTokenClassification", False),
        (["reward.model.path=other"], "other", "Qwen2ForCausalLM", False),
        (["reference.path=other", "algorithm.kl.coef=0.1"], "other", "Qwen2ForTokenClassification", False),
        (["model.path=model"], "model", "Qwen2ForSequenceClassification", False),
    ]:
        workspace.write_hf_config(folder, architectures=[architecture], id2label={"0": "score"})
        workspace.write(f"{folder}/model.safetensors", "")
        found = check(*overrides)
        if accepted:
            assert found == []
        else:
            key = next(override for override in overrides if override.endswith(f"path={folder}"))
            assert only(found).startswith(
                f"{key}: architecture {architecture} is not supported; supported are: DeepseekV2"
            )


@pytest.mark.parametrize(
    "key",
    [
        "critic.path",
    ],
)
def test_a_role_with_another_vocabulary_or_no_model(scorer: Any, key: str) -> None:
    assert f"{key}=nowhere does not exist" in only(check(PPO, f"{key}=nowhere"))
    kind = "ForTokenClassification" if key == "critic.path" else "ForSequenceClassification"
    scorer.write_hf_config("scorer", architectures=[f"Llama{kind}"], vocab_size=101, num_labels=1)
    problem = only(check(PPO, f"{key}=scorer"))
    assert problem.startswith(f"{key}=scorer: its vocab_size=101 is not model.path's 100")


def test_the_critic_has_minibatches_and_a_schedule_of_its_own(workspace: Any) -> None:
    assert check(PPO, "critic.minibatch_size=8", "trainer.minibatch_size=4") == []
    assert "divisible by critic.minibatch_size=5" in only(check(PPO, "critic.minibatch_size=5"))
    assert "critic.optimizer.schedule.min_lr=1 " in only(check(PPO, "critic.optimizer.schedule.min_lr=1"))


def test_a_layout_out_of_range_does_not_hide_a_missing_model(workspace: Any) -> None:
    # A layout with a zero prevents the check of its splits. All other checks run.
    found = check(PPO, "critic.layout.tp=0", "critic.path=nowhere")
    assert [problem.split(" ")[0] for problem in found] == ["critic.layout.tp=0", "critic.path=nowhere"]
    reference = ["reference.path=model", "algorithm.kl.coef=0.1"]
    assert "actor.layout.tp=0" in only(check(*reference, "actor.layout.tp=0"))


def test_a_head_with_several_labels_is_not_a_number(scorer: Any) -> None:
    for labels in [{}, {"id2label": {"0": "bad", "1": "good"}}, {"num_labels": 3}]:
        for key in ["critic.path", "reward.model.path"]:
            kind = "ForTokenClassification" if key == "critic.path" else "ForSequenceClassification"
            scorer.write_hf_config("scorer", architectures=[f"Llama{kind}"], **labels)
            assert f"{key}=scorer: Llama{kind} with {labels.get('num_labels', 2)} labels" in only(
                check(PPO, f"{key}=scorer")
            )


def test_a_balancing_loss_of_a_critic_without_experts(workspace: Any) -> None:
    problem = only(check(PPO, "critic.moe.aux_loss_coef=0.1"))
    assert problem == "critic.moe.aux_loss_coef=0.1, but model.path has no experts; set it to 0"


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        ({}, [], []),
        ({"index_topk_pattern": "FFSF"}, [], ["share selected keys"]),
        ({}, ["trainer.packing=false"], ["needs trainer.packing=true"]),
        ({}, ["model.dtype=fp16"], ["model.dtype=fp16; set that to bf16"]),
        ({}, ["actor.lora.rank=4"], ["actor.lora"]),
        ({}, ["actor.indexer=warm_up"], ["actor.indexer=warm_up", "needs algorithm.kind=sft; set it to sparse"]),
        ({}, ["actor.indexer=warm_up", "actor.freeze=[model.norm.weight]"], ["remove actor.freeze"]),
    ],
)
def test_what_trained_indexers_do_not_go_together_with(
    workspace: Any, model: Any, overrides: list[str], words: list[str]
) -> None:
    write_indexed_model(workspace, **model)
    problems = check("rollout.engine=hf", "actor.indexer=sparse", *overrides, world_size=1)
    assert all(word in " ".join(problems) for word in words) and bool(problems) == bool(words), problems


def test_indexers_of_a_model_without_them_cannot_be_trained(workspace: Any) -> None:
    assert "has no indexer; set it to frozen" in only(check("actor.indexer=sparse"))


def write_indexed_model(workspace: Any, **changes: Any) -> None:
    published = json.loads((ROOT / "configs" / "models" / "GLM-5.2" / "config.json").read_text())
    sizes = {"num_hidden_layers": 4, "vocab_size": 64, "n_routed_experts": 8, "indexer_types": None}
    workspace.write_hf_config(**{**published, **sizes, "index_topk_freq": 1, **changes})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["actor.layout.pp=2"],
            ["stage begins with layer 2", "indexer ([1, 3]), for example actor.layout.layers_per_stage=[1, 3]"],
        ),
        (["actor.layout.pp=3"], ["pp=3 does not divide", "for example actor.layout.layers_per_stage=[1, 2, 1]"]),
        (["actor.layout.pp=2", "actor.layout.layers_per_stage=[3,1]"], []),
        (["actor.recompute.granularity=full"], []),
        (
            ["actor.recompute.granularity=full", "trainer.packing=false"],
            ["actor.recompute.granularity=full", "trainer.packing=true"],
        ),
    ],
)
def test_layers_that_use_the_keys_of_another_layer_are_in_its_stage(
    workspace: Any, overrides: list[str], words: list[str]
) -> None:
    write_indexed_model(workspace, index_topk_pattern="FFSF")
    problems = check("rollout.engine=hf", *overrides, world_size=6)
    assert all(word in " ".join(problems) for word in words) and len(problems) == bool(words), problems


def write_mtp_model(workspace: Any, **changes: Any) -> None:
    """Write a GLM-4.5 whose config.json declares an MTP layer without weights."""
    workspace.write_hf_config(
        architectures=["Glm4MoeForCausalLM"],
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        first_k_dense_replace=1,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        attention_bias=True,
        **{"num_nextn_predict_layers": 1, **changes},
    )


def test_mtp_layers_can_be_kept_whatever_the_model_is(workspace: Any) -> None:
    write_mtp_model(workspace)
    assert check("actor.mtp.mode=keep", "actor.layout.cp=2", world_size=2) == []


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        (
            {"num_nextn_predict_layers": 0},
            [],
            ["has no MTP layers (config.json: num_nextn_predict_layers); set it to keep"],
        ),
        ({"tie_word_embeddings": True}, [], ["tied embeddings"]),
        ({}, ["actor.layout.cp=2"], ["actor.mtp.mode=train is not supported with actor.layout.cp=2"]),
        (
            {},
            ["actor.layout.pp=2", "actor.megatron={overlap_grad_reduce: true}"],
            ["actor.layout.pp=2 is not supported with actor.megatron.overlap_grad_reduce"],
        ),
        (
            {},
            ["actor.mtp.mode=joint"],
            ["changes the gradient of the policy, so it needs algorithm.kind=sft; set it to train"],
        ),
    ],
)
def test_what_trained_mtp_layers_do_not_go_together_with(
    workspace: Any, model: Any, overrides: list[str], words: list[str]
) -> None:
    write_mtp_model(workspace, **model)
    problems = check("actor.mtp.mode=train", *overrides, world_size=2)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_a_family_without_mtp_layers_that_can_be_trained_is_named(workspace: Any) -> None:
    workspace.write_hf_config(**QWEN_MOE)
    problem = only(check("actor.mtp.mode=train"))
    assert "family qwen3_moe, whose MTP layers are not supported (supported: deepseek_v3, " in problem


def test_mtp_layers_that_only_config_json_has_cannot_be_trained(workspace: Any) -> None:
    write_mtp_model(workspace)
    save_file({"model.layers.4.enorm.weight": np.ones(4)}, workspace.root / "model" / "model.safetensors")
    found = [problem for problem in check("actor.mtp.mode=train") if "MTP" in problem]
    assert "names 1 MTP layer in config.json, but 35 of their tensors are missing" in only(found)
    assert "model.layers.4.eh_proj.weight" in only(found)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout.speculative.method=mtp", "rollout.speculative.ngram_tokens=2"],
            ["no effect with rollout.speculative.method=mtp"],
        ),
        (["rollout.speculative.method=mtp"], ["family qwen3, whose MTP layers are not supported"]),
    ],
)
def test_what_drafts_do_not_go_together_with(workspace: Any, overrides: list[str], words: list[str]) -> None:
    problems = check(*overrides)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_layers_that_draft_have_8_bits_where_they_are_sent(workspace: Any) -> None:
    write_mtp_model(workspace)
    found = check("rollout.quantization=int8", "rollout.speculative.method=mtp", "actor.mtp.mode=keep")
    expected = (
        "actor.mtp.mode=keep engines load MTP layers from files, which are not quantised; set actor.mtp.mode=train"
    )
    assert expected in only([problem for problem in found if problem.startswith("rollout.quantization=int8")])


def test_engines_do_not_load_draft_layers_from_quantised_files(workspace: Any) -> None:
    write_mtp_model(workspace, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    found = check("rollout.speculative.method=mtp")
    assert "engines load MTP layers from model.path=model, which is quantised; set actor.mtp.mode=train" in only(found)
    assert check("rollout.speculative.method=mtp", "actor.mtp.mode=train") == []


@pytest.mark.parametrize(
    "layout",
    [
        ["dp=2"],
    ],
)
def test_drafts_go_with_engines_that_are_cut_in_other_ways(workspace: Any, layout: list[str]) -> None:
    write_mtp_model(workspace)
    for method in ("ngram", "mtp"):
        keys = [f"rollout.layout.{key}" for key in layout]
        problems = check(f"rollout.speculative.method={method}", "actor.mtp.mode=train", *keys, world_size=2)
        assert not [problem for problem in problems if "rollout.layout" in problem], problems
