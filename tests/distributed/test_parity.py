"""Megatron on four ranks says what transformers says, for every family, on every kind of layout; weights go there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.difference import first_difference
from tests.distributed import models
from tests.distributed.parity_worker import SAVED_LAYOUTS, all_layouts, layouts_for
from tests.distributed.setting import NOISE, load_hf
from tests.distributed.world import World, run_world

CASES = [(model, layout) for model in models.MODELS for layout in layouts_for(model)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def findings(four_ranks: World, directory: Path) -> Any:
    return four_ranks.run("parity_worker", directory)


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_logprobs_and_entropy_equal_transformers(findings: Any, model: str, layout: str, kind: str) -> None:
    check_logprobs(findings, model, layout, kind)


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_gathered_weights_are_the_files_bit_for_bit(findings: Any, model: str, layout: str) -> None:
    assert findings["gather"][f"{model}/{layout}"] == ""


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layouts_say_which_parameters_a_rank_has(findings: Any, model: str, layout: str) -> None:
    check_names(findings, model, layout)


@pytest.mark.parametrize(("model", "layout"), [case for case in CASES if case[1] in SAVED_LAYOUTS])
def test_a_saved_directory_is_the_one_it_came_from(directory: Path, findings: Any, model: str, layout: str) -> None:
    check_saved(directory, model, layout)


@pytest.mark.matrix
@pytest.mark.parametrize("model", models.MODELS)
def test_every_layout(model: str, tmp_path: Path) -> None:
    findings = run_world("distributed.parity_worker", 4, tmp_path, model)
    for layout in all_layouts(model):
        for kind in ("packed", "padded"):
            check_logprobs(findings, model, layout, kind)
        assert findings["gather"][f"{model}/{layout}"] == ""
        check_names(findings, model, layout)
        if layout in SAVED_LAYOUTS:
            check_saved(tmp_path, model, layout)


def check_logprobs(findings: Any, model: str, layout: str, kind: str) -> None:
    logprobs, entropy = findings["parity"][f"{model}/{layout}/{kind}"]
    assert logprobs < NOISE, f"{layout}, {kind}"
    assert entropy < 1e-4, f"{layout}, {kind}"


def check_names(findings: Any, model: str, layout: str) -> None:
    for held, predicted in findings["names"][f"{model}/{layout}"]:
        assert held == predicted


def check_saved(directory: Path, model: str, layout: str) -> None:
    """Written by four ranks in many files; read by transformers, which joins or splits experts as it likes."""
    saved = directory / f"{model}_{layout}_saved"
    original = load_file(directory / model / "model.safetensors")
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    files = {name: load_file(saved / name) for name in set(index["weight_map"].values())}
    assert len(files) > 3
    assert first_difference({name: files[file][name] for name, file in index["weight_map"].items()}, original) == ""
    assert first_difference(load_hf(saved).state_dict(), load_hf(directory / model).state_dict()) == ""


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
