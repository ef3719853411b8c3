"""Find the weights of a checkpoint for ``rlhf-mcore evaluate``. tests/e2e/test_evaluate_command.py runs engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rlhf_mcore.commands.evaluate.checkpoints import EvaluatedModel
from rlhf_mcore.commands.evaluate.evaluation import _settings, _Task, checked_folder
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config, ModelConfig, RewardConfig, RuleConfig
from rlhf_mcore.readers.model_files import inspect_generator
from rlhf_mcore_contrib.deltas.write import choose_base
from tests.unit.checkpoint.test_delta import save, update, weights


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with a full checkpoint 10 and a delta 20."""
    run = tmp_path / "run"
    save(run, 10, weights())
    save(run, 20, update(weights()), choose_base(run, 10))
    return run


def test_a_full_checkpoint_is_read_where_it_is(run: Path) -> None:
    assert checked_folder(run / "checkpoint-10" / "actor", hashes=True) == str(run / "checkpoint-10" / "actor")


def test_a_delta_is_made_whole(run: Path) -> None:
    folder = run / "checkpoint-20" / "actor"
    assert not list(folder.glob("*.safetensors"))
    assert inspect_generator(str(folder), "evaluate.checkpoint")[1] == []
    found = load_file(Path(checked_folder(folder, hashes=True)) / "model-0.safetensors")
    expected = update(weights())
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in expected.items()
    }


def test_a_damaged_checkpoint_is_refused_with_the_file(run: Path) -> None:
    file = run / "checkpoint-10" / "actor" / "model-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for step in (10, 20):  # the delta needs it as its base
        with pytest.raises(ConfigError, match=rf"checkpoint-{step} is damaged .*model-0\.safetensors"):
            checked_folder(run / f"checkpoint-{step}" / "actor", hashes=True)


def test_a_directory_that_is_no_checkpoint_is_not_looked_into(tmp_path: Path) -> None:
    assert checked_folder(tmp_path / "model", hashes=True) == str(tmp_path / "model")


@pytest.mark.parametrize(("model", "name"), [("run/checkpoint-10/actor", "checkpoint-10"), ("models/Qwen3", "Qwen3")])
def test_results_are_called_after_the_checkpoint(tmp_path: Path, model: str, name: str) -> None:
    assert EvaluatedModel("hf", str(tmp_path / model), "").subject.name == name


def test_how_rewards_are_computed_starts_no_evaluation_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_mcore.commands.evaluate.evaluation.weight_sketches", lambda *given: {})

    def settings(**reward: object) -> dict[str, object]:
        cfg = resolve(Config(model=ModelConfig(path=str(tmp_path)), reward=RewardConfig(**reward)))  # type: ignore[arg-type]
        return _settings(_Task(cfg, "model", tmp_path, EvaluatedModel("hf", "", ""), []), "fp32")

    how = settings(workers=3, timeout_s=5.0, memory_gib=1.0, env=["HOME"], on_error="zero")
    assert how == settings() != settings(rules=[RuleConfig(name="boxed")])
