"""Compare adapters of Transformer Engine's layers with PEFT, as far as a machine without a GPU allows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all
from tests.distributed.lora_te_worker import LAYOUTS
from tests.distributed.test_lora import check, check_shards
from tests.distributed.world import run_world

PACKAGES = Path(sys.prefix, "oracles")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not (PACKAGES / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {PACKAGES} (./launch/setup.sh installs it)")
    return run_world("distributed.lora_te_worker", 4, tmp_path_factory.mktemp("lora_te"), str(PACKAGES))


@pytest.mark.parametrize("model", LAYOUTS)
def test_logprobs_and_an_update_are_those_of_peft(findings: Any, model: str) -> None:
    updates = {name: found for name, found in findings["updates"].items() if name.startswith(f"{model}/")}
    check_all(updates, lambda found: check(found, findings["oracle"][model]))
    check_all(updates, lambda found: check_shards(found, model.endswith("_dora")))
