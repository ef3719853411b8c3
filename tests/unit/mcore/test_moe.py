"""Check the router's load-balancing loss on one rank by hand, and the kernels of a model with experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.commands.evaluate.checkpoints import EvaluatedModel
from rlhf_mcore.commands.evaluate.weights import open_weights
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import OptimizerConfig, RecomputeConfig
from rlhf_mcore.expected_kernels import expected_kernels, kernels_text
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups, build_groups, use_groups
from rlhf_mcore.mcore.kernels import live_kernels, use_fast_kernels
from rlhf_mcore.mcore.mixture import Router, routers
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.mcore.weights import unwrap
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from tests.distributed.models import add_mtp_layer, make
from tests.messages import expect_error

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]


@pytest.fixture(scope="module")
def groups(world: None) -> ModelGroups:
    made = build_groups(ParallelLayout(1))
    assert made is not None
    return made


def build(directory: Path, groups: ModelGroups, trainable: bool = True, **options: float) -> MegatronModel:
    settings = BuildOptions("fp32", "local", RecomputeConfig(), trainable, False, 0, **options)
    return build_model(load_spec(directory), groups, current_platform(), settings)


@pytest.fixture
def model(groups: ModelGroups, tmp_path: Path) -> MegatronModel:
    make("qwen3_moe_mixed", tmp_path)
    return build(tmp_path, groups, aux_loss_coef=0.1)


def test_mixed_layers_have_a_router_each_or_a_dense_mlp(
    model: MegatronModel, tmp_path: Path, groups: ModelGroups
) -> None:
    layers = unwrap(model.chunks[0]).decoder.layers
    assert [isinstance(getattr(layer.mlp, "router", None), Router) for layer in layers] == [True, True, False, True]
    assert model.aux_loss_coef == model.config.moe_aux_loss_coeff == 0.1
    assert build(tmp_path, groups, trainable=False, aux_loss_coef=0.1).aux_loss_coef == 0.0


def test_the_kernels_of_a_built_model_are_those_that_the_doctor_expects_here(
    model: MegatronModel, tmp_path: Path, groups: ModelGroups
) -> None:
    """The doctor predicts the kernels of a CPU without imports. The model contains the kernels that Megatron chose."""
    model.add_optimizer(OptimizerConfig())
    assert live_kernels(model) == expected_kernels(has_gpu=False)
    assert "experts one after the other, dispatcher alltoall" in kernels_text(live_kernels(model))
    assert "AdamW" not in live_kernels(build(tmp_path, groups, trainable=False))


def test_layers_beyond_those_of_config_json_are_refused_unless_they_are_mtp_layers(tmp_path: Path) -> None:
    make("deepseek_v3_direct", tmp_path)
    add_mtp_layer(tmp_path)
    assert load_spec(tmp_path).config_updates == {}
    # An engine that evaluates them must not meet unknown tensors either.
    evaluated, wanted = (
        open_weights(EvaluatedModel("hf", str(tmp_path), str(tmp_path))),
        set(hf_shapes(load_spec(tmp_path).geometry)),
    )
    assert set(evaluated.shapes) == {name for name, _ in evaluated.read()} == wanted
    assert load_spec(tmp_path, head="token").config_updates["num_nextn_predict_layers"] == 0
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}))
    with expect_error(ConfigError, field="num_hidden_layers", value=4, remedy="download"):
        load_spec(tmp_path)


def test_load_balance_by_hand(model: MegatronModel) -> None:
    router = next(routers(model.chunks))
    router.balance_weight, router.balance_sum = 0.5, 0.0
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    probs = torch.zeros(2, 4, requires_grad=True)
    # Two tokens, four experts, each chosen once: 1 per token, the minimum.
    even = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    router._apply_aux_loss(probs, even, torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]))
    assert float(router.balance_sum) == pytest.approx(2.0)
    # Both tokens choose the first two experts: f = (1/2, 1/2, 0, 0), sums of probabilities (1.2, 0.4, 0.2, 0.2): 4 * (0.6 + 0.2).
    uneven = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1]], requires_grad=True)
    out = router._apply_aux_loss(probs, uneven, torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]]))
    assert float(router.balance_sum) == pytest.approx(2.0 + 3.2)
    out.sum().backward()
    assert torch.equal(uneven.grad, torch.tensor([[1.0, 1.0, 0.0, 0.0]] * 2))  # 0.5 * 4 * f
    assert torch.equal(probs.grad, torch.ones(2, 4))


def test_a_microbatch_of_padding_has_no_part_in_the_balance(model: MegatronModel) -> None:
    router = next(routers(model.chunks))
    router.balance_weight, router.balance_sum = 0.5, 0.0
    scores = torch.zeros(3, 4, requires_grad=True)
    router._apply_aux_loss(torch.zeros(3, 4), scores, torch.zeros(3, 4, dtype=torch.bool)).sum().backward()
    assert float(router.balance_sum) == 0.0
    assert torch.equal(scores.grad, torch.zeros(3, 4))


def test_every_parameter_has_a_rule_and_every_tensor_an_owner(model: MegatronModel) -> None:
    found, geometry = model.local_parameters(), model.spec.geometry
    held = {piece.hf_name for p in found for piece in pieces(p.name, geometry, p.shard)}
    assert held == set(hf_shapes(geometry))


def test_a_buffer_that_belongs_to_the_state_is_not_left_behind_unseen(model: MegatronModel) -> None:
    before = len(model.local_parameters())
    router = next(routers(model.chunks))
    del router.expert_bias  # None in these families; other models have a buffer
    router.register_buffer("expert_bias", torch.zeros(4))
    router.register_buffer("scratch", torch.zeros(4), persistent=False)
    found = model.local_parameters()
    assert len(found) == before + 1
    added = next(p for p in found if p.name == "decoder.layers.0.mlp.router.expert_bias")
    with pytest.raises(KeyError, match="no rule"):
        pieces(added.name, model.spec.geometry, added.shard)


@pytest.mark.parametrize(
    ("name", "pre_softmax"), [("qwen3_moe", False), ("qwen3_moe_mixed", True), ("qwen2_moe", True), ("mixtral", False)]
)
def test_router_settings(tmp_path: Path, groups: ModelGroups, name: str, pre_softmax: bool) -> None:
    make(name, tmp_path)
    config = build(tmp_path, groups).config
    assert config.moe_router_pre_softmax is pre_softmax
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_router_dtype) == (4, 2, "fp32")
    assert config.moe_ffn_hidden_size == (96 if name == "mixtral" else 48)
    assert (config.moe_router_load_balancing_type, config.moe_grouped_gemm) == ("none", False)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])  # gpt_oss has biases, and interleaves gate and linear part
@pytest.mark.parametrize("num_tokens", [37, 1])  # with one token, most experts get none
def test_experts_at_once_are_the_loop_within_rounding(
    tmp_path: Path, groups: ModelGroups, name: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's grouped product on a CPU gives the same values and gradients."""
    make(name, tmp_path)
    settings = BuildOptions("bf16", "local", RecomputeConfig(), True, False, 0)
    model = build_model(load_spec(tmp_path), groups, current_platform(), settings)
    layer = unwrap(model.chunks[0]).decoder.layers[0].mlp
    draw = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
    hidden = torch.randn(num_tokens, 1, 64, generator=draw).bfloat16()

    def run() -> dict[str, Tensor]:
        layer.zero_grad()
        x = hidden.clone().requires_grad_()
        with use_groups(groups, current_platform()):
            output = layer(x)[0]
        output.backward(torch.ones_like(output))
        gradients = {key: p.grad if p.grad is not None else p.main_grad.clone() for key, p in layer.named_parameters()}
        for parameter in layer.parameters():
            parameter.main_grad.zero_()
        return {"output": output.detach(), "x": x.grad, **gradients}

    loop = run()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    use_fast_kernels(model.chunks[0].modules(), model.config)
    assert live_kernels(model)["experts"] == "torch, grouped"
    grouped = run()
    assert grouped.keys() == loop.keys()
    for key, expected in loop.items():
        error = (grouped[key].float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-9)
        assert error < 2**-7, key  # the spacing of bf16
