"""Files and overrides in, a typed tree or one readable error out."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, is_group, nearest, value_of
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import Config, ReferenceConfig, RuleConfig
from tests.messages import expect_error


def problems(*overrides: str, file: str = "run.yaml") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return caught.value.problems


def test_values_arrive_with_the_types_of_the_schema(workspace: Any) -> None:
    workspace.write("run.yaml", "model: {path: m}\nactor: {optimizer: {lr: 1e-4}}\ntrainer:\n  num_steps: 7\n")
    cfg = load_config("run.yaml", ["rollout.enforce_eager=true", "data.train=[a.jsonl, 3.jsonl]", "seed=11"])
    assert isinstance(cfg, Config)
    assert (cfg.actor.optimizer.lr, cfg.trainer.num_steps, cfg.seed) == (1e-4, 7, 11)
    assert cfg.rollout.enforce_eager is True
    assert cfg.data.train == ["a.jsonl", "3.jsonl"]


def test_a_rule_may_be_its_name_and_a_single_one_needs_no_brackets(workspace: Any) -> None:
    for override, rules in [
        ("reward.rules=final_number", [RuleConfig(name="final_number")]),
        ("reward.rules=[final_number]", [RuleConfig(name="final_number")]),
        ("reward.rules={name: boxed, weight: 2}", [RuleConfig(name="boxed", weight=2.0)]),
        (
            "reward.rules=[math, {name: format, weight: 0.1}]",
            [RuleConfig(name="math"), RuleConfig(name="format", weight=0.1)],
        ),
    ]:
        assert load_config("run.yaml", [override]).reward.rules == rules
        workspace.write(
            "run.yaml", "model: {path: m}\n" + override.replace("=", ": ", 1).replace("reward.", "reward: {", 1) + "}\n"
        )
        assert load_config("run.yaml").reward.rules == rules
    cfg = load_config("run.yaml", ["reward.sources={a: math, b: [code, {name: format}]}"])
    assert cfg.reward.sources == {
        "a": [RuleConfig(name="math")],
        "b": [RuleConfig(name="code"), RuleConfig(name="format")],
    }


def test_a_setting_of_a_group_keeps_its_other_defaults(workspace: Any) -> None:
    cfg = load_config("run.yaml", ["critic.optimizer.clip_grad=2"])
    assert (cfg.critic.optimizer.lr, cfg.critic.optimizer.clip_grad) == (1e-5, 2.0)
    assert Config({"model": "m", "critic.optimizer": {"clip_grad": 2.0}}).critic.optimizer.lr == 1e-5


def test_a_single_value_is_a_list_of_one(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for override, value in [
        ("data.train=a.jsonl", ["a.jsonl"]),
        ("data.train=1.10", ["1.10"]),
        ("data.eval=${oc.env:RLHF_MCORE_TEST_DIR}/a.jsonl", ["here/a.jsonl"]),
        ("data.eval=${data.train}", ["t.jsonl"]),
        ("data.weights=2", [2.0]),
        ("trainer.profile.steps=3", [3]),
        ("logging.trackers=wandb", ["wandb"]),
        ("actor.layout.layers_per_stage=4", [4]),
    ]:
        monkeypatch.setenv("RLHF_MCORE_TEST_DIR", "here")
        workspace.write("run.yaml", "model: {path: m}\ndata: {train: [t.jsonl]}\n")
        assert value_of(load_config("run.yaml", [override]), override.partition("=")[0]) == value


def test_text_fields_keep_what_was_written(workspace: Any) -> None:
    for text in ["off", "1.10", "1e3", "0123", "yes", "2024-01-01"]:
        workspace.write("run.yaml", f"model: {{path: m}}\nproject: {text}\n")
        cfg = load_config("run.yaml", [f"experiment={text}"])
        assert (cfg.project, cfg.experiment) == (text, text)


def test_later_wins_base_then_file_then_override(workspace: Any) -> None:
    workspace.write("base.yaml", "seed: 1\nproject: base\nexperiment: base\nmodel: {path: base}\n")
    workspace.write("sub/mine.yaml", "base: ../base.yaml\nproject: mine\nexperiment: mine\n")
    cfg = load_config("sub/mine.yaml", ["experiment=mine2", "experiment=last"])
    assert (cfg.seed, cfg.model.path, cfg.project, cfg.experiment) == (1, "base", "mine", "last")
    workspace.write("a.yaml", "seed: 1\nproject: a\n")
    workspace.write("b.yaml", "seed: 2\n")
    workspace.write("run.yaml", "base: [a.yaml, b.yaml]\nmodel: {path: m}\n")
    cfg = load_config("run.yaml")
    assert (cfg.seed, cfg.project) == (2, "a")


def test_of_steps_and_epochs_the_later_one_decides(workspace: Any) -> None:
    workspace.write("base.yaml", "model: {path: m}\ntrainer: {num_steps: 30, num_epochs: null}\n")
    workspace.write("run.yaml", "base: base.yaml\ntrainer: {num_epochs: 2}\n")
    assert load_config("base.yaml").trainer.num_epochs is None
    assert load_config("base.yaml", ["trainer.num_epochs=1"]).trainer.num_epochs == 1
    assert load_config("run.yaml").trainer.num_epochs == 2
    cfg = load_config("run.yaml", ["trainer.num_steps=7"])
    assert (cfg.trainer.num_epochs, cfg.trainer.num_steps) == (None, 7)


def test_steps_and_epochs_in_one_place_are_refused(workspace: Any) -> None:
    workspace.write("run.yaml", "model: {path: m}\ntrainer:\n  num_steps: 30\n  num_epochs: 2\n")
    assert problems() == [
        "run.yaml:3: trainer.num_steps=30 and trainer.num_epochs=2 both set the length of the run; remove one of them"
    ]
    workspace.write("run.yaml", "model: {path: m}\n")
    (problem,) = problems("trainer.num_epochs=0.5", "trainer.num_steps=3")
    assert problem.endswith(
        "trainer.num_steps=3 and trainer.num_epochs=0.5 both set the length of the run; remove one of them"
    )


def test_an_empty_group_is_no_mistake(workspace: Any) -> None:
    workspace.write("run.yaml", "model: {path: m}\nactor:\n  # layout: {tp: 2}\n")
    assert load_config("run.yaml").actor.layout.tp == 1


def test_the_nearest_known_key() -> None:
    for wrong, meant in [
        ("trainer.num_step", "trainer.num_steps"),
        ("actor.optimiser.lr", "actor.optimizer.lr"),
        ("rollout.sampling.temprature", "rollout.sampling.temperature"),
        ("actr", None),
        ("model.name", None),
        ("lr", "actor.optimizer.lr"),
        ("model.num_steps", "trainer.num_steps"),
        ("zzzzzz", None),
    ]:
        assert nearest(wrong) == meant
    assert nearest("actr", groups=True) == "actor"
    assert all(not is_group(near) for key in list(KEYS)[::8] if (near := nearest(f"{key}x")))


def test_an_unknown_key_names_file_line_and_nearest_key(workspace: Any) -> None:
    workspace.write("run.yaml", "model:\n  path: m\ntrainer:\n  num_stps: 3\n")
    assert problems() == ["run.yaml:4: unknown key trainer.num_stps; did you mean trainer.num_steps?"]
    workspace.write("run.yaml", "model: {path: m}\n")
    assert problems("trainer.num_stps=3") == [
        "override 'trainer.num_stps=3': unknown key trainer.num_stps; did you mean trainer.num_steps?"
    ]


def test_an_unknown_key_that_is_near_none_lists_those_of_its_group(workspace: Any) -> None:
    workspace.write("run.yaml", "model: {path: m}\n")
    assert problems("reference.wrongly=1", "zzz.zzz=1") == [
        "override 'reference.wrongly=1': unknown key reference.wrongly; the keys of reference are: "
        + ", ".join(ReferenceConfig.model_fields),
        "override 'zzz.zzz=1': unknown key zzz.zzz; the keys at the top are: " + ", ".join(Config.model_fields),
    ]


def test_a_wrong_type_names_field_value_and_expected(workspace: Any) -> None:
    for override, expected in [
        ("trainer.num_steps=forty", "trainer.num_steps='forty' is not valid; expected int"),
        ("trainer.num_steps=1.5", "trainer.num_steps=1.5 is not valid; expected int"),
        ("trainer.num_steps=true", "trainer.num_steps=True is not valid; expected int"),
        ("trainer.num_steps=null", "trainer.num_steps=None is not valid; expected int"),
        ("trainer.num_steps=", "trainer.num_steps=None is not valid; expected int"),
        ("trainer.minibatch_size=x", "trainer.minibatch_size='x' is not valid; expected int or null"),
        ("actor.optimizer.lr=[1]", "actor.optimizer.lr=[1] is not valid; expected float"),
        ("data.train={a: b}", "data.train[0]={'a': 'b'} is not valid; expected list of str"),
        ("deterministic=maybe", "deterministic='maybe' is not valid; expected bool"),
        (
            "reward.rules=[[x]]",
            "reward.rules[0]=['x'] is not valid; expected list of {" + ", ".join(RuleConfig.model_fields) + "}",
        ),
    ]:
        (problem,) = problems(override)
        assert problem.endswith(expected)


def test_a_missing_mandatory_value_is_named(workspace: Any) -> None:
    workspace.write("run.yaml", "seed: 1\n")
    assert problems() == ["model.path is not set; give it a value, as in model.path=..."]
    assert problems("model.path=m", "reward.rules=[{weight: 2}]") == [
        "reward.rules[0].name is not set; give it a value, as in reward.rules[0].name=..."
    ]


def test_interpolations_resolve(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models")
    cfg = load_config("run.yaml", ["model.path=${oc.env:MODELS}/qwen", "seed=5", "trainer.num_steps=${seed}"])
    assert (cfg.model.path, cfg.trainer.num_steps) == ("/models/qwen", 5)


def test_interpolations_that_are_refused(workspace: Any) -> None:
    for override, reason in [
        ("project=${no.such:1}", "does not resolve: Unsupported interpolation type no.such"),
        ("project=${nope}", "does not resolve: Interpolation key 'nope' not found"),
        ("project=${project}", "does not resolve: Recursive interpolation"),
        ("project=${unfinished", "does not resolve"),
        ("data.train=['${oc.env:SURELY_NOT_SET}']", "SURELY_NOT_SET"),
    ]:
        (problem,) = problems(override)
        assert reason in problem


def test_an_environment_value_of_the_wrong_type_is_not_printed(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    (problem,) = problems("seed=${oc.env:MY_TOKEN}")
    assert "hunter2" not in problem
    assert "seed='${oc.env:MY_TOKEN}' is not valid; expected int" in problem


def effective(cfg: Config) -> tuple[str, bool, str]:
    return cfg.algorithm.preset, cfg.algorithm.normalize_std, cfg.algorithm.loss_aggregation


def test_a_preset_fills_what_nobody_set(workspace: Any) -> None:
    assert effective(load_config("run.yaml")) == ("grpo", True, "sequence")
    assert effective(load_config("run.yaml", ["algorithm=dr_grpo"])) == ("dr_grpo", False, "constant")
    assert effective(load_config("run.yaml", ["algorithm.preset=dr_grpo"])) == ("dr_grpo", False, "constant")


def test_what_a_user_set_anywhere_wins_over_a_preset(workspace: Any) -> None:
    workspace.write("base.yaml", "algorithm: {normalize_std: true}\n")
    workspace.write("run.yaml", "base: base.yaml\nmodel: m\nalgorithm: dr_grpo\n")
    assert effective(load_config("run.yaml")) == ("dr_grpo", True, "constant")
    overridden = load_config("run.yaml", ["algorithm.loss_aggregation=token"])
    assert effective(overridden) == ("dr_grpo", True, "token")


def test_an_unknown_preset_lists_the_presets(workspace: Any) -> None:
    assert problems("algorithm=dr_gpo") == [
        "algorithm.preset='dr_gpo' is not a choice; did you mean 'dr_grpo'? There are: " + ", ".join(PRESETS)
    ]


def test_the_schema_defaults_are_those_of_the_default_preset() -> None:
    default = Config().algorithm
    for name, value in PRESETS[default.preset].items():
        assert getattr(default, name) == value, name


def test_settings_alone_are_a_configuration(workspace: Any) -> None:
    """All else has its default. A file whose name has such a sign in it is still a file."""
    cfg = load_config("model.path=here", ["seed=11"])
    assert (cfg.model.path, cfg.seed, cfg.rollout.sampling.n) == ("here", 11, Config().rollout.sampling.n)
    (workspace.root / "seed=3.yaml").write_text("model: {path: there}\nseed: 3\n")
    assert load_config("seed=3.yaml").seed == 3
    with expect_error(ConfigError, field="model.pth", remedy="model.path"):
        load_config("model.pth=here")


def test_mistakes_in_a_file_are_named(workspace: Any) -> None:
    for text, reason in [
        ("? [a, b]\n: 1", "a key must be a name"),
        ('project: "\\ud800"', "not valid YAML"),
        ("project: a\x07b", "not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
        ("data: {weights: [2001-99-99]}", "not a plain value"),
        ("seed: !!int x", "not a plain value"),
        ("seed: {a: 1}", "seed"),
        ("actor: [1]", "actor is a group"),
        ("hello", "expected keys and values at the top"),
        ("base: {a: 1}", "base={'a': 1} must be a file"),
        ("base: [1, 2]", "must be a file"),
        ("base: gone.yaml", "no such file"),
        ("base: .", "a directory, not a regular file"),
        ("project: ${experiment}\nexperiment: ${project}", "does not resolve"),
        ("data: {train: [[a.jsonl]]}", "run.yaml:1: data.train[0]=['a.jsonl'] is not valid; expected list of str"),
        ("model: [1\nseed: 2\n", "run.yaml:2: not valid YAML"),
        ("seed: !!python/object:os.system 1\n", "run.yaml:1: "),
        ("\x00", "run.yaml"),
        ("- 1\n", "run.yaml: expected keys and values"),
        ("seed: 1\nmodel: {path: m}\nseed: 2\n", "run.yaml:3: key 'seed' appears twice (also at run.yaml:1); keep one"),
    ]:
        workspace.write("run.yaml", text)
        assert reason in "".join(problems("model.path=m")), text


def test_an_alias_is_read(workspace: Any) -> None:
    workspace.write("run.yaml", "data: {train: &files [a.jsonl, b.jsonl], eval: *files}\nmodel: {path: m}\n")
    assert load_config("run.yaml").data.eval == ["a.jsonl", "b.jsonl"]


def test_values_may_refer_to_values_that_refer_to_others(workspace: Any) -> None:
    workspace.write("run.yaml", "project: p-${experiment}\nexperiment: e-${seed}-${.seed}\nseed: 7\nmodel: {path: m}\n")
    assert load_config("run.yaml").project == "p-e-7-7"
