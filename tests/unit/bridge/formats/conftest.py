from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.distributed.models import MODELS, MOE_MODELS, make

HFModel = tuple[
    Path, dict[str, Tensor], dict[str, Tensor]
]  # directory, tensors as saved, tensors as its modules hold them


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HFModel]:
    """Return models by name, built once. All have an odd vocabulary; some are tied, and some have one key-value head."""
    root = tmp_path_factory.mktemp("models")
    known: dict[str, HFModel] = {}

    def get(name: str) -> HFModel:
        if name not in known:
            model = make(name, root / name)
            assert isinstance(model, PreTrainedModel)
            (root / name / "tokenizer.json").write_text("{}")
            (root / name / "chat_template.jinja").write_text("{{ messages }}")
            known[name] = root / name, load_file(root / name / "model.safetensors"), dict(model.state_dict())
        return known[name]

    return get


@pytest.fixture
def llama(hf_model: Callable[[str], HFModel], tmp_path: Path) -> Path:
    """Return a copy of a model that a test may damage."""
    shutil.copytree(hf_model("llama")[0], tmp_path / "llama")
    return tmp_path / "llama"


# Every family, tied and untied if there is a choice. Other models differ only in size or in fields that are not weights.
ALL = [name for name in (*MODELS, *MOE_MODELS, "gpt_oss", "phi3") if name not in ("qwen2_yarn", "qwen3_seven")]
