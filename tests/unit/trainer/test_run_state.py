from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.checkpoint import rng
from rlhf_mcore.checkpoint.layout import RNG_FILE
from rlhf_mcore.checkpoint.registry import Registry
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.trainer.run_state import DATALOADER, TRAINER_STATE, RunState, read_step, restore_state

RECENT = [{"step": 5, "time": 1.7e9, "loss": 0.5, "reward": None}]
pytestmark = pytest.mark.usefixtures("world")


class Number:
    def __init__(self, value: float):
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class Generators:
    """Replaces Megatron's generators."""

    def __init__(self) -> None:
        self.state = torch.tensor([1, 2], dtype=torch.uint8)

    def get(self) -> dict[str, Tensor]:
        return {"mine": self.state}

    def set(self, states: Mapping[str, Tensor]) -> None:
        self.state = states["mine"]


def make(value: float, drawn: int, generators: Generators) -> tuple[RunState, Number, PromptSampler]:
    number, sampler = Number(value), PromptSampler(10, 4, seed=3, shuffle=True)
    for _ in range(drawn):
        sampler.next_batch()
    registry, data = Registry(), Registry()
    registry.register("number", number)
    data.register("sampler", sampler)
    return RunState(registry, data, "seed: 3\n", lambda: RECENT, generators.get, generators.set), number, sampler


def save(directory: Path, state: RunState, step: int = 5) -> None:
    for name, content in state.small_files(step).items():
        (directory / name).write_bytes(content)


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    state, _, sampler = make(0.1 + 0.2, 4, Generators())
    save(tmp_path, state)
    expected = [sampler.next_batch() for _ in range(4)], random.random()
    generators = Generators()
    generators.state = torch.zeros(2, dtype=torch.uint8)
    resumed, number, sampler = make(0.0, 0, generators)
    assert restore_state(resumed, tmp_path) == []
    assert number.value == 0.1 + 0.2
    assert ([sampler.next_batch() for _ in range(4)], random.random()) == expected
    assert generators.state.tolist() == [1, 2]
    assert read_step(tmp_path) == 5
    assert json.loads((tmp_path / TRAINER_STATE).read_text())["recent"] == RECENT
    assert (tmp_path / "config.yaml").read_text() == "seed: 3\n"
    assert json.loads((tmp_path / DATALOADER).read_text())["state"]["sampler"]["num_drawn"] == 16


def test_another_number_of_ranks_is_said(tmp_path: Path) -> None:
    state, _, _ = make(1.0, 0, Generators())
    save(tmp_path, state)
    two = {f"rank-{rank}/{name}": state for rank in range(2) for name, state in rng.capture().items()}
    (tmp_path / RNG_FILE).write_bytes(rng.encode(two))
    (note,) = restore_state(make(0.0, 0, Generators())[0], tmp_path)
    assert "random generators begin anew" in note


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "not a JSON object"),
        (
            '{"format": 9, "step": 1, "world_size": 1, "state": {}}',
            "format version 9, but this release reads versions 1 to 2",
        ),
        ('{"format": 1, "step": "1", "world_size": 1, "state": {}}', "has step='1', not an integer"),
        ('{"format": 1, "step": 1, "world_size": 1}', "has no state, which is an object"),
        (
            '{"format": 1, "step": 1, "world_size": 1, "state": {"number": NaN}}',
            r"state\.number is nan, not a finite number",
        ),
        ('{"format": 1, "step": 1, "world_size": 1, "state": {}}', r"does not hold the state of \['number'\]"),
    ],
)
def test_a_damaged_state_is_refused(tmp_path: Path, content: str, message: str) -> None:
    state, _, _ = make(1.0, 0, Generators())
    save(tmp_path, state)
    (tmp_path / TRAINER_STATE).write_text(content)
    with pytest.raises(ConfigError, match=message):
        restore_state(state, tmp_path)
