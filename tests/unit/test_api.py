"""Mistakes that the Python API finds before anything starts; its runs are in tests/e2e/test_python_api.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlhf_mcore as rm
from rlhf_mcore.config.schema import Config


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        ("What is 2+2?", r"prompts='What is 2\+2\?' is one prompt; give a list"),
        ({"prompt": "2+2="}, r"is one prompt; give a list"),
        (["2+2=", 7], r"prompts: 7 is no prompt; give a list of texts, or of dicts"),
    ],
)
def test_what_are_no_prompts_is_refused(prompts: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(rm.ConfigError, match=problem):
        rm.Trainer(Config(output_dir=str(tmp_path)), prompts=prompts)
    assert list(tmp_path.iterdir()) == []


def test_prompts_that_cannot_be_written_name_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(rm.ConfigError, match=r"output_dir: .*/file/.*: Not a directory; choose another output_dir"):
        rm.train(Config(output_dir=str(tmp_path / "file")), prompts=["2+2="])
