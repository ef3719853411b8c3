"""Fingerprints of a run's inputs detect every kind of change, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig, Config, RuleConfig
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.trainer import inputs as module
from rlhf_mcore.trainer.inputs import fingerprints
from rlhf_mcore.trainer.resume import changed_inputs, find_start, keys_of
from tests.messages import expect_error
from tests.unit.trainer.test_resume import save

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "checkpoint_v1"
CODE = "import helper\nfrom .beside import tool\n\n\ndef score(*arguments):\n    return helper.VALUE\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one of everything."""
    for name in ("model", "critic", "reference", "rm"):
        shutil.copytree(SAMPLE / "model", tmp_path / name)
    for name in ("train.jsonl", "more.jsonl", "eval.jsonl"):
        shutil.copy(SAMPLE / "train.jsonl", tmp_path / name)
    for name in ("reward.py", "loss.py", "estimator.py", "world.py", "tool.py"):
        (tmp_path / name).write_text(CODE)
    (tmp_path / "corpus.txt").write_text("one\ntwo\n")
    (tmp_path / "tools.json").write_text("[]")
    (tmp_path / "helper.py").write_text("from package import part\nVALUE = 1\n")
    (tmp_path / "beside.py").write_text("tool = 1\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "part.py").write_text("")
    (tmp_path / "unrelated.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config() -> Config:
    cfg = Config()
    cfg.data.train, cfg.data.eval = ["train.jsonl", "more.jsonl"], ["eval.jsonl"]
    cfg.model.path, cfg.critic.path, cfg.reference.path, cfg.reward.model.path = "model", "critic", "reference", "rm"
    cfg.reward.function = "reward.py:score"
    cfg.algorithm.policy_loss, cfg.algorithm.advantage = "loss.py:score", "estimator.py:score"
    cfg.environment.function, cfg.environment.tools = "world.py:World", "tools.json"
    cfg.environment.options = {"tools": ["calculator", "tool.py:score"], "corpus": "corpus.txt"}
    return cfg


def edit_json(name: str, **values: object) -> Callable[[], object]:
    def edit() -> None:
        content = json.loads(Path(name).read_text())
        Path(name).write_text(json.dumps(content | values))

    return edit


def append(name: str, text: str = "\n") -> Callable[[], object]:
    return lambda: Path(name).write_text(Path(name).read_text() + text)


def reorder_rows() -> None:
    lines = Path("train.jsonl").read_text().splitlines(keepends=True)
    Path("train.jsonl").write_text("".join([*lines[1:], lines[0]]))


def another_answer() -> None:
    text = Path("more.jsonl").read_text()
    Path("more.jsonl").write_text(text.replace('"answer": "1', '"answer": "2', 1))


def permuted_tokenizer() -> None:
    content = json.loads(Path("model/tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    Path("model/tokenizer.json").write_text(json.dumps(content))


def other_weights(directory: str, name: str = "model.norm.weight") -> Callable[[], object]:
    def edit() -> None:
        file = Path(directory, "model.safetensors")
        tensors = load_file(file)
        tensors[name] = tensors[name] + np.float32(1e-3)
        save_file(tensors, file, metadata={"format": "pt"})

    return edit


def renamed_tensor() -> None:
    """Rename tensors, and keep their bytes."""
    file = Path("model/model.safetensors")
    data = file.read_bytes()
    file.write_bytes(
        data.replace(b"layers.0.mlp.up", b"layers.X.mlp.up").replace(b"layers.0.mlp.gate", b"layers.0.mlp.up--")
    )


ROPE = {"rope_type": "default", "rope_theta": 20000.0}
CODE_KEYS = [
    "algorithm.advantage",
    "algorithm.policy_loss",
    "environment.function",
    "environment.options.tools[1]",
    "reward.function",
]
CHANGES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "rows reordered": (reorder_rows, ["data.train[0]"]),
    "answers changed": (another_answer, ["data.train[1]"]),
    "held-out data": (append("eval.jsonl"), ["data.eval[0]"]),
    "reward edited": (append("reward.py"), ["reward.function"]),
    "a module that the reward imports": (
        append("helper.py"),
        CODE_KEYS,
    ),
    "a module that this one imports": (
        append("package/part.py"),
        CODE_KEYS,
    ),
    "loss edited": (append("loss.py"), ["algorithm.policy_loss"]),
    "environment edited": (append("world.py"), ["environment.function"]),
    "a tool edited": (append("tool.py"), ["environment.options.tools[1]"]),
    "another corpus": (append("corpus.txt"), ["environment.options.corpus"]),
    "schemas of tools": (append("tools.json"), ["environment.tools"]),
    "estimator edited": (append("estimator.py"), ["algorithm.advantage"]),
    "tokenizer permuted": (permuted_tokenizer, ["tokenizer"]),
    "end of a response": (
        edit_json("model/generation_config.json", eos_token_id=4),
        ["model.path (generation_config.json)"],
    ),
    "chat template edited": (append("model/chat_template.jinja"), ["chat template"]),
    "chat template removed": (lambda: Path("model/chat_template.jinja").unlink(), ["chat template"]),
    "chat template in the config": (
        edit_json("model/tokenizer_config.json", chat_template="{{ 1 }}"),
        ["chat template"],
    ),
    "base model replaced": (other_weights("model"), ["model.path (weights)"]),
    "tensors renamed": (renamed_tensor, ["model.path (weights)"]),
    "another rope": (edit_json("model/config.json", rope_parameters=ROPE), ["model.path (config.json)"]),
    "another norm epsilon": (edit_json("model/config.json", rms_norm_eps=1e-5), ["model.path (config.json)"]),
    "critic replaced": (other_weights("critic"), ["critic.path (weights)"]),
    "reference replaced": (other_weights("reference"), ["reference.path (weights)"]),
    "reward model replaced": (other_weights("rm"), ["reward.model.path (weights)"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_change_is_refused_or_said_by_name(place: Path, change: str) -> None:
    edit, names = CHANGES[change]
    cfg, run = config(), place / "run"
    before = fingerprints(cfg)
    save(run, 3, cfg, inputs=before)
    edit()
    now = fingerprints(cfg)
    assert sorted(line.partition(" has another content")[0] for line in changed_inputs(before, now)) == names
    with pytest.raises(ConfigError) as refused:
        find_start(run, CheckpointConfig(), to_yaml(cfg), now)
    for name in names:
        assert f"{name} has another content than when the checkpoint was written" in str(refused.value)
    assert "restore it, start a new experiment, or set checkpoint.changed_inputs=warn" in str(refused.value)
    start = find_start(run, CheckpointConfig(changed_inputs="warn"), to_yaml(cfg), now)
    assert start.step == 3 and start.inputs == now
    warned = [n.partition(" has")[0] for n in start.notes if n.startswith("warning: ") and "content" in n]
    assert sorted(warned) == [f"warning: {name}" for name in names]


def test_another_path_to_the_same_content_is_the_same(place: Path) -> None:
    cfg = config()
    before = fingerprints(cfg)
    save(place / "run", 3, cfg, inputs=before)
    moved = place / "moved"
    moved.mkdir()
    for name in (
        "model",
        "critic",
        "train.jsonl",
        "more.jsonl",
        "reward.py",
        "loss.py",
        "helper.py",
        "beside.py",
        "package",
    ):
        (place / name).rename(moved / name)
    cfg.model.path, cfg.critic.path = "moved/model", "moved/critic"
    cfg.data.train = ["moved/train.jsonl", str(moved / "more.jsonl")]
    cfg.reward.function, cfg.algorithm.policy_loss = "moved/reward.py:score", "moved/loss.py:score"
    shutil.copytree(moved / "package", place / "package")
    for name in ("helper.py", "beside.py"):
        shutil.copy(moved / name, place / name)
    now = fingerprints(cfg)
    assert changed_inputs(before, now) == []
    notes = find_start(place / "run", CheckpointConfig(), to_yaml(cfg), now).notes
    assert "changed since: model.path was 'model' and is 'moved/model'" in notes


def test_what_has_no_bearing_is_no_change(place: Path) -> None:
    before = fingerprints(config())
    (place / "unrelated.py").write_text("x = 1\n")
    (place / "model" / "README.md").write_text("mine")
    edit_json("model/config.json", transformers_version="9", dtype="bfloat16")()
    config_file = place / "model" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()), indent=7, sort_keys=True))
    assert changed_inputs(before, fingerprints(config())) == []


def test_another_function_of_the_same_file_is_a_change(place: Path) -> None:
    before, cfg = fingerprints(config()), config()
    cfg.reward.function = "reward.py:helper"
    (line,) = changed_inputs(before, fingerprints(cfg))
    assert (
        line.startswith("reward.function has another content") and "reward.py:score then, reward.py:helper now" in line
    )


def test_the_files_that_are_trained_on_are_compared_in_their_number(place: Path) -> None:
    cfg = config()
    before = fingerprints(cfg)
    cfg.data.train, cfg.data.eval, cfg.reference.path = ["train.jsonl"], [], None
    assert changed_inputs(before, fingerprints(cfg)) == ["data.train[1] was more.jsonl and is not there"]
    assert keys_of(before) >= {"data.train", "model.path", "reward.function", "algorithm.advantage"}


def test_large_files_of_weights_are_sampled(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    before = fingerprints(config())
    assert before == fingerprints(config())
    for edit in (renamed_tensor, other_weights("model", "lm_head.weight")):
        edit()
        now = fingerprints(config())
        assert [line.partition(" has")[0] for line in changed_inputs(before, now)] == ["model.path (weights)"]
        before = now


@pytest.mark.parametrize("name", ["model/chat_template.jinja", "model/tokenizer.json", "reward.py"])
def test_a_small_file_that_is_large_is_refused_before_it_is_read(place: Path, name: str) -> None:
    os.truncate(name, 2**40)
    with pytest.raises(ConfigError, match=rf"{Path(name).name}: 1,099,511,627,776 bytes, but at most"):
        fingerprints(config())


def test_a_checkpoint_without_fingerprints_is_resumed_and_that_is_said(place: Path) -> None:
    cfg = config()
    save(place / "run", 3, cfg)
    notes = find_start(place / "run", CheckpointConfig(), to_yaml(cfg), fingerprints(cfg)).notes
    assert "checkpoint-3 holds no fingerprints of data, code and models: the release that wrote it kept none" in notes
    cfg.data.train = ["more.jsonl", "train.jsonl"]  # then the paths are all that is known
    with expect_error(ConfigError, field="data.train", remedy="restore"):
        find_start(place / "run", CheckpointConfig(), to_yaml(cfg), fingerprints(cfg))


def seven(solution_str: str) -> float:
    return float("7" in solution_str)


REWARDS: dict[str, Callable[[Config], object]] = {
    "a function in the place of the rules": lambda cfg: setattr(cfg.reward, "function", OwnFunction(seven)),
    "another rule": lambda cfg: setattr(cfg.reward, "rules", ["math"]),
    "another weight": lambda cfg: setattr(cfg.reward.rules[0], "weight", 0.5),
    "a further rule": lambda cfg: cfg.reward.rules.append(RuleConfig(name="format")),
    "another penalty": lambda cfg: setattr(cfg.reward.rules[0], "incorrect", -1.0),
    "rules by source": lambda cfg: setattr(cfg.reward, "sources", {}),
    "a judge": lambda cfg: setattr(cfg.reward.judge, "url", "http://127.0.0.1:1/v1"),
    "a server": lambda cfg: setattr(cfg.reward.remote, "url", "http://127.0.0.1:1"),
}


@pytest.mark.parametrize("change", REWARDS)
def test_another_reward_is_refused_as_other_data_are(place: Path, change: str) -> None:
    cfg = config()
    cfg.reward.function = cfg.environment.function = None
    before = fingerprints(cfg)
    save(place / "run", 100, cfg, inputs=before)
    REWARDS[change](cfg)
    now = fingerprints(cfg)
    with expect_error(
        ConfigError,
        field=("reward", "reward.rules"),
        value="[final_number]",
        remedy=("restore", "checkpoint.changed_inputs=warn"),
    ):
        find_start(place / "run", CheckpointConfig(), to_yaml(cfg), now)
    assert find_start(place / "run", CheckpointConfig(changed_inputs="warn"), to_yaml(cfg), now).step == 100


def test_how_a_reward_is_asked_is_no_other_reward(place: Path) -> None:
    cfg = config()
    cfg.environment.function, cfg.reward.judge.url = None, "http://10.0.0.1:1/v1"
    before = fingerprints(cfg)
    cfg.reward.judge.url, cfg.reward.judge.timeout_s, cfg.reward.timeout_s = "http://10.0.0.2:1/v1", 5.0, 5.0
    cfg.reward.workers, cfg.reward.rules[0].weight = 3, 0.5  # rules that a function replaces
    assert changed_inputs(before, fingerprints(cfg)) == []


def test_a_reward_from_python_is_compared_with_the_rules_of_an_older_release(place: Path) -> None:
    cfg = config()
    cfg.reward.function = cfg.environment.function = None
    before = {name: entry for name, entry in fingerprints(cfg).items() if name != "reward"}
    cfg.reward.function = OwnFunction(seven)
    assert changed_inputs(before, fingerprints(cfg)) == ["reward.function was not there and is python:seven"]
