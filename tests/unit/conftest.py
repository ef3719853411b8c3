"""A working directory for a small valid configuration, for tests of config and cli."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.late_device import LateCuda

# No test calls functions that Megatron compiles. Not importing torch's compiler saves a second per worker.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# No deadline, because a slow machine must not fail tests. Few examples, because every run pays for them.
settings.register_profile("unit", deadline=None, max_examples=30)
settings.load_profile("unit")

HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 1024,
}
RUN_YAML = """\
model:
  path: model
data:
  train: [train.jsonl]
"""


class Workspace:
    """Files in a temporary directory, which is the working directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def write_hf_config(self, folder: str = "model", **changes: Any) -> None:
        """Write config.json. A change to None omits the key."""
        content = {key: value for key, value in (HF_CONFIG | changes).items() if value is not None}
        self.write(f"{folder}/config.json", json.dumps(content))


@pytest.fixture
def late_cuda(monkeypatch: pytest.MonkeyPatch) -> LateCuda:
    """Make the device of the test copy late."""
    from tests.late_device import install  # imports torch, which tests of the configuration do not need

    return install(monkeypatch)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.chdir(tmp_path)
    made = Workspace(tmp_path)
    made.write("run.yaml", RUN_YAML)
    made.write("train.jsonl", '{"prompt": "1+1=", "answer": "2"}\n')
    made.write("model/model.safetensors", "")
    made.write("model/tokenizer.json", "{}")
    made.write_hf_config()
    return made
