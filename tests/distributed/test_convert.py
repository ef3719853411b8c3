"""Read Megatron-core's own distributed checkpoints with ``convert``, and read converted checkpoints with Megatron-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlhf_mcore.commands.convert.command import main
from tests.difference import first_difference
from tests.distributed.convert_worker import CASES
from tests.distributed.world import World


@pytest.fixture(scope="module")
def world(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory: Path = tmp_path_factory.mktemp("convert")
    return directory, four_ranks.run("convert_worker", directory)


@pytest.mark.parametrize("name", CASES)
def test_megatron_core_loads_what_convert_wrote(world: tuple[Path, Any], name: str) -> None:
    assert world[1][name]["loaded"] == ""


@pytest.mark.parametrize("name", CASES)
def test_what_megatron_core_wrote_while_training_converts_to_the_same_tensors(
    world: tuple[Path, Any], name: str, tmp_path: Path
) -> None:
    directory, findings = world
    assert findings[name]["unmoved"] == [], "training has to change the weights"
    source, config = directory / f"{name}_trained", directory / name
    assert (
        main(["--from", "megatron", "--to", "hf", "--hf-config", str(config), str(source), str(tmp_path / "hf")]) == 0
    )
    expected, found = (
        load_file(directory / f"{name}_expected.safetensors"),
        load_file(tmp_path / "hf" / "model.safetensors"),
    )
    assert first_difference(found, expected) == ""
