"""Compare the tokens of a file that four processes tokenise together with the tokens from one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.distributed.world import World
from tests.unit.data.conftest import tokenizer

__all__ = ["tokenizer"]


@pytest.fixture(scope="module")
def findings(four_ranks: World, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("data")
    tokenizer.save_pretrained(directory)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}] if n % 2 else f"{n}+{n}="} for n in range(40)]
    (directory / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return four_ranks.run("data_worker", directory)


def test_every_rank_has_the_tokens_of_a_process_alone(findings: Any) -> None:
    assert [name for name, _ in findings["alone"]] == [f"a#{n}" for n in range(40)]
    assert findings["together"] == [findings["alone"]] * 4


def test_a_file_that_one_rank_lacks_is_reported_by_all(findings: Any) -> None:
    [message] = set(findings["missing"])
    assert "none.jsonl" in message
