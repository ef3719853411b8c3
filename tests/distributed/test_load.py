"""The ranks of a run share one reading of a model's index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.load_worker import FILES
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("load")
    return four_ranks.run("load_worker", directory)


def test_one_rank_reads_the_index_and_each_rank_opens_only_its_files(findings: Any) -> None:
    assert findings["counts"] == [{"read_json": 1, "inside": FILES, "safe_open": 1}, *[{"safe_open": 1}] * 3]
    assert findings["values"] == [[[float(rank)] * 2] for rank in range(4)]


def test_every_rank_reports_a_missing_file(findings: Any) -> None:
    kinds, texts = zip(*findings["errors"], strict=True)
    assert set(kinds) == {"ConfigError"} and len(set(texts)) == 1
    assert f"model-{FILES - 1}.safetensors" in texts[0] and "missing" in texts[0]
