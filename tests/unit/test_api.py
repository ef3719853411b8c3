"""Mistakes that the Python API finds before anything starts; its runs are in tests/e2e/test_python_api.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlhf_mcore as rm
from rlhf_mcore.api.inputs import run_config
from rlhf_mcore.config.schema import Config
from tests.messages import expect_error


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        ("What is 2+2?", r"prompts='What is 2\+2\?' is one prompt; give a list"),
        ({"prompt": "2+2="}, r"is one prompt; give a list"),
        (["2+2=", 7], r"prompts: 7 is not a prompt; give a list of texts, or of dicts"),
    ],
)
def test_what_are_no_prompts_is_refused(prompts: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(rm.ConfigError, match=problem):
        rm.Trainer(rm.Config(model="m", output_dir=str(tmp_path)), prompts=prompts)
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_cannot_be_written_name_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(rm.ConfigError, match=r"output_dir: .*/file/.*: Not a directory; choose another output_dir"):
        rm.train(rm.Config(model="m", output_dir=str(tmp_path / "file")), prompts=["2+2="])


def test_an_id_of_the_hub_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "cache" / "models--Org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["NoneOfOurs"]}')
    (snapshot / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cfg = Config(output_dir=str(tmp_path))
    cfg.model.path = "Org/tiny"
    with expect_error(rm.ConfigError, field="model.path", value=(snapshot, "NoneOfOurs")):
        rm.Trainer(cfg, prompts=["2+2="])
    assert cfg.model.path == "Org/tiny"


class Grader:
    def __call__(self, **_: Any) -> float:
        return 0.0


class Told(rm.Callback):
    pass


def reward(solution_str: str, **_: Any) -> float:
    return float(len(solution_str))


CFG = rm.Config(model="nowhere")
NO_PATHS: list[Any] = [None, 3, b"x", ["a"], "", "a\0b"]
NO_CONFIGS: list[Any] = [None, 3, "run.yaml", {"trainer": {}}, Config]
NO_ROWS: list[Any] = [3, b"2+2=", "2+2=", {}, {"prompt": "x"}, [], [3], [b"x"], [{3: "x"}]]
NO_REWARDS: list[Any] = [3, Grader, lambda: 0.0, lambda a, b: 0.0, {"functoin": "x"}, {"rules": 3}, "maht"]
NO_ROLLOUTS: list[Any] = [3, Grader, lambda: 0.0, reward, "maht"]
NO_CALLBACKS: list[Any] = [print, 3, [Told], [lambda: None], [object()]]
NO_FLAGS: list[Any] = [None, 1, "yes"]
NO_COUNTS: list[Any] = [0, 1.5, "2", True]
NO_TEXTS: list[Any] = [3, ["H100"], b"H100", "H1000"]
NO_SETTINGS: list[Any] = [
    3,
    "x",
    [("seed", 1)],
    True,
    {3: 1},
    {"seed": "x"},
    {"seeed": 1},
    {"trainer": 3},
    {"trainer": {"num_stepz": 1}},
]


def calls() -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """(argument, a wrong value, the call)."""
    table: list[tuple[str, list[Any], Callable[[Any], Any]]] = [
        ("path", NO_PATHS, lambda value: rm.load_config(value)),
        (
            "overrides",
            [3, "a=b", b"x", {"seed": 1}, [3], [None], None, True],
            lambda value: rm.load_config("x.yaml", value),
        ),
        ("without_model", NO_FLAGS, lambda value: rm.load_config("x.yaml", without_model=value)),
        ("", NO_SETTINGS, lambda value: rm.Config(value)),
        ("algorithm", [3, True, ["grpo"], "grppo", None], lambda value: rm.Config(algorithm=value)),
        ("cfg", NO_CONFIGS[1:], lambda value: rm.train(value)),
        ("cfg", NO_CONFIGS[1:], lambda value: rm.Trainer(value)),
        ("cfg", NO_CONFIGS, lambda value: rm.evaluate(value)),
        ("cfg", NO_CONFIGS, lambda value: rm.plan(value)),
        ("model", [3, True, ["x"], b"x", object()], lambda value: rm.train(model=value)),
        ("algorithm", [3, True, ["grpo"], "grppo"], lambda value: rm.train(model="m", algorithm=value)),
        ("trainer.num_steps", ["two", 1.5, True, [2]], lambda value: rm.train(model="m", num_steps=value)),
        ("prompts", NO_ROWS, lambda value: rm.train(CFG, prompts=value)),
        ("eval_prompts", NO_ROWS, lambda value: rm.Trainer(CFG, eval_prompts=value)),
        ("reward", NO_REWARDS, lambda value: rm.train(CFG, reward=value)),
        ("reward", NO_REWARDS, lambda value: rm.evaluate(CFG, reward=value)),
        ("rollout", NO_ROLLOUTS, lambda value: rm.train(CFG, rollout=value)),
        ("rollout", NO_ROLLOUTS[:-1], lambda value: rm.evaluate(CFG, rollout=value)),
        ("callbacks", NO_CALLBACKS, lambda value: rm.train(CFG, callbacks=value)),
        ("prompts", NO_ROWS, lambda value: rm.evaluate(CFG, prompts=value)),
        ("checkpoint", NO_PATHS[1:], lambda value: rm.evaluate(CFG, value)),
        ("compare", NO_PATHS[1:], lambda value: rm.evaluate(CFG, "x", value)),
        ("source", NO_PATHS, lambda value: rm.convert(value, "x")),
        ("destination", NO_PATHS, lambda value: rm.convert("x", value)),
        ("source_format", NO_TEXTS, lambda value: rm.convert("x", "y", source_format=value)),
        ("target_format", [*NO_TEXTS, None], lambda value: rm.convert("x", "y", target_format=value)),
        ("role", NO_TEXTS, lambda value: rm.convert("x", "y", role=value)),
        ("dtype", NO_TEXTS, lambda value: rm.convert("x", "y", dtype=value)),
        ("hf_config", NO_PATHS[1:], lambda value: rm.convert("x", "y", hf_config=value)),
        ("average", [3, "x", b"x", True, [3], [None], {"a": 1}], lambda value: rm.convert("x", "y", average=value)),
        ("shard_size", [3, True, None, [1], "4 lots", ""], lambda value: rm.convert("x", "y", shard_size=value)),
        ("verify", NO_FLAGS, lambda value: rm.convert("x", "y", verify=value)),
        ("overwrite", NO_FLAGS, lambda value: rm.convert("x", "y", overwrite=value)),
        ("world_size", NO_COUNTS, lambda value: rm.plan(CFG, world_size=value)),
        ("gpu", [*NO_TEXTS, None], lambda value: rm.plan(CFG, gpu=value)),
    ]
    return [(name, value, call) for name, values, call in table for value in values]


def test_a_wrong_argument_is_one_message_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value, call in calls():
        with pytest.raises(rm.ConfigError) as refused:
            call(value)
        message = str(refused.value)
        assert name.replace("shard_size", "shard") in message.replace("-", "_") and len(message) < 1500, (name, value)
        assert any(words in message for words in (";", "there are: ", "did you mean", "let it take")), (name, value)
        assert list(tmp_path.iterdir()) == []


def test_a_configuration_of_a_dict_is_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "algorithm: dr_grpo\nmodel: {path: m}\nactor: {optimizer: {lr: 1e-6}, megatron: {bucket_size: 3}}\n"
        "reward: {rules: [{name: math}]}\n"
    )
    by_file = rm.load_config(tmp_path / "run.yaml", ["trainer.num_steps=5", "algorithm.clip_high=0.3"])
    by_dict = rm.Config(
        {
            "algorithm": "dr_grpo",
            "actor": {"optimizer.lr": 1e-6},
            "actor.megatron.bucket_size": 3,
            "reward": {"rules": ["math"]},
        },
        model=Path("m"),
        trainer={"num_steps": np.int64(5)},
        **{"algorithm.clip_high": 0.3},
    )
    assert by_file == by_dict and isinstance(by_file, rm.Config) and isinstance(by_dict, Config)
    assert by_dict.algorithm.loss_aggregation == "constant"
    assert by_dict.model_copy(update={"seed": 4}).seed == 4 and rm.Config(by_dict.model_dump()) == by_dict
    assert repr(rm.Config(model="m", seed=3)) == "Config(seed=3, model.path='m')"


def test_all_mistakes_of_a_dict_are_told_at_once() -> None:
    with pytest.raises(rm.ConfigError) as refused:
        rm.Config({"seed": "x", "trainer": {"num_stepz": 3, "num_steps": 1.5}, 7: 8})
    problems = sorted(refused.value.problems)
    assert problems[0] == "seed='x' is not valid; expected int"
    assert problems[1] == "trainer.num_steps=1.5 is not valid; expected int"
    assert problems[2].startswith("unknown key 7; the keys at the top are: ")
    assert problems[3] == "unknown key trainer.num_stepz; did you mean trainer.num_steps?"


def test_the_package_lists_what_it_offers() -> None:
    assert set(rm.__all__) <= set(dir(rm)) and {"train", "Config", "load_config"} <= set(rm.__all__)


def test_a_notebook_shows_a_mistake_in_two_lines() -> None:
    try:
        rm.Config(seed="x")
    except rm.ConfigError as error:
        place, message = error._render_traceback_()
    assert place.endswith('rm.Config(seed="x")') and place.startswith("line ")
    assert message == "ConfigError: seed='x' is not valid; expected int"


def test_a_result_is_a_table_whose_texts_are_escaped() -> None:
    rows = [{"step": step, "reward/mean": step / 4} for step in (1, 2, 3)]
    shown = rm.Trained(True, Path("outputs/<b>"), Path("model"), rows)._repr_html_()
    assert "&lt;b&gt;" in shown and "<b>" not in shown and "0.25 &rarr; 0.75" in shown and "<polyline" in shown
    results = {"accuracy": {"value": 0.5, "low": 0.25, "high": 0.75}, "num_prompts": 6}
    comparison = {"accuracy": {"difference": {"value": 0.125, "low": 0.0, "high": 0.25}}}
    shown = rm.Evaluation(results, [], comparison, Path("x"))._repr_html_()
    assert "0.5 (0.25 to 0.75)" in shown and "accuracy, difference" in shown and "0.125 (0 to 0.25)" in shown


def test_a_dict_as_rollout_sets_keys_of_the_group() -> None:
    cfg = run_config(None, {"model": "m"}, rollout={"sampling": {"n": 3}})
    assert cfg.rollout.sampling.n == 3 and cfg.rollout.function is None
