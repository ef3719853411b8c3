"""Parts of several families in one model, against transformers' layers: sparse and latent attention, experts and MTP layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.data.examples import example_batch
from rlhf_mcore.mcore.groups import ModelGroups, build_groups
from rlhf_mcore.mcore.mtp import MTPLearning
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from rlhf_mcore.roles.policy import SupervisedActor
from tests.difference import first_difference
from tests.distributed.models import add_mtp_layer, make
from tests.distributed.mtp_worker import COEF, joint_oracle, load_file
from tests.distributed.setting import Settings, build, gatherer, rows
from tests.episodes import make_example

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]


@pytest.fixture(scope="module")
def groups(world: None) -> ModelGroups:
    made = build_groups(ParallelLayout(1))
    assert made is not None
    return made


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("granularity", ["off", "full"])
def test_sparse_attention_experts_and_mtp_layers_learn_together(
    tmp_path: Path, groups: ModelGroups, name: str, granularity: str
) -> None:
    """In the second model, a layer also uses the keys of another layer."""
    make(name, tmp_path / "model")
    add_mtp_layer(tmp_path / "model")
    oracle = joint_oracle(tmp_path / "model", tmp_path / "after")
    recompute = RecomputeConfig(granularity=granularity)  # type: ignore[arg-type]
    settings = Settings(max_tokens=48, recompute=recompute, mtp=MTPLearning(alone=False, coef=COEF))
    model, actor = build(tmp_path / "model", groups, current_platform(), settings)
    batch = example_batch([make_example(row.prompt_ids, row.response_ids) for row in rows()])
    metrics = SupervisedActor(actor.model).deliver_update(batch)().metrics
    assert metrics["loss/sft"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert metrics["actor/mtp_loss"] == pytest.approx(oracle["mtp_loss"], rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-4)
    assert first_difference(gatherer(model), load_file(tmp_path / "after"), tolerance=1e-5) == ""
