"""A model loads what it is made of: of families its own module, of layers the parts that it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.commands import environment, finished
from tests.distributed.models import make

# Each model in a fork of a process that has imported libraries, and of this package only what each of them imports first.
PROGRAM = """
import json, os, sys
from pathlib import Path
import torch, transformers
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.kernels import live_kernels
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from tests.unit.parallel.world import world_of_one

def loaded(name):
    directory = Path.cwd() / f"{name}_world"
    directory.mkdir()
    with world_of_one(directory):
        options = BuildOptions("fp32", "local", RecomputeConfig(), True, False, 0)
        model = build_model(load_spec(name), build_groups(ParallelLayout(1)), current_platform(), options)
        live_kernels(model)
        model.load_balance()
    return [name.split(".", 1)[1] for name in sys.modules if name.startswith("rlhf_mcore.")]

for name in sys.argv[1:]:
    if not (child := os.fork()):
        Path(f"{name}.json").write_text(json.dumps(loaded(name)))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
FAMILY_PARTS = {"delta", "hybrid", "latent", "mixture", "windows"}
LAYER_PARTS = {"delta_net", "fast_kernels", "latent", "mixture", "mtp"}
# Of families and of layers.
PARTS: dict[str, tuple[set[str], set[str]]] = {
    "qwen3": (set(), set()),
    "deepseek_v3_dense": ({"latent", "mixture"}, {"latent"}),
    "qwen3_moe": ({"mixture"}, {"mixture"}),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each model's process has left the names of its modules."""
    directory = tmp_path_factory.mktemp("parts")
    for model in PARTS:
        make(model, directory / model)
    ended = finished([sys.executable, "-W", "ignore", "-c", PROGRAM, *PARTS], directory, environment(directory), 300)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return directory


@pytest.mark.parametrize("model", PARTS)
def test_what_a_model_loads(directory: Path, model: str) -> None:
    loaded = json.loads((directory / f"{model}.json").read_text())
    family_parts, layer_parts = PARTS[model]
    families = {name.removeprefix("families.") for name in loaded if name.startswith("families.")}
    shared = {"base", "mtp", "refusals", "sizes"} | FAMILY_PARTS
    assert families - shared == {model.removesuffix("_dense")} and families & FAMILY_PARTS == family_parts
    assert {part for part in LAYER_PARTS if f"mcore.{part}" in loaded} == layer_parts
