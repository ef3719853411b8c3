"""What the values of a file are, found while its bytes are read for their hash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhf_mcore.bridge.files.file_values import FileValues, ValueReader
from rlhf_mcore.bridge.files.state_files import region_key
from rlhf_mcore.bridge.map.rectangles import Rectangle
from rlhf_mcore.checkpoint.manifest import hash_content, hash_file

SHAPE, NAME = (7, 6, 1500), "layers.0.weight"
CUTS = {
    "whole": [((0, 0, 0), SHAPE)],
    "rows": [((0, 0, 0), (3, 6, 1500)), ((3, 0, 0), (4, 6, 1500))],
    "middle": [((0, 0, 0), (7, 1, 1500)), ((0, 1, 0), (7, 5, 1500))],
    "columns": [((0, 0, 0), (7, 6, 1)), ((0, 0, 1), (7, 6, 1499))],
    "blocks": [
        ((0, 0, 0), (2, 6, 1500)),
        ((2, 0, 0), (5, 4, 1500)),
        ((2, 4, 0), (5, 2, 700)),
        ((2, 4, 700), (5, 2, 800)),
    ],
}


def read(tensors: dict[str, Tensor], path: Path, dtype: str = "BF16") -> FileValues | None:
    """In parts of at most 4 KiB, of which a tensor's are several."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    with path.open("rb", buffering=0) as file:
        reader = ValueReader(file, {NAME: (dtype, SHAPE)})
        assert hash_content(reader, 0) == hash_file(path)
    return reader.values


def sum_of_masters(master: Tensor, cut: str, path: Path) -> int:
    rectangles = [Rectangle(*each) for each in CUTS[cut]]
    found = read({region_key("master", NAME, each): master[each.slices()] for each in rectangles}, path)
    assert found is not None and len(found.sums) == len(rectangles)
    return sum(found.sums.values()) % 2**64


@pytest.mark.parametrize("cut", CUTS)
def test_master_weights_have_the_sum_of_what_they_are_rounded_to(tmp_path: Path, cut: str) -> None:
    master = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    weights = master.to(torch.bfloat16)
    weights[1, 2, 3], master[1, 2, 3] = 0.0, -0.0
    found = read({NAME: weights, "other": torch.ones(3, dtype=torch.float16)}, tmp_path / "weights")
    assert found is not None and found.sums.keys() == {NAME} and not found.bounds
    assert sum_of_masters(master, cut, tmp_path / "state") == found.sums[NAME]
    for place in ((0, 0, 0), (6, 5, 1499), (4, 4, 699)):
        changed = master.clone()
        changed[place] *= 1.02
        assert sum_of_masters(changed, cut, tmp_path / "state") != found.sums[NAME]
    swapped = master.clone()
    swapped[2, 4, 10], swapped[5, 1, 20] = master[5, 1, 20], master[2, 4, 10]
    assert sum_of_masters(swapped, cut, tmp_path / "state") != found.sums[NAME]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (f"exp_avg/{NAME}[0:3000]", float("nan"), "not finite"),
        (f"exp_avg/{NAME}[0:3000]", float("-inf"), "not finite"),
        (f"exp_avg_sq/{NAME}[0:3000]", -0.5, "has a value of -0.5"),
        (NAME, float("inf"), "not finite"),
    ],
)
def test_a_value_that_no_training_has_is_found_in_any_part(
    tmp_path: Path, key: str, value: float, message: str
) -> None:
    values = torch.rand(3000)
    for place in (0, 1500, 2999):
        found = read({key: values, "other": torch.rand(5)}, tmp_path / "file")
        assert found is not None and not found.bounds
        changed = values.clone()
        changed[place] = value
        found = read({key: changed, "other": torch.rand(5)}, tmp_path / "file")
        assert found is not None and message in (found.problem("it", key) or "") and not found.problem("it", "other")


def test_a_file_that_is_not_understood_is_read_and_not_judged(tmp_path: Path) -> None:
    assert read({NAME: torch.ones(4, dtype=torch.int32)}, tmp_path / "integers") is None
    path = tmp_path / "damaged"
    whole = (tmp_path / "integers").read_bytes()
    for content in (b"", b"\xff" * 5000, whole[:30], whole[:-1], (2**40).to_bytes(8, "little") + b"{}"):
        path.write_bytes(content)
        with path.open("rb", buffering=0) as file:
            reader = ValueReader(file, {})
            assert hash_content(reader, len(content)) == hash_file(path)
        assert reader.values is None
