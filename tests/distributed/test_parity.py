"""Compare Megatron on four ranks with transformers for every family and kind of layout, and save and reload the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.difference import first_difference
from tests.distributed import models
from tests.distributed.cells import check_all, check_below
from tests.distributed.setting import NOISE, load_hf
from tests.distributed.world import World

EVERY_MODEL = pytest.mark.parametrize("model", models.MODELS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def findings(four_ranks: World, directory: Path) -> Any:
    return four_ranks.run("parity_worker", directory)


def cells_of(findings: Any, model: str) -> dict[str, Any]:
    return {name: found for name, found in findings["cells"].items() if name.startswith(f"{model}/")}


@EVERY_MODEL
def test_logprobs_and_entropy_are_those_of_transformers(findings: Any, model: str) -> None:
    check_all(cells_of(findings, model), check_parity)


def check_parity(found: Any) -> None:
    for kind, (logprobs, entropy) in found["parity"].items():
        check_below(f"{kind}, difference of logprobs", logprobs, NOISE)
        check_below(f"{kind}, difference of entropies", entropy, 1e-4)


@EVERY_MODEL
def test_gathered_weights_are_the_files_bit_for_bit(findings: Any, model: str) -> None:
    check_all(cells_of(findings, model), check_weights)


def check_weights(found: Any) -> None:
    """Check that the gathered tensors are equal, and that each rank holds the predicted names."""
    assert found["gather"] == ""
    for held, predicted in found["names"]:
        assert held == predicted


@EVERY_MODEL
def test_a_saved_directory_is_the_one_it_came_from(directory: Path, findings: Any, model: str) -> None:
    """Four ranks write many files. transformers reads them, and joins or splits experts in its own way."""
    original, expected = load_file(directory / model / "model.safetensors"), load_hf(directory / model).state_dict()

    def check(name: str) -> None:
        saved = directory / f"{name.replace('/', '_')}_saved"
        index = json.loads((saved / "model.safetensors.index.json").read_text())
        files = {name: load_file(saved / name) for name in set(index["weight_map"].values())}
        assert len(files) > 3
        assert first_difference({name: files[file][name] for name, file in index["weight_map"].items()}, original) == ""
        assert first_difference(load_hf(saved).state_dict(), expected) == ""

    check_all(list(cells_of(findings, model)), check)


def test_collectives_with_unequal_ranks(findings: Any) -> None:
    found = findings["collectives"]
    assert found["gather_rows"] == [[1, 1], [2, 2], [2, 2], [3, 3], [3, 3], [3, 3]]
    assert found["gather_json"] == [{"rank": r, "text": "ü" * r} for r in range(4)]
    assert found["all_gather_json"] == [[], [1], [2, 2], [3, 3, 3]]
    assert found["broadcast_json"] == {"from": 2}
    assert found["reduce_sums"] == {"a": 6.0, "b_max": 0.0}
    assert found["shared"] == [
        [{"1": [11] * 3}, [3]],
        [{"2": [12] * 6}, [0]],
        [{"3": [13] * 9}, [1]],
        [{"0": []}, [2]],
    ]
