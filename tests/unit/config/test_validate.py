"""Each mistake is refused with a message that names field, value and remedy; all of them at once."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import pytest

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import DESCRIPTIONS, KEYS, choices_of, is_group, value_of
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.rules.data import check_fills_a_step
from rlhf_mcore.config.schema import Config, DataConfig
from rlhf_mcore.config.schema.group import inner_types
from rlhf_mcore.config.validate import unused_problems
from tests.messages import assert_names, expect_error
from tests.unit.config.checking import check, only

NUMBERS = [key for key, hint in KEYS.items() if {int, float} & {hint, *get_args(hint)} and get_origin(hint) is not list]
CHOICES = [
    key
    for key, about in DESCRIPTIONS.items()
    if about.choices and about.choices.names and get_origin(KEYS[key]) is not list
]
GOOD_ROW = '{"prompt": "1+1=", "answer": "2"}\n'


def test_a_good_configuration_passes(workspace: Any) -> None:
    assert check() == []


APART = ["rollout.placement=disaggregated"]
AHEAD = [*APART, "trainer.max_staleness=1"]
AGENT = ["environment.function=agent"]
SERVED = [*AGENT, "environment.agent.url=http://127.0.0.1:1"]
FUNCTION = [f"rollout.function={Path(__file__).parents[3]}/examples/search_tool.py:rollout"]
GATHER = ["bridge.method=gather"]


GDPO = ["algorithm=gdpo", "algorithm.reward_weights={boxed: 1}"]


def test_good_variants_pass(workspace: Any) -> None:
    for overrides, world_size in [
        (["actor.layout.tp=2", "actor.layout.pp=2", "rollout.layout.tp=2"], None),
        (["actor.layout.tp=2", "actor.layout.sequence_parallel=true"], 8),
        (["actor.layout.cp=4", "actor.layout.tp=2", "actor.megatron={cp_comm_type: a2a}"], 8),
        (["actor.layout.pp=2", "actor.layout.vpp=2"], 2),
        (["actor.layout.pp=3", "actor.layout.layers_per_stage=[1,2,1]"], 3),
        (["actor.layout.pp=2", "actor.layout.vpp=2", "actor.layout.layers_per_stage=[1,1,1,1]"], 2),
        (["actor.layout.tp=4"], 4),  # more than the two key-value heads, and a multiple of them
        (["trainer.prompts_per_step=12", "trainer.minibatch_size=4"], None),
        (["rollout.max_model_len=768"], None),
        ([*FUNCTION, "reward.rules=[]"], None),
        (["evaluate.max_new_tokens=512"], None),
        (["rollout.engine=hf", "model.dtype=fp16"], None),
        *[
            ([f"algorithm={preset}"], None)
            for preset, keys in PRESETS.items()
            if "kind" not in keys and preset != "distillation"
        ],
        (["algorithm=reinforce_plus_plus", "rollout.sampling.n=1"], None),
        (["algorithm=ppo", "rollout.sampling.n=1", "algorithm.kl.coef=0.05"], None),  # k1 in the reward is sound
        (["algorithm.kl={coef: 0.01, controller: {final: 0.1, steps: 50}}"], None),
        (["algorithm.kl={coef: 0.01, controller: {target: 0.02}}"], None),
        (["algorithm.rollout_correction={mode: sequence, mask_low: 0.5, mask_high: 2}"], None),
        (["checkpoint.save_by=90"], None),
        (["checkpoint.save_by=2026-01-01T00:00"], None),
        (["checkpoint.save_by=null", "checkpoint.resume=never"], None),
        (["checkpoint.save_total_limit=1", "checkpoint.archive=true", "checkpoint.keep_every=5"], None),
    ]:
        assert check(*overrides, world_size=world_size) == []


REFUSED: list[tuple[list[str], int | None, list[str]]] = [
    (["rollout.layout.tp=2"], 3, ["processes=3", "rollout.layout.tp=2", "multiple of 2"]),
    (["actor.moe.aux_loss_coef=0.1"], None, ["actor.moe.aux_loss_coef=0.1", "no experts", "0"]),
    (["actor.layout.vpp=4", "actor.layout.pp=2"], 2, ["pp*vpp=8", "num_hidden_layers=4"]),
    (["actor.layout.layers_per_stage=[2,2]"], 1, ["[2, 2] has 2 numbers", "pp=1", "layers_per_stage=[4]"]),
    (
        ["actor.layout.pp=2", "actor.layout.layers_per_stage=[2,1]"],
        2,
        ["[2, 1]", "num_hidden_layers=4", "layers_per_stage=[2, 2]"],
    ),
    (["actor.layout.pp=2", "actor.layout.layers_per_stage=[4,0]"], 2, ["layers_per_stage[1]=0", "at least 1"]),
    (["rollout.sampling.temperature=2.5"], None, ["rollout.sampling.temperature=2.5", "0.01 to 2"]),
    ([*APART, "bridge.transport=nixl"], None, ["bridge.transport=nixl", "pip install nixl"]),
    (
        [*APART, "bridge.transport=nixl", "bridge.full_every=8"],
        None,
        ["bridge.full_every=8", "bridge.transport=nixl; set that to group"],
    ),
    ([*APART, "bridge.method=gather"], None, ["bridge.method=gather", "planned"]),
    (
        [*APART, "reward.pool=ray"],
        None,
        ["reward.pool=ray", "rollout.ray.address=None", "set both to its address"],
    ),
    ([*APART, "rollout.ray.address=10.0.0.1:99999"], None, ["rollout.ray.address='10.0.0.1:99999'", "host:port"]),
    (
        [*AHEAD, "rollout.deterministic_order=true", "rollout.at_publish=continue"],
        None,
        ["rollout.at_publish=continue", "drain"],
    ),
    (
        [*AHEAD, "rollout.deterministic_order=true", "rollout.oversample=2"],
        None,
        ["rollout.oversample=2", "set it to 1"],
    ),
    (
        [*AHEAD, *FUNCTION, "rollout.deterministic_order=true", "environment.max_seconds=60"],
        None,
        ["environment.max_seconds=60", "depends on timing", "remove it"],
    ),
    (
        ["actor.optimizer={name: muon, offload: 0.5}"],
        None,
        ["actor.optimizer.offload=0.5", "actor.optimizer.name=muon; remove it, or set actor.optimizer.name=adamw"],
    ),
    (
        ["actor.optimizer={state_dtype: bf16, offload: 0.5}"],
        None,
        ["actor.optimizer.state_dtype=bf16", "actor.optimizer.offload=0.5", "set one to its default"],
    ),
    (
        ["actor.optimizer.state_dtype=bf16", "model.dtype=fp16"],
        None,
        ["actor.optimizer.state_dtype=bf16 needs weights in bf16", "fp16; set it to fp32"],
    ),
    (["environment.env=[NOT_SET_HERE]"], None, ["environment.env names NOT_SET_HERE", "remove it from the list"]),
    (
        ["environment.function=tools", "reward.sources={a: [{name: math}]}"],
        None,
        ["reward.sources is set, but has no effect with environment.score=environment; remove it, or set"],
    ),
    ([*AGENT], None, ["environment.function=agent needs exactly one of", "found none; set one"]),
    (
        [*AGENT, "environment.agent.command=[a]", "environment.agent.url=http://a"],
        None,
        ["found environment.agent.command and environment.agent.url; set one"],
    ),
    (
        ["environment.agent.command=[a]"],
        None,
        ["environment.agent.command=['a'] has no effect", "set environment.function=agent"],
    ),
    (
        [*AGENT, "environment.agent.function=absent.py:play"],
        None,
        ["agent.function=absent.py:play", "does not exist"],
    ),
    ([*AGENT, "environment.agent.url=ftp://a"], None, ["environment.agent.url='ftp://a'", "http:// or https://"]),
    ([*SERVED, "environment.options={a: 1}"], None, ["environment.options has no effect", "remove it"]),
    ([*SERVED, "algorithm=gspo"], None, ["policy_loss=gspo", "environment.branches to last or longest"]),
    (["environment.function=rollout"], None, ["needs a function", "set rollout.function="]),
    (["rollout.function=absent.py:f"], None, ["rollout.function=absent.py:f", "does not exist"]),
    ([FUNCTION[0] + "s"], None, ["does not define rollouts", "search"]),
    ([*FUNCTION, "environment.function=tools"], None, ["environment.function=tools", "remove one of them"]),
    ([*FUNCTION, "environment.score=sum"], None, ["environment.score=sum", "has no effect", "remove it"]),
    ([*FUNCTION, "algorithm=gspo"], None, ["policy_loss=gspo", "environment.branches to last or longest"]),
    (["rollout.engine=hf", "rollout.layout.tp=2"], None, ["rollout.layout.tp=2", "hf"]),
    (["rollout.sampling.top_k=513"], None, ["rollout.sampling.top_k=513", "at most 512"]),
    (["rollout.sampling.top_k=1"], None, ["rollout.sampling.top_k=1", "2 or more"]),
    (["algorithm=ppo", "rollout.sampling.n=1", "algorithm.dynamic_sampling.enabled=true"], None, ["2 or more"]),
    (["algorithm.use_critic=true"], None, ["use_critic=true", "advantage=grpo", "uses no critic", "auto"]),
    (["algorithm.whiten_advantages=true"], None, ["whiten_advantages=True", "advantage=grpo", "gae or reinforce"]),
    (["algorithm=gspo", "algorithm.dual_clip=3"], None, ["dual_clip=3", "policy_loss=gspo", "remove it"]),
    (
        ["algorithm.bootstrap_truncated=true"],
        None,
        ["bootstrap_truncated=True", "advantage=grpo", "gae"],
    ),
    (
        ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k1"],
        None,
        ["estimator=k1", "k2 or k3", "placement=reward"],
    ),
    (["algorithm.kl.controller.final=0.1"], None, ["kl.coef=0", "final=0.1", "set algorithm.kl.coef"]),
    (
        ["algorithm.rollout_correction.mask_low=0.5"],
        None,
        ["mask_low=0.5", "mode=off", "token, sequence or geometric"],
    ),
    (
        ["algorithm.rollout_correction={mode: sequence, max_binary_kl: 0.1}"],
        None,
        ["mode=sequence", "choose token"],
    ),
    (["algorithm.rollout_correction.mode=geometric"], None, ["mode=geometric", "mask_low", "veto"]),
    (
        ["algorithm=remax", "algorithm.overlong.enabled=true"],
        None,
        ["overlong.enabled=True", "advantage=remax", "length"],
    ),
    (
        ["algorithm=remax", "environment.function=tools"],
        None,
        ["environment.function=tools", "advantage=remax", "rloo"],
    ),
    (
        ["algorithm=remax", "algorithm.turn_credit=true"],
        None,
        ["turn_credit=True", "advantage=remax", "remove it"],
    ),
    (["algorithm=grpo", "algorithm.lam_alpha=0.05"], None, ["lam_alpha=0.05", "advantage=grpo", "gae"]),
    (
        ["algorithm=gdpo", "reward.rules=[]", "reward.remote.url=http://127.0.0.1:1/score"],
        None,
        ["algorithm.reward_weights=None", "advantage=gdpo", "boxed"],
    ),
    ([*GDPO[:1], "algorithm.reward_weights={boxed: 0}"], None, ["reward_weights.boxed=0", "other than 0", "remove it"]),
    (
        [*GDPO[:1], "algorithm.reward_weights={boxed: .nan}"],
        None,
        ["reward_weights.boxed=nan is out of range", "finite"],
    ),
    (["algorithm.reward_weights={boxed: 1}"], None, ["reward_weights", "advantage=grpo", "gdpo"]),
    ([*GDPO, "algorithm.overlong.enabled=true"], None, ["overlong.enabled=True", "length"]),
    ([*GDPO, "algorithm.turn_gamma=0.5"], None, ["turn_gamma=0.5", "gdpo"]),
    ([*GDPO, "algorithm.kl={coef: 0.1, placement: reward}"], None, ["kl.placement=reward", "set it to loss"]),
    (
        ["algorithm.covariance.share=0.1"],
        None,
        ["algorithm.covariance", "policy_loss=ppo_clip", "kl_cov", "clip_cov"],
    ),
    (
        ["algorithm=clip_cov", "algorithm.covariance.low=6"],
        None,
        ["covariance.low=6", "covariance.high=5", "lower it"],
    ),
    (["algorithm.sapo.tau_negative=2"], None, ["algorithm.sapo", "policy_loss=ppo_clip", "sapo"]),
    (
        ["algorithm=ppo", "algorithm.turn_credit=true", "algorithm.gamma=0.9"],
        None,
        ["algorithm.gamma=0.9", "turn_credit=True", "turn_gamma"],
    ),
    (
        ["algorithm.rollout_correction.max_token_staleness=0"],
        None,
        ["max_token_staleness=0", "trainer.max_staleness=0", "remove it"],
    ),
    (
        ["algorithm.rollout_correction={mode: token, mask_low: 2, mask_high: 2}"],
        None,
        ["mask_low=2", "mask_high=2", "lower it"],
    ),
    (
        ["algorithm.overlong={enabled: true, cache_tokens: 257}"],
        None,
        ["algorithm.overlong.cache_tokens=257", "256 tokens", "lower it"],
    ),
    (["rollout.max_model_len=767"], None, ["rollout.max_model_len=767", "768"]),
    (["rollout.max_model_len=2000"], None, ["rollout.max_model_len=2000", "max_position_embeddings=1024"]),
    (
        ["data.max_prompt_tokens=1000"],
        None,
        ["max_new_tokens=1256", "max_position_embeddings=1024", "or rollout.sampling.max_new_tokens"],
    ),
    (["experiment=../x"], None, ["experiment='../x'", "slashes"]),
    (["reward.rules=[]"], None, ["reward.rules", "final_number"]),
    (["reward.judge.url=http://127.0.0.1:1/v1"], None, ["reward.judge.model is null", "set it to the model"]),
]


@pytest.mark.parametrize("group", sorted({re.split("[.=]", overrides[0])[0] for overrides, _, _ in REFUSED}))
def test_a_combination_is_refused_with_field_value_and_remedy(workspace: Any, group: str) -> None:
    """The rows of ``REFUSED`` whose first setting is in the group."""
    wrong = []
    for overrides, world_size, words in REFUSED:
        if re.split("[.=]", overrides[0])[0] == group:
            found = check(*overrides, world_size=world_size)
            if len(found) != 1 or any(word not in found[0] for word in words):
                wrong.append((overrides, words, found))
    assert wrong == []


def config_with(key: str, value: Any, cfg: Config | None = None) -> Config:
    cfg = cfg or load_config("run.yaml")
    group, _, name = key.rpartition(".")
    setattr(value_of(cfg, group) if group else cfg, name, value)
    return cfg


def test_every_choice_is_checked_and_listed(workspace: Any) -> None:
    for key in CHOICES:
        assert value_of(Config(), key) in (None, *choices_of(key))
        functions = tuple(filter(None, [DESCRIPTIONS[key].choices.form]))
        null = ("null",) if NoneType in get_args(KEYS[key]) else ()
        problem = only(check(f"{key}=nonsense"))
        assert_names(problem, field=key, value="'nonsense'", remedy=(*choices_of(key), *functions, *null))


def outside(bounds: tuple[Any, ...]) -> list[float]:
    """Return values next to the bounds that these exclude, and values that no bounds allow."""
    sides = {"ge": (-1,), "gt": (-1, 0), "le": (1,), "lt": (1, 0)}
    numbers = [(side, number) for bound in bounds for side, number in asdict(bound).items() if side in sides]
    return [math.nan, math.inf, -math.inf, *(number + step for side, number in numbers for step in sides[side])]


def test_every_number_out_of_range_is_named_with_its_range(workspace: Any) -> None:
    cfg = load_config("run.yaml")

    for key in NUMBERS:
        is_whole, before = KEYS[key] in (int, int | None), value_of(cfg, key)
        for value in outside(DESCRIPTIONS[key].bounds):
            if math.isfinite(value) or not is_whole:
                given = int(value) if is_whole else float(value)
                with pytest.raises(ConfigError) as caught:
                    config_with(key, given, cfg)
                words = f"is out of range; it must be {DESCRIPTIONS[key].range or 'a finite number'}"
                assert str(caught.value).endswith(f"{key.rpartition('.')[2]}={given} {words}")
        for bound in DESCRIPTIONS[key].bounds:
            if (number := asdict(bound).get("ge", asdict(bound).get("le"))) is not None:
                config_with(key, number, cfg)
        config_with(key, before, cfg)


def other_value(key: str) -> Any:
    """Return a value that is not the default."""
    default = value_of(Config(), key)
    if key in CHOICES:
        return next(choice for choice in choices_of(key) if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, list) or list[str] in get_args(KEYS[key]):
        return ["a"]
    if get_origin(inner_types(KEYS[key])[0]) is dict:
        return {"a": 1.0}
    if key in NUMBERS:
        numbers = (7, 2, 1, 3) if KEYS[key] in (int, int | None) else (0.25, 1.5)
        limits = {side: number for bound in DESCRIPTIONS[key].bounds for side, number in asdict(bound).items()}
        fits = [
            number
            for number in numbers
            if limits.get("ge", limits.get("gt", 0)) <= number <= limits.get("le", limits.get("lt", math.inf))
        ]
        return next(number for number in fits if number != default)
    return {"rollout.ray.address": "a:1", "environment.agent.url": "http://a"}.get(key, "a")


def test_every_key_without_effect_names_the_key_that_it_needs(workspace: Any) -> None:
    conditional = {key: described.only_with for key, described in DESCRIPTIONS.items() if described.only_with}
    assert len(conditional) > 30
    for key, needs in conditional.items():
        owner, _, values = needs.partition("=")
        if values and DESCRIPTIONS[owner].choices is not None:
            idle: Any = next(choice for choice in choices_of(owner) if choice not in values.split(" or "))
        else:
            idle = None if NoneType in get_args(KEYS[owner]) else type(value_of(Config(), owner))()
        value = other_value(key)
        cfg = config_with(owner, idle, config_with(key, value))
        problem = only([found for found in unused_problems(cfg) if found.startswith(f"{key}=")])
        assert_names(problem, field=key, value=str(value), remedy=("remove it", owner))


VALUES = [key for key in KEYS if not is_group(key)]


def test_every_key_is_described() -> None:
    assert [key for key in VALUES if not DESCRIPTIONS[key].help] == []


def test_functions_of_a_users_file_are_accepted_where_they_are_defined(workspace: Any) -> None:
    workspace.write("mine.py", "import no_such_module\n\n\ndef estimate(inputs, cfg): ...\n")  # parsed, not run
    assert check("algorithm.advantage=mine.py:estimate", "algorithm.use_critic=true", "rollout.sampling.n=1") == []
    problem = only(check("algorithm.policy_loss=mine.py:loss"))
    assert problem.startswith("algorithm.policy_loss=mine.py:loss") and "estimate" in problem


def test_a_misspelled_placement_is_not_taken_for_the_other_one(workspace: Any) -> None:
    problem = only(check("rollout.placement=disagregated", "trainer.max_staleness=1", "rollout.num_engines=2"))
    assert problem.startswith("rollout.placement='disagregated' is not a choice; did you mean 'disaggregated'?")


def test_heads_and_groups_against_tensor_parallel(workspace: Any) -> None:
    for tp, heads, groups, accepted in [
        (2, 8, 2, True),
        (4, 8, 2, True),
        (8, 8, 1, True),
        (2, 6, 3, False),
        (3, 6, 2, False),
        (3, 8, 8, False),
        (4, 4, 4, True),
    ]:
        workspace.write_hf_config(num_attention_heads=heads, num_key_value_heads=groups)
        for field in ("actor.layout.tp", "rollout.layout.tp"):
            found = check(f"{field}={tp}")
            assert (found == []) is accepted
            assert all(problem.startswith(f"{field}={tp}") for problem in found)


def test_intermediate_size_against_tensor_parallel(workspace: Any) -> None:
    workspace.write_hf_config(intermediate_size=98)
    assert "intermediate_size=98" in only(check("actor.layout.tp=4"))


def test_models_that_are_refused(workspace: Any) -> None:
    for changes, word in [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported are: DeepseekV2ForC",
        ),
        ({"architectures": None}, "architecture none"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers, which is an integer from 1 to 1024"),
        ({"num_attention_heads": "8"}, "num_attention_heads='8'"),
        ({"rope_scaling": "yarn"}, "config.json has rope_scaling='yarn', not an object"),
        ({"architectures": 5}, "config.json has architectures=5, not a list of texts"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, "sliding_window 512"),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, "sliding_window 4096"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            "sliding_window 512",
        ),
    ]:
        workspace.write_hf_config(**changes)
        problem = only(check())
        assert problem.startswith("model.path=model") and word in problem


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def test_models_that_are_accepted(workspace: Any) -> None:
    for changes in [
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3},
        {"architectures": ["MistralForCausalLM"]},  # the default window, 4096, is longer than the 1024 positions
        {"architectures": ["MistralForCausalLM"], "sliding_window": 512, "max_position_embeddings": 512},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "use_sliding_window": False},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 512,
            "use_sliding_window": True,
            "max_window_layers": 4,
        },
        {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": None},
    ]:
        workspace.write_hf_config(**changes)
        assert check("data.max_prompt_tokens=100") == []


def test_yarn_stretches_the_positions(workspace: Any) -> None:
    workspace.write_hf_config(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    )
    assert check("data.max_prompt_tokens=3840") == []  # 3840 + 256 = 4 * 1024
    assert "max_position_embeddings=4096" in only(check("data.max_prompt_tokens=3841"))


def test_a_directory_without_config_weights_and_tokenizer(workspace: Any) -> None:
    workspace.write("hollow/pytorch_model.bin", "")
    found = check("model.path=hollow")
    assert len(found) == 3
    assert "config.json" in found[0]
    assert "pytorch_model.bin; pickle files" in found[1]
    assert "tokenizer.json" in found[2]


def test_a_run_directory_is_one_problem_that_names_its_model(workspace: Any) -> None:
    workspace.write_hf_config("out/run/checkpoint-3/actor")
    workspace.write("out/run/config.yaml", "")
    (workspace.root / "out/run/latest").symlink_to("checkpoint-3")
    assert "out/run/latest/actor" in only(check("model.path=out/run"))
    assert "out/run/checkpoint-3/actor" in only(check("model.path=out/run/checkpoint-3"))
    assert "none of tokenizer.json" in only(check("model.tokenizer_path=out/run"))


def test_the_index_of_shards(workspace: Any) -> None:
    for weight_map, word in [
        ({"a": "model.safetensors"}, None),
        ({"a": "model-00002-of-00002.safetensors"}, "which is missing"),
        ({"a": "../model/model.safetensors"}, "outside the directory"),
        ({"a": "/etc/passwd"}, "outside the directory"),
        ({}, "no weight_map"),
    ]:
        workspace.write("model/model.safetensors.index.json", json.dumps({"weight_map": weight_map}))
        found = check()
        assert found == [] if word is None else word in only(found)


def test_a_reference_of_another_shape(workspace: Any) -> None:
    workspace.write_hf_config("other", vocab_size=101, num_hidden_layers=3)
    workspace.write("other/model.safetensors", "")
    overrides = ["reference.path=other", "actor.layout.pp=2"]
    assert check(*overrides) == []  # not built without a KL term
    found = check(*overrides, "algorithm.kl.coef=0.1")
    assert ["vocab_size=101" in found[0], "num_hidden_layers=3" in found[1], len(found)] == [True, True, 2]


def test_parquet_columns_are_read_and_listed(workspace: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"question": ["1+1"], "answer": ["2"]}), "q.parquet")
    assert check("data.train=[q.parquet]", "data.prompt_key=question") == []
    problem = only(check("data.train=[q.parquet]"))
    assert "q.parquet, row 0: no column 'prompt'; there are: answer, question. Set data.prompt_key" in problem
    workspace.write("broken.parquet", "PAR1 not really")
    assert "broken.parquet: not a readable parquet file" in only(check("data.train=[broken.parquet]"))


def test_jsonl_that_is_broken(workspace: Any) -> None:
    for text, word in [
        ("", "it has no rows"),
        ("\n\n{oops\n", "line 3: not valid JSON"),
        ("[1]\n", "line 1: expected a JSON object"),
        # further down than the first line
        (GOOD_ROW * 400 + "{\n", "line 401: not valid JSON"),
        (GOOD_ROW + '{"prompt": "", "answer": "2"}\n', "line 2, column 'prompt': the prompt is empty"),
        (GOOD_ROW + '{"prompt": 3, "answer": "2"}\n', "line 2, column 'prompt': a prompt is a string or a list"),
        (
            GOOD_ROW + '{"prompt": [{"role": "user"}], "answer": "2"}\n',
            "line 2, column 'prompt': a message needs a text role",
        ),
        (GOOD_ROW + '{"answer": "2"}\n', "line 2: no column 'prompt'"),
        (GOOD_ROW + '{"prompt": "x"}\n', "line 2: no answer to compare responses with"),
        (GOOD_ROW + '{"prompt": "a\\u0000b", "answer": "2"}\n', "a NUL character at character 1"),
        (GOOD_ROW + '{"prompt": "a\\ud800", "answer": "2"}\n', "a lone surrogate (U+D800) at character 1"),
    ]:
        workspace.write("train.jsonl", text)
        assert word in only(check())


def test_rules_need_an_answer_column_and_functions_do_not(workspace: Any) -> None:
    workspace.write("train.jsonl", '{"prompt": "say something"}\n')
    workspace.write("grade.py", "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    assert "no answer to compare responses with" in only(check())
    assert check("reward.rules=[{name: format}]") == []
    assert check("reward.function=grade.py:score") == []


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("grade.py", "path/to/file.py:name"),
        ("broken.py:score", "broken.py, line 2"),
    ],
)
def test_a_reward_function_that_cannot_be_had(workspace: Any, spec: str, word: str) -> None:
    workspace.write(
        "grade.py", "import json\nscore = lambda *args: 1.0\nraise SystemExit('this file must not be run')\n"
    )
    workspace.write("broken.py", "x = 1\ndef (\n")
    assert word in only(check(f"reward.function={spec}"))


def test_an_unwritable_output_dir(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != workspace.root)
    assert "output_dir=outputs" in only(check())


def test_columns_differ_from_file_to_file(workspace: Any) -> None:
    workspace.write("q.jsonl", '{"question": "1+1=", "gold": "2"}\n')
    both = "data.train=[train.jsonl, q.jsonl]"
    assert check(both, "data.prompt_key=[prompt, question]", "data.answer_key=[null, gold]") == []
    assert "q.jsonl, line 1: no column 'prompt'" in check(both)[0]
    short = check(both, "data.prompt_key=[prompt]", "data.answer_key=[null, gold]")
    assert "names 1 columns for the 2 files of data.train" in only(short)
    wrong = check(both, "data.prompt_key=[prompt, 3]", "data.answer_key=[null, gold]")
    assert "q.jsonl, line 1: no column '3'" in only(wrong)
    # The columns of eval default to the columns of train
    evaluated = ["data.eval=[q.jsonl]", "data.train=[train.jsonl]"]
    (prompt, answer) = check(*evaluated)
    assert "data.eval: q.jsonl, line 1: no column 'prompt'" in prompt and "Set data.eval_prompt_key to one" in prompt
    assert "Set data.eval_answer_key" in answer
    assert check(*evaluated, "data.eval_prompt_key=question", "data.eval_answer_key=gold") == []
    workspace.write("n.jsonl", '{"prompt": "1+1=", "meta": {"gold": "2"}}\n')
    assert check("data.train=[n.jsonl]", "data.answer_key=meta.gold") == []
    assert "no column 'meta.silver'; there are: meta.gold. Set data.answer_key" in only(
        check("data.train=[n.jsonl]", "data.answer_key=meta.silver")
    )
    evaluated = ["data.train=[n.jsonl]", "data.answer_key=meta.gold", "data.eval=[n.jsonl]"]
    assert "no column 'meta.answer'; there are: meta.gold. Set data.eval_answer_key" in only(
        check(*evaluated, "data.eval_answer_key=meta.answer")
    )
    lists = [both, "data.prompt_key=[prompt, question]", "data.answer_key=[null, gold]", "data.eval=[q.jsonl]"]
    found = check(*lists)
    assert found[0] == (
        "data.eval_prompt_key (not set: data.prompt_key=['prompt', 'question']) names 2 columns for the one file of data.eval; "
        "give one column per file, or a single column"
    )
    own = check(*evaluated, "data.eval_prompt_key=[a, b]", "data.eval_answer_key=gold")
    assert "data.eval_prompt_key=['a', 'b'] names 2 columns for the one file of data.eval" in only(own)


def test_a_directory_of_data_is_named_as_one(workspace: Any) -> None:
    (workspace.root / "parts").mkdir()
    assert_names(
        only(check("data.train=[parts]")), field="data.train", value=("parts", "a directory"), remedy=".parquet"
    )


def test_a_step_needs_as_many_rows_as_it_has_prompts(workspace: Any) -> None:
    workspace.write("three.jsonl", '{"prompt": "1+1=", "answer": "2"}\n' * 3)
    data = DataConfig(train=["three.jsonl", "three.jsonl"])
    check_fills_a_step(data, 6)
    with expect_error(ConfigError, field=("data.train", "trainer.prompts_per_step"), value=(6, 7)):
        check_fills_a_step(data, 7)


def test_a_transform_is_looked_up_and_not_run(workspace: Any) -> None:
    workspace.write("t.py", "raise SystemExit(1)\ndef shape(row):\n    return row\n")
    workspace.write("train.jsonl", '{"other": 1}\n')
    assert check("data.transform=t.py:shape") == []
    assert "does not define form; it defines: shape" in only(check("data.transform=t.py:form"))


def test_bounds_of_rows_name_their_keys(workspace: Any) -> None:
    assert "line 1: more than data.max_row_bytes=10 bytes" in only(check("data.max_row_bytes=10"))
    workspace.write("train.jsonl", GOOD_ROW * 3)
    assert "more than 2 rows, one per 4096 bytes of data.max_bytes" in only(check("data.max_bytes=8192"))
    assert "more than data.max_bytes=50 bytes" in only(check("data.max_bytes=50"))


def test_chat_templates_of_texts(workspace: Any) -> None:
    for value in [
        "auto",
    ]:
        assert check(f"data.apply_chat_template={value}") == []
        assert load_config("run.yaml", [f"data.apply_chat_template={value}"]).data.apply_chat_template == value


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["model.attention=sdpa"], "model.attention=sdpa needs rollout.engine=hf, found 'vllm'"),
    ],
)
def test_attention_of_the_plain_engine(workspace: Any, settings: list[str], problem: str | None) -> None:
    found = check(*settings)
    assert found == [] if problem is None else problem in only(found)
