"""Adapters of Transformer Engine's layers learn what they learn in PEFT, as far as that can be told without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.lora_te_worker import CASES
from tests.distributed.test_lora import check
from tests.distributed.world import run_world

PACKAGES = Path(sys.prefix, "oracles")


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not (PACKAGES / "transformer_engine").is_dir():
        pytest.skip(f"Transformer Engine's Python is not in {PACKAGES} (./launch/setup.sh installs it)")
    return run_world("distributed.lora_te_worker", 4, tmp_path_factory.mktemp("lora_te"), str(PACKAGES))


@pytest.mark.parametrize("case", [f"{model}/{layout}" for model, layouts in CASES.items() for layout in layouts])
def test_logprobs_and_an_update_are_those_of_peft(findings: Any, case: str) -> None:
    check(findings["updates"][case], findings["oracle"][case.partition("/")[0]])
    assert findings["updates"][case].get("sent", "") == "", "what engines get of magnitudes"
    shards = {name.rstrip("0123456789") for names in findings["updates"][case]["shards"] for name in names}
    assert shards == {"lora_a", "lora_b", *(["lora_m"] if "_dora/" in case else [])}
