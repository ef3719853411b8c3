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


def test_an_id_of_the_hub_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "cache" / "models--Org--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"architectures": ["NoneOfOurs"]}')
    (snapshot / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cfg = Config(output_dir=str(tmp_path))
    cfg.model.path = "Org/tiny"
    with pytest.raises(rm.ConfigError, match=f"model.path={snapshot}: architecture NoneOfOurs is not supported"):
        rm.Trainer(cfg, prompts=["2+2="])
    assert cfg.model.path == "Org/tiny"
