"""Load the published functions of verl and TRL, for comparison with ours.

The packages are installed without their dependencies, in a separate folder that no other import sees
(``requirements/oracles.lock``; verl contains a top-level package called ``tests``). The modules with the mathematics are loaded
unchanged from their files. Empty names replace their other imports: types of annotations, base classes, trackers, data frames.
Nothing that computes a number is replaced.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import pytest

# Packages that only their trainers need.
ABSENT = ("accelerate", "datasets", "hydra", "orjson", "pandas", "peft", "tensordict", "codetiming")
REAL = {
    "verl": (
        "verl.plugin.platform",
        "verl.trainer.ppo.core_algos",
        "verl.trainer.ppo.rollout_corr_helper",
        "verl.utils.device",
        "verl.utils.groupwise",
        "verl.utils.import_utils",
        "verl.utils.seqlen_balancing",
        "verl.utils.torch_functional",
    ),
    "trl": ("trl.extras.profiling", "trl.trainer.grpo_trainer", "trl.trainer.utils"),
}


class _Nothing:
    """An empty class that accepts any arguments and bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class _Hollow(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Finder(MetaPathFinder, Loader):
    """Find the wanted modules of a package, and hollow modules for its other modules and for missing packages."""

    def __init__(self, package: str, folder: Path):
        self._package, self._folder, self._real = package, folder, REAL[package]

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.startswith(tuple(f"{real}." for real in self._real)) or name in self._real:
            return PathFinder.find_spec(name, path)
        if name.partition(".")[0] in (self._package, *ABSENT):
            spec = ModuleSpec(name, self, is_package=True)
            spec.submodule_search_locations = [str(self._folder.joinpath(*name.split(".")[1:]))]
            return spec
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Hollow(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing, because the module is empty."""


@contextmanager
def _importing(package: str, folder: Path) -> Iterator[None]:
    """Import a package within this block. Afterwards, its modules are removed, so that other tests see only installed packages."""
    finder, names = _Finder(package, folder), (package, *ABSENT)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(before)


def _folder_of(package: str) -> Path:
    folder = Path(sys.prefix, "oracles", package)
    if not folder.is_dir():
        pytest.skip(f"{package} is not in {folder.parent} (./launch/setup.sh installs it)", allow_module_level=True)
    return folder


def verl() -> types.SimpleNamespace:
    """Load ``core_algos``, ``rollout_corr_helper``, ``seqlen_balancing`` and ``torch_functional``. Skips if verl is not installed."""
    with _importing("verl", _folder_of("verl")):
        utils = importlib.import_module("verl.utils")
        groupwise = importlib.import_module("verl.utils.groupwise")
        utils.as_torch_index, utils.group_mean_std = groupwise.as_torch_index, groupwise.group_mean_std  # type: ignore[attr-defined]
        names = (
            "trainer.ppo.core_algos",
            "trainer.ppo.rollout_corr_helper",
            "utils.seqlen_balancing",
            "utils.torch_functional",
        )
        return types.SimpleNamespace(
            **{name.rpartition(".")[2]: importlib.import_module(f"verl.{name}") for name in names}
        )


def trl() -> types.SimpleNamespace:
    """Load ``grpo_trainer`` and ``utils``. Skips if TRL is not installed."""
    with _importing("trl", _folder_of("trl")):
        names = ("trainer.grpo_trainer", "trainer.utils")
        return types.SimpleNamespace(
            **{name.rpartition(".")[2]: importlib.import_module(f"trl.{name}") for name in names}
        )
