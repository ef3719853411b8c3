"""A user's fields of Megatron's classes: converted, given to it, and refused in our words where it or the machine refuses them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform.cpu import CpuPlatform
from rlhf_mcore.platform.cuda import CudaPlatform
from tests.messages import refused

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def test_types_of_torch_and_enumerations_are_written_by_name() -> None:
    made = Overrides("actor.megatron", {"autocast_dtype": "bf16", "attention_backend": "flash", "bucket_size": 3})
    config = made.build(TransformerConfig, **SIZES)
    assert config.autocast_dtype == torch.bfloat16
    assert config.attention_backend == AttnBackend.flash


def test_what_megatron_refuses_is_a_mistake_of_the_user() -> None:
    with refused(ConfigError, field=("actor.megatron", "moe_z_loss_coeff", "cpu_offloading"), remedy="remove"):
        values = {"moe_z_loss_coeff": 0.1, "cpu_offloading": True, "cpu_offloading_num_layers": 9}
        Overrides("actor.megatron", values).build(TransformerConfig, **SIZES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apply_rope_fusion", True),
        ("gradient_accumulation_fusion", True),
        ("moe_token_dispatcher_type", "flex"),
        ("moe_enable_deepep", True),
        ("fp8", "hybrid"),
        ("attention_backend", "flash"),
        ("tp_comm_overlap", True),
    ],
)
def test_kernels_of_cuda_are_refused_on_the_cpu_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"^critic\.megatron\.{name}={value} needs CUDA.*remove it"):
        Overrides("critic.megatron", {name: value}).check(CpuPlatform())


def test_fields_that_need_no_kernel_and_those_switched_off_pass_on_the_cpu() -> None:
    Overrides("actor.megatron", {"overlap_grad_reduce": True, "apply_rope_fusion": False, "fp8": None}).check(
        CpuPlatform()
    )


def test_gradients_and_weights_travel_beside_the_passes_unless_the_user_says_otherwise() -> None:
    both = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert Overrides(values={"bucket_size": 3}).overlapping().values == {**both, "bucket_size": 3}
    assert Overrides(values={"overlap_param_gather": False}).overlapping().values == {
        **both,
        "overlap_param_gather": False,
    }
    off = Overrides(values={"overlap_grad_reduce": False})
    assert off.overlapping().values == off.values


def test_buffers_of_transformer_engine_are_made_once_and_have_the_shape_of_every_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of its module only the function that makes them is stood in for: there is no Transformer Engine without CUDA."""
    made: list[dict[str, Any]] = []
    base: Any = ModuleType("transformer_engine.pytorch.module.base")
    base.initialize_ub = lambda **given: made.append(given)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    platform, wanted = CudaPlatform(), Overrides("critic.megatron", {"tp_comm_overlap": True})
    layout = ParallelLayout(4, tp=2, cp=2, sequence_parallel=True)
    for _ in range(2):  # an actor and its reference
        wanted.make_buffers(platform, layout, 1003, 64)
    assert made == [{"shape": [500, 64], "tp_size": 2, "use_fp8": False, "bootstrap_backend": "nccl"}]
    with refused(ConfigError, field="critic.megatron.tp_comm_overlap", value=("True", "128"), remedy="remove"):
        wanted.make_buffers(platform, layout, 1003, 128)
