"""Pass a user's fields to Megatron's classes. Our message explains a value that Megatron or the machine rejects."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from rlhf_mcore.cli import terminal
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import ActorConfig, CriticConfig
from rlhf_mcore.mcore import overrides
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform.cpu import CpuPlatform
from rlhf_mcore.platform.cuda import CudaPlatform
from tests.messages import expect_error

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def test_types_of_torch_and_enumerations_are_written_by_name() -> None:
    made = Overrides("actor.megatron", {"autocast_dtype": "bf16", "attention_backend": "flash", "bucket_size": 3})
    config = made.build(TransformerConfig, **SIZES)
    assert config.autocast_dtype == torch.bfloat16
    assert config.attention_backend == AttnBackend.flash


@pytest.mark.parametrize(
    ("values", "named", "other"),
    [
        ({"attention_backend": "flush", "moe_z_loss_coeff": 0.1}, "attention_backend='flush'", "moe_z_loss_coeff"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 9}, "cpu_offloading_num_layers=9", "hidden_size"),
    ],
)
def test_a_rejection_by_megatron_names_the_keys_that_it_mentions(
    values: dict[str, Any], named: str, other: str
) -> None:
    with expect_error(ConfigError, field=f"actor.megatron.{named}", remedy="change or remove it") as caught:
        Overrides("actor.megatron", values).build(TransformerConfig, **SIZES)
    assert terminal.kind_of(caught.value) == terminal.USER  # one message without a traceback, and exit code 2
    assert other not in str(caught.value)


def test_lists_are_given_to_megatron_as_they_are_and_as_tuples_where_it_declares_tuples() -> None:
    made = Overrides("actor.megatron", {"offload_modules": ["core_attn"], "window_size": [3, 0]}).build(
        TransformerConfig, **SIZES
    )
    assert (made.offload_modules, made.window_size) == (["core_attn"], (3, 0))


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


def test_8_bits_of_a_policy_are_fields_of_megatron() -> None:
    made = Overrides.of("actor", ActorConfig(fp8="blockwise", megatron={"moe_z_loss_coeff": 0.5}))
    config = made.build(TransformerConfig, **SIZES)
    assert (config.fp8, config.fp8_recipe, config.fp8_param, config.moe_z_loss_coeff) == (
        "e4m3",
        "blockwise",
        False,
        0.5,
    )
    assert TransformerConfig(**SIZES).fp8 is None
    assert Overrides.of("actor", ActorConfig()) == Overrides("actor.megatron")
    assert Overrides.of("critic", CriticConfig(megatron={"fp8": "hybrid"})) == Overrides(
        "critic.megatron", {"fp8": "hybrid"}
    )


@pytest.mark.parametrize(
    ("capability", "cuda", "power_of_two", "named"),
    [
        ((9, 0), "12.9", False, ""),
        ((9, 0), "13.0", False, ""),
        ((8, 9), "12.9", False, "8.9"),
        ((10, 0), "12.9", False, "mxfp8"),
        ((9, 0), "12.8", False, "12.8"),
        ((9, 0), None, False, "12.9"),
        ((9, 0), "12.9", True, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1"),
    ],
)
def test_a_device_that_cannot_compute_so_is_named(
    capability: tuple[int, int], cuda: str | None, power_of_two: bool, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the scales of Transformer Engine's recipe are read. tests/processes/mcore reads them from its Python."""
    recipe: Any = ModuleType("transformer_engine.common.recipe")
    recipe.Float8BlockScaling = lambda: SimpleNamespace(
        fp8_quant_fwd_weight=SimpleNamespace(power_2_scale=power_of_two)
    )
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, recipe.__name__, recipe)
    monkeypatch.setattr(overrides, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    wanted, plain = Overrides.of("actor", ActorConfig(fp8="blockwise")), Overrides("actor.megatron", {"fp8": "hybrid"})
    if not named:
        wanted.check(CudaPlatform())
    else:
        with expect_error(ConfigError, field="actor.fp8=blockwise", value=named):
            wanted.check(CudaPlatform())
    plain.check(CudaPlatform())  # Megatron checks its own fields


def test_8_bits_of_a_policy_are_refused_by_their_key() -> None:
    made = Overrides.of("actor", ActorConfig(fp8="blockwise"))
    with expect_error(ConfigError, field="actor.fp8=blockwise", value="CUDA", remedy="null"):
        made.check(CpuPlatform())
    with expect_error(ConfigError, field="actor.fp8=blockwise", value="Transformer Engine", remedy="null"):
        made.check(CudaPlatform())  # it is not installed


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
    """A stand-in replaces only the function that makes the buffers, because Transformer Engine needs CUDA."""
    made: list[dict[str, Any]] = []
    base: Any = ModuleType("transformer_engine.pytorch.module.base")
    base.initialize_ub = lambda **given: made.append(given)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    platform, wanted = CudaPlatform(), Overrides("critic.megatron", {"tp_comm_overlap": True})
    layout = ParallelLayout(4, tp=2, cp=2, sequence_parallel=True)
    for _ in range(2):  # an actor and its reference
        overrides.make_buffers(wanted, platform, layout, 1003, 64)
    assert made == [{"shape": [500, 64], "tp_size": 2, "use_fp8": False, "bootstrap_backend": "nccl"}]
    with expect_error(ConfigError, field="critic.megatron.tp_comm_overlap", value=("True", "128"), remedy="remove"):
        overrides.make_buffers(wanted, platform, layout, 1003, 128)
