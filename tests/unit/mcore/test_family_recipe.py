"""Follow CONTRIBUTING's recipe for a model family to the letter, with its module and a transformers model only."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import HeliumConfig, HeliumForCausalLM

from rlhf_mcore import families
from rlhf_mcore.bridge.map.coverage import check_coverage
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.commands.convert.command import main as convert
from rlhf_mcore.data.collate import restore_tokens
from rlhf_mcore.mcore.groups import ModelGroups
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import EngineGrid, PlannedRole
from rlhf_mcore.planning.memory import state_bytes
from rlhf_mcore.readers.model_files import inspect_model, read_geometry
from rlhf_mcore.types import Microbatch
from tests.distributed import models
from tests.engine_layout import destinations
from tests.trainer_layout import stage_names, trainer_places
from tests.unit.mcore.test_model import LENGTHS, TEMPERATURE, build, expected_logprobs, groups, microbatches

__all__ = ["groups"]
ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Add the recipe's module to the families, as if it were a file of the package. Returns its lines."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### A model family")[2]
    name, text = re.findall(r"rlhf_mcore/families/(\w+)\.py`:\n\n```python\n(.*?)```", page, re.S)[0]
    assert name == "helium" and name not in families.FAMILIES
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / f"{name}.py").write_text(text)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "more")])
    monkeypatch.setitem(models.MODELS, name, (HeliumForCausalLM, HeliumConfig, {"hidden_size": 128}))
    return text.splitlines()


def test_a_cousin_is_one_file_of_a_few_lines(recipe: list[str], tmp_path: Path, groups: ModelGroups) -> None:
    assert len(recipe) < 30
    hf = models.make("helium", tmp_path / "m")
    # Checks: the directory contains a model with the weights that config.json describes.
    geometry, problems = inspect_model(str(tmp_path / "m"), "model.path")
    assert problems == [] and geometry == read_geometry(tmp_path / "m")
    written = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items()}
    assert hf_shapes(geometry) == written
    # A plan: every element has one owner, reaches every engine, and is counted once.
    layout = ParallelLayout(4, tp=2, pp=2)
    sources = trainer_places(stage_names(geometry, layout), geometry, layout)
    check_coverage(sources, destinations(geometry, EngineGrid(2), 2), written)
    assert num_parameters(geometry) == sum(p.numel() for p in hf.parameters())
    role = PlannedRole("actor", geometry, ParallelLayout(1), trained=False, dtype="fp32")
    assert state_bytes(role, 0).weights == 4 * num_parameters(geometry)
    # Megatron with these weights gives the logprobs of transformers.
    model = build(tmp_path / "m", groups, trainable=False)

    def logprobs(logits: torch.Tensor, part: Microbatch) -> torch.Tensor:
        return model.logprobs_and_entropy(logits, part, TEMPERATURE)[0]

    with torch.no_grad():
        expected = expected_logprobs(hf)
    found = restore_tokens(model.forward(microbatches(True), logprobs), microbatches(True), LENGTHS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("recipe")
def test_it_is_converted_there_and_back(tmp_path: Path) -> None:
    models.make("helium", tmp_path / "m")
    assert convert(["--from", "hf", "--to", "megatron", str(tmp_path / "m"), str(tmp_path / "megatron")]) == 0
    assert convert(["--from", "megatron", "--to", "hf", str(tmp_path / "megatron"), str(tmp_path / "back")]) == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("m", "back"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias is not supported for HeliumForCausalLM"),
        ({"is_causal": False}, "is_causal=false is not supported for HeliumForCausalLM"),
        ({"architectures": ["HeliumForQuestionAnswering"]}, "HeliumForQuestionAnswering is not supported"),
    ],
)
def test_what_it_does_not_support_is_refused_by_name(tmp_path: Path, change: dict[str, object], message: str) -> None:
    models.make("helium", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in "\n".join(inspect_model(str(tmp_path / "m"), "model.path")[1])


@pytest.mark.usefixtures("recipe")
def test_its_sizes_are_what_config_json_leaves_out_too(tmp_path: Path) -> None:
    models.make("helium", tmp_path / "m")
    path, whole = tmp_path / "m" / "config.json", read_geometry(tmp_path / "m")
    content = {key: value for key, value in json.loads(path.read_text()).items() if key != "head_dim"}
    path.write_text(json.dumps(content))
    assert read_geometry(tmp_path / "m") == replace(whole, attention=replace(whole.attention, head_dim=128))
