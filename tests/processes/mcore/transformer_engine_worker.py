"""Build models with Transformer Engine's layers in fake worlds. Prints the gaps of the map, one line per model and layout.

Transformer Engine's Python code is real. Empty names replace its C extension and its Triton kernels, which need a GPU. Names and
shapes of parameters, and the arguments that Megatron passes to constructors, are therefore the same as on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

PLACES = ("INPUT", "WEIGHT", "OUTPUT")
EXTENSION = {
    "DType": ["kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"],
    "FP8FwdTensors": [f"GEMM{number}_{place}" for number in (1, 2, 3) for place in PLACES],
    "FP8BwdTensors": [f"GRAD_{place}{number}" for number in (1, 2, 3) for place in ("OUTPUT", "INPUT")],
}
KERNELS = ("mhc", "pad", "permutation", "cross_entropy", "grouped_dbias_dscales")
VOCABULARY = (
    "embedding.word_embeddings.",
    "output_layer.",
    "mtp.embedding.",
)  # tensors over the 97 tokens of the vocabulary, which Megatron pads
CUDNN = 91801  # 9.18.1, in the format of the extension
HOPPER = (9, 0)


class _Empty(types.ModuleType):
    """A module in which every name exists and does nothing."""

    def __init__(self, name: str, **names: Any):
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None), []
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, MagicMock(name=name))


class _Device:
    """The functions of ``torch.cuda`` that a constructor of a module uses."""

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: "cpu")
    get_device_capability = staticmethod(lambda device=None: HOPPER)
    get_device_properties = staticmethod(lambda device=None: types.SimpleNamespace(major=HOPPER[0], minor=HOPPER[1]))
    Stream = Event = MagicMock()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch(types.ModuleType):
    """torch with the fake device. Tensors stay on the host."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda, self.version = _Device(), types.SimpleNamespace(cuda="12.9")
        for name in ("empty", "zeros", "ones", "full", "tensor"):
            setattr(self, name, self._on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def _on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, device=None, **named: make(
            *args, **named, device="cpu" if "cuda" in str(device) else device
        )


def import_transformer_engine(folder: str) -> None:
    """Import Transformer Engine. Call it before importing Megatron, which looks for the package once."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the package then does not look for libraries
    extension = {name: IntEnum(name, {key: k for k, key in enumerate(keys)}) for name, keys in EXTENSION.items()}
    sys.modules["transformer_engine_torch"] = _Empty("transformer_engine_torch", **extension)
    for name in ("onnxscript", "onnx", "onnxscript.onnx_types", "onnxscript.ir"):
        sys.modules[name] = _Empty(name)
    for name in ("", *(f".{kernel}" for kernel in KERNELS)):
        full = f"transformer_engine.pytorch.triton{name}"
        sys.modules[full] = _Empty(full)
    sys.path.append(folder)
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch
    import transformer_engine.pytorch.cpp_extensions as extensions

    extensions.get_cudnn_version = lambda: CUDNN
    sys.path.remove(folder)  # another package in this folder contains a module called tests
    seen = _Torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and getattr(module, "torch", None) is torch:
            module.torch = seen  # type: ignore[attr-defined]


def find_unmapped(directory: Path, layout: Any, with_mtp: bool, fp8: bool) -> dict[str, int]:
    """Return tensor of the checkpoint -> elements that no rank holds according to the map, and parameter -> its unmapped part."""
    from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
    from rlhf_mcore.config.schema import ActorConfig, RecomputeConfig
    from rlhf_mcore.mcore.attention import LATENT_NORM_EPS
    from rlhf_mcore.mcore.build import BuildOptions, build_model
    from rlhf_mcore.mcore.dry_run import fake_world
    from rlhf_mcore.mcore.groups import build_groups
    from rlhf_mcore.mcore.model_spec import load_spec
    from rlhf_mcore.mcore.mtp import MTPLearning
    from rlhf_mcore.mcore.overrides import Overrides
    from rlhf_mcore.platform import current_platform
    from tests.processes.mcore.fp8_layers import computed_otherwise

    spec = load_spec(directory)
    if with_mtp:
        spec = replace(spec, geometry=replace(spec.geometry, mtp_layers=spec.hf_config.num_nextn_predict_layers))
    mtp = MTPLearning() if with_mtp else None
    held = {hf_name: np.zeros(shape, bool) for hf_name, shape in hf_shapes(spec.geometry).items()}
    outside: dict[str, int] = {}
    for rank in range(layout.world_size):
        with fake_world(rank, layout.world_size):
            groups = build_groups(layout)
            assert groups is not None
            options = BuildOptions("fp32", "te", RecomputeConfig(), True, False, 0, mtp=mtp)
            if fp8:
                options = replace(options, overrides=Overrides.of("actor", ActorConfig(fp8="blockwise")))
            model = build_model(spec, groups, current_platform(), options)
            if fp8:
                outside |= {f"{name} of rank {rank}": 1 for name in computed_otherwise(model)}
            for chunk in model.chunks:
                for name, module in chunk.named_modules():
                    if name.endswith(("linear_q_up_proj", "linear_kv_up_proj")) and module.eps != LATENT_NORM_EPS:
                        outside[f"epsilon of {name}"] = 1
            for parameter in model.local_parameters():
                found = pieces(parameter.name, spec.geometry, parameter.shard)
                more = parameter.tensor.numel() - sum(piece.numel for piece in found)
                if more and not parameter.name.startswith(VOCABULARY):
                    outside[f"{parameter.name} of rank {rank}"] = more
                for piece in found:
                    ends = zip(piece.start, piece.shape, strict=True)
                    held[piece.hf_name][tuple(slice(start, start + size) for start, size in ends)] = True
    return {hf_name: int((~filled).sum()) for hf_name, filled in held.items() if not filled.all()} | outside


def main(folder: str, wanted: Sequence[str]) -> None:
    """Check models. ``wanted``: MODEL:KEY=SIZE,KEY=SIZE, with a model of tests/distributed/models.py and its layout.

    ``mtp=1`` adds a trained MTP layer. ``fp8=1`` uses 8-bit products, and also names layers that compute otherwise.
    """
    os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"  # as in cli/rank.py
    import_transformer_engine(folder)
    from rlhf_mcore.mcore import overrides
    from rlhf_mcore.mcore.layers import HAVE_TE
    from rlhf_mcore.parallel.layout import ParallelLayout
    from tests.distributed import models

    assert HAVE_TE and overrides.has_fp32_scales()
    overrides.machine_problems = lambda overrides, platform: iter(())  # because the platform is the CPU
    with TemporaryDirectory() as directory:
        for order in wanted:
            name, _, sizes = order.partition(":")
            axes = {key: int(size) for key, _, size in (each.partition("=") for each in sizes.split(",") if each)}
            world = axes.pop("world", 1)
            with_mtp, fp8 = bool(axes.pop("mtp", 0)), bool(axes.pop("fp8", 0))
            path = Path(directory) / f"{name}{with_mtp}"
            if not path.is_dir():
                models.make(name, path)
                if with_mtp:
                    models.add_mtp_layer(path)
            print(json.dumps([order, find_unmapped(path, ParallelLayout(world, **axes), with_mtp, fp8)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
