from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_mcore.checkpoint import rng
from rlhf_mcore.checkpoint.layout import RNG_FILE
from rlhf_mcore.config.errors import ConfigError
from tests.messages import expect_error


def draw() -> list[float]:
    """Sample from every generator. Gaussian samplers keep the second number of each pair."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.randn(1)),
    ]


@pytest.mark.usefixtures("world")
def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    draw()  # the second number of each pair is now kept
    states = rng.gather_states(rng.capture())
    assert states is not None
    (tmp_path / "rng.safetensors").write_bytes(rng.encode(states))
    expected = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert draw() != expected[0]
    found = rng.read_states(tmp_path, rank=0, world_size=1)
    assert found is not None
    rng.restore(found)
    assert [draw(), draw()] == expected


@pytest.mark.usefixtures("world")
def test_further_generators_are_kept_beside(tmp_path: Path) -> None:
    states = rng.gather_states({**rng.capture(), "tracker/model": torch.arange(5, dtype=torch.uint8)})
    assert states is not None and "rank-0/tracker/model" in states
    (tmp_path / RNG_FILE).write_bytes(rng.encode(states))
    found = rng.read_states(tmp_path, 0, 1)
    assert found is not None and found["tracker/model"].tolist() == [0, 1, 2, 3, 4]


def test_ranks_start_at_different_places_of_the_same_seed() -> None:
    found = []
    for seed, rank in ((3, 0), (3, 0), (3, 1), (4, 0)):
        rng.seed_process(seed, rank)
        found.append(draw())
    assert found[0] == found[1]
    assert all(len({values[k] for values in found}) == 3 for k in range(len(found[0])))


def test_each_rank_gets_its_own_and_another_number_of_ranks_none(tmp_path: Path) -> None:
    mine = rng.capture()
    states = {f"rank-{r}/{name}": state.clone() for r in range(12) for name, state in mine.items()}
    states["rank-1/numpy.gauss"] = torch.tensor([0.5], dtype=torch.float64)
    (tmp_path / RNG_FILE).write_bytes(rng.encode(states))
    found = rng.read_states(tmp_path, rank=1, world_size=12)
    assert found is not None and found["numpy.gauss"].tolist() == [0.5]
    assert rng.read_states(tmp_path, rank=1, world_size=4) is None
    assert rng.read_states(tmp_path, rank=1, world_size=16) is None


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with expect_error(ConfigError, field="rng.safetensors"):
        rng.read_states(tmp_path, 0, 1)
    (tmp_path / RNG_FILE).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        rng.read_states(tmp_path, 0, 1)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("python.gauss", None),
        ("python.words", torch.zeros(3, dtype=torch.int64)),
        ("python.words", torch.full((625,), -1)),
        ("numpy.place", torch.zeros(1, dtype=torch.int64)),
        ("numpy.keys", torch.zeros(7, dtype=torch.int64)),
        ("torch.cpu", torch.zeros(4, dtype=torch.uint8)),
    ],
)
def test_a_state_that_no_generator_can_have_is_named(tmp_path: Path, name: str, state: torch.Tensor | None) -> None:
    states = {f"rank-0/{own}": tensor for own, tensor in rng.capture().items() if own != name}
    if state is not None:
        states[f"rank-0/{name}"] = state
    (tmp_path / RNG_FILE).write_bytes(rng.encode(states))
    with expect_error(ConfigError, field="rng.safetensors", value="rank-0"):
        rng.read_states(tmp_path, 0, 1)
