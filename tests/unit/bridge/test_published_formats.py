"""Compare published fp8, int8 and int4 matrices with the dequantisation of transformers and of compressed-tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.run.quantised import largest_magnitudes, quantise, scales_of
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.quantised import quantisation
from rlhf_mcore.foreign import Fields
from rlhf_mcore.readers.stored_formats import read_stored_format
from tests.messages import expect_error

ROWS, COLUMNS = 200, 384
NAME = "model.layers.0.mlp.up_proj.weight"
RECTANGLES = (
    (slice(0, ROWS), slice(0, COLUMNS)),
    (slice(100, 200), slice(0, COLUMNS)),
    (slice(0, ROWS), slice(96, 192)),
    (slice(127, 130), slice(33, 39)),
    (slice(7, 8), slice(383, 384)),
    (slice(5, 5), slice(0, 8)),
)


def write(directory: Path, tensors: Mapping[str, Tensor], quantisation: dict[str, Any]) -> HFReader:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    return HFReader(directory)


def expect_equal(reader: HFReader, expected: Tensor) -> None:
    assert reader.names == {NAME} and reader.shape(NAME) == tuple(expected.shape)
    assert reader.dtype(NAME) == {torch.bfloat16: "BF16", torch.float16: "F16"}[expected.dtype]
    for where in RECTANGLES:
        found = reader.read(NAME, where)
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.int16), expected[where].contiguous().view(torch.int16)), where


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_in_blocks_equals_transformers(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, COLUMNS, generator=generator).mul_(50).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator).mul_(1e-3).to(scale_dtype)
    # transformers requires whole blocks, so the last block of rows is padded there
    padded = F.pad(values.float(), (0, 0, 0, 256 - ROWS)).to(torch.float8_e4m3fn)
    expected = Fp8Dequantize(None)._dequantize_one(padded, scales, torch.bfloat16)[:ROWS]
    stored = {NAME: values, f"{NAME}_scale_inv": scales, NAME.replace("weight", "activation_scale"): torch.ones(1)}
    expect_equal(write(tmp_path, stored, {"quant_method": "fp8", "weight_block_size": [128, 128]}), expected)


def test_engines_in_8_bits_start_with_the_published_bytes(tmp_path: Path) -> None:
    plain, kind = torch.randn(256, COLUMNS, generator=torch.Generator().manual_seed(2)).bfloat16(), quantisation("fp8")
    blocks = plain.float().view(2, 128, 3, 128)
    scales = blocks.abs().amax((1, 3)) / 448  # as DeepSeek-V3 and vLLM quantise
    values = (blocks * (1 / scales)[:, None, :, None]).view_as(plain).to(torch.float8_e4m3fn)
    stored = {NAME: values, f"{NAME}_scale_inv": scales}
    reader = write(tmp_path, stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    trained = reader.read(NAME, (slice(0, 256), slice(0, COLUMNS)))
    largest = largest_magnitudes(trained, (0, 0), kind)
    sent = torch.empty_like(values)
    quantise(trained, (0, 0), largest, kind, sent)
    assert torch.equal(sent.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(scales_of(largest, kind), scales)


def test_fp8_with_exponents_and_with_one_scale(tmp_path: Path) -> None:
    values = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).remainder(200).float().to(torch.float8_e4m3fn)
    exponents = torch.tensor([[0.5, 1.0, 4.0], [2.0, 0.25, 8.0]])
    # DeepSeek-V3.1 and later have powers of two as scales; their files may store the exponents alone.
    of_rows = exponents.repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)
    stored = {NAME: values, f"{NAME}_scale_inv": exponents.to(torch.float8_e8m0fnu)}
    description = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    expect_equal(write(tmp_path, stored, description), (values.float() * of_rows).bfloat16())
    stored[f"{NAME}_scale_inv"] = torch.tensor(0.75)
    reader = write(tmp_path, stored, {"quant_method": "fp8", "weight_block_size": None})
    expect_equal(reader, (values.float() * 0.75).bfloat16())


def weights(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **more}


@pytest.mark.parametrize(
    ("kind", "args", "dtype"),
    [
        ("pack-quantized", weights(4, "group", group_size=32), torch.bfloat16),  # Kimi-K2-Thinking
        ("pack-quantized", weights(4, "group", group_size=128, symmetric=False), torch.float16),
        ("pack-quantized", weights(4, "channel", symmetric=False), torch.bfloat16),
        ("pack-quantized", weights(8, "channel"), torch.float16),
        ("pack-quantized", weights(3, "group", group_size=64), torch.bfloat16),
        ("int-quantized", weights(8, "channel"), torch.bfloat16),
        ("int-quantized", weights(8, "channel", symmetric=False), torch.float32),
        ("int-quantized", weights(8, "group", group_size=64), torch.float32),
        ("float-quantized", weights(8, "tensor", type="float"), torch.bfloat16),
        ("float-quantized", weights(8, "channel", type="float"), torch.float32),  # GLM-4.5-FP8
        ("float-quantized", weights(8, "block", type="float", block_structure=[128, 128]), torch.bfloat16),
    ],
)
def test_compressed_tensors_are_dequantised_as_by_their_library(
    tmp_path: Path, kind: str, args: dict[str, Any], dtype: torch.dtype
) -> None:
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    assert scheme.weights is not None
    plain = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows, columns = {
        "group": (1, args.get("group_size")),
        "channel": (1, COLUMNS),
        "tensor": (ROWS, COLUMNS),
        "block": (128, 128),
    }[args["strategy"]]
    grouped = F.pad(plain, (0, 0, 0, -ROWS % rows)).unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
    scale, zero = calculate_qparams(grouped.amin((1, 3)), grouped.amax((1, 3)), scheme.weights)
    state = {"weight": plain, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    if args["strategy"] == "tensor":
        state |= {"weight_scale": scale.to(dtype).view(1), "weight_zero_point": zero.view(1)}
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    if args["strategy"] == "block":  # without args the library derives blocks from the number of scales
        expected = dequantize(stored["weight"], stored["weight_scale"], None, scheme.weights)
    else:
        expected = compressor.decompress(stored, scheme)["weight"]
    description = {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": {"weights": args}},
    }
    prefix = NAME.removesuffix("weight")
    reader = write(tmp_path, {prefix + name: tensor for name, tensor in stored.items()}, description)
    expect_equal(reader, expected if dtype == torch.float16 else expected.bfloat16())


def test_config_groups_with_different_bits_are_told_apart_by_their_shapes(tmp_path: Path) -> None:
    groups = {
        f"group_{bits}": {"weights": weights(bits, "group", group_size=size)} for bits, size in ((4, 32), (8, 64))
    }
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32).repeat(2, 16)
    description = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    read = []
    for columns, scales in ((256, 8), (128, 2)):
        stored = {
            NAME.replace("weight", "weight_packed"): words,
            NAME.replace("weight", "weight_scale"): torch.ones(2, scales, dtype=torch.bfloat16),
            NAME.replace("weight", "weight_shape"): torch.tensor([2, columns]),
        }
        read.append(write(tmp_path, stored, description).read(NAME, (slice(1, 2), slice(0, 16))).flatten().tolist())
    # By hand: digits 0 to 7 and then 8 to 15, minus 8; bytes 0x10, 0x32, 0x54, 0x76 and 0x98 to 0xfe, minus 128.
    assert read[0] == [*range(-8, 8)]
    assert read[1][:8] == [0x10 - 128, 0x32 - 128, 0x54 - 128, 0x76 - 128, 0x98 - 128, 0xBA - 128, 0xDC - 128, 126]


@pytest.mark.parametrize(
    ("description", "field"),
    [
        ({"quant_method": "gptq"}, "quantization_config.quant_method"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "quantization_config.format"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"weights": weights(4, "group", group_size=32, actorder="group")}},
            },
            "quantization_config.config_groups.g.weights.actorder",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "mixed-precision",
                "config_groups": {"g": {"weights": weights(4, "group", group_size=16, type="float")}},
            },
            "quantization_config.config_groups.g.weights.num_bits",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "transform_config": {"config_groups": {"u": {"type": "hadamard"}}},
                "config_groups": {},
            },
            "quantization_config.transform_config",
        ),
    ],
)
def test_other_formats_are_rejected_by_name(description: dict[str, Any], field: str) -> None:
    with expect_error(ConfigError, field=field, remedy="use the unquantised model"):
        read_stored_format(Fields({"quantization_config": description}, "config.json", ""))


def test_parts_that_do_not_fit_together_are_rejected(tmp_path: Path) -> None:
    stored = {NAME: torch.zeros(ROWS, COLUMNS).to(torch.float8_e4m3fn), f"{NAME}_scale_inv": torch.ones(2, 2)}
    reader = write(tmp_path, stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with expect_error(ConfigError, field=f"{NAME}_scale_inv", value="[2, 2]"):
        reader.shape(NAME)
    stored = {NAME: torch.zeros(ROWS, COLUMNS).bfloat16(), f"{NAME}_scale_inv": torch.ones(2, 3)}
    reader = write(tmp_path, stored, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert reader.dtype(NAME) == "BF16 with scales"  # no dtype of weights, so loading rejects it
