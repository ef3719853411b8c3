"""Emulate a processor without AMX and avx512_bf16 in every Python process that has this folder in PYTHONPATH.

For example: ``PYTHONPATH=tests/e2e/older_processor ./launch/test.sh tests/e2e/bridge``. vLLM then loads its other build, which has no
``fp8_scaled_mm_cpu``, and ``rlhf_mcore.machine.processor()`` names no such instructions.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

LACKING = ("amx_tile", "amx_bf16", "avx512_bf16")


def change_torch(module: Any) -> None:
    module._is_amx_tile_supported = module._is_avx512_bf16_supported = lambda: False


def change_machine(module: Any) -> None:
    read = module.processor
    module.processor = lambda *args: " ".join(word for word in read(*args).split() if word not in LACKING)


CHANGES = {"torch.cpu": change_torch, "rlhf_mcore.machine": change_machine}


class Finder:
    """Patch a module after its import."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in CHANGES or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        loader: Any = spec.loader

        def run(module: ModuleType) -> None:
            loader.exec_module(module)
            CHANGES[name](module)

        spec.loader = SimpleNamespace(create_module=loader.create_module, exec_module=run)  # type: ignore[assignment]
        return spec


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
