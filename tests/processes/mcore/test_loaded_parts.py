"""A model loads what it is made of: of families its own module, of layers the parts that it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.commands import environment, finished
from tests.distributed.models import make

PROGRAM = """
import json, sys
from pathlib import Path
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.kernels import live_kernels
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from tests.unit.parallel.world import world_of_one
with world_of_one(Path.cwd()):
    options = BuildOptions("fp32", "local", RecomputeConfig(), True, False, 0)
    model = build_model(load_spec("model"), build_groups(ParallelLayout(1)), current_platform(), options)
    live_kernels(model)
    model.load_balance()
print(json.dumps([name.split(".", 1)[1] for name in sys.modules if name.startswith("rlhf_mcore.")]))
"""
FAMILY_PARTS = {"delta", "hybrid", "latent", "mixture", "windows"}
LAYER_PARTS = {"delta_net", "fast_kernels", "latent", "mixture", "mtp"}


@pytest.mark.parametrize(
    ("model", "family_parts", "layer_parts"),
    [
        ("qwen3", set(), set()),
        ("deepseek_v3_dense", {"latent", "mixture"}, {"latent"}),
        ("qwen3_moe", {"mixture"}, {"mixture"}),
    ],
)
def test_what_a_model_loads(tmp_path: Path, model: str, family_parts: set[str], layer_parts: set[str]) -> None:
    make(model, tmp_path / "model")
    ended = finished([sys.executable, "-W", "ignore", "-c", PROGRAM], tmp_path, environment(tmp_path), 200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    loaded = json.loads(ended.stdout.splitlines()[-1])
    families = {name.removeprefix("families.") for name in loaded if name.startswith("families.")}
    shared = {"base", "mtp", "refusals", "sizes"} | FAMILY_PARTS
    assert families - shared == {model.removesuffix("_dense")} and families & FAMILY_PARTS == family_parts
    assert {part for part in LAYER_PARTS if f"mcore.{part}" in loaded} == layer_parts
