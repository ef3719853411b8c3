"""The loss of indexers, and its gradient, against a slow reference from transformers' layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.schema import OptimizerConfig, RecomputeConfig
from rlhf_mcore.families.indexed import with_trained_indexers
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups, build_groups
from rlhf_mcore.mcore.model import MegatronModel, Metrics
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.mcore.weights import global_names, unwrap
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from rlhf_mcore.roles.trained_weights import freeze_all_but_indexers
from rlhf_mcore.types import Microbatch
from tests.distributed.models import make
from tests.slow_indexers import attend_to_all, indexer_divergence
from tests.unit.mcore.test_model import LENGTHS, TEMPERATURE, expected_logprobs, loss_mask, microbatches, rows

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]


@pytest.fixture(scope="module")
def groups(world: None) -> ModelGroups:
    made = build_groups(ParallelLayout(1))
    assert made is not None
    return made


def build(path: Path, groups: ModelGroups, stage: str, granularity: str) -> MegatronModel:
    spec = load_spec(path, "lm")
    spec = replace(spec, geometry=with_trained_indexers(spec.geometry))
    only = freeze_all_but_indexers if stage == "warm_up" else None
    recompute = RecomputeConfig(granularity=granularity)  # type: ignore[arg-type]
    options = BuildOptions("fp32", "local", recompute, True, False, 0, indexer=stage, freeze=only)
    model = build_model(spec, groups, current_platform(), options)
    load(model.local_parameters(), spec.geometry, HFReader(path))
    return model


@pytest.mark.parametrize("granularity", ["off", "full"])
@pytest.mark.parametrize("stage", ["sparse", "warm_up"])
def test_the_loss_and_its_gradient_are_those_of_a_slow_reference(
    tmp_path: Path, groups: ModelGroups, stage: str, granularity: str
) -> None:
    hf = make("deepseek_v32", tmp_path)
    if stage == "warm_up":  # attention to all tokens
        attend_to_all(hf)
    model = build(tmp_path, groups, stage, granularity)
    model.add_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0))

    def loss(outputs: torch.Tensor, part: Microbatch) -> tuple[torch.Tensor, Metrics]:
        return (model.logprobs_and_entropy(outputs, part, TEMPERATURE)[0] * part.fields["mask"]).sum() / 8, {}

    model.forward_backward(microbatches(True), loss)
    expected = torch.stack([indexer_divergence(hf, ids, stage) for ids in rows()]).sum() / sum(LENGTHS)
    expected.backward()
    assert model.indexer_loss() == pytest.approx(expected.item() / 4, rel=1e-4)
    grads = {name: p.grad for name, p in hf.named_parameters() if ".indexer." in name}
    names = {"queries": "wq_b.weight", "keys": "wk.weight", "norm_weight": "k_norm.weight", "norm_bias": "k_norm.bias"}
    names |= {"head_weights": "weights_proj.weight"}
    compared = 0
    for name, _, tensor in global_names(unwrap(model.chunks[0])):
        if ".indexer." in name:
            layer, kind = name.split(".")[2], name.rpartition(".")[2]
            wanted = grads[f"model.layers.{layer}.self_attn.indexer.{names[kind]}"]
            torch.testing.assert_close(tensor.main_grad, wanted, rtol=1e-3, atol=1e-6)
            compared += 1
        elif stage == "warm_up":
            assert not tensor.requires_grad
    assert compared == 20
    outcome = model.step(lr=0.0)
    norm = float(torch.stack([grad.norm() for grad in grads.values() if grad is not None]).norm())
    if stage == "warm_up":
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-3)
        return
    assert outcome.norm_alone == pytest.approx(norm, rel=1e-3)
    hf.zero_grad()
    (expected_logprobs(hf) * loss_mask()).sum().div(8).backward()
    of_model = [p.grad.norm() for p in hf.parameters() if p.grad is not None]
    assert outcome.grad_norm == pytest.approx(float(torch.stack(of_model).norm()), rel=1e-4), "as without indexers"
