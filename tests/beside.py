"""Import packages that only some tests may see, from the separate folder in which launch/setup.sh installs them.

transformers behaves differently if it finds torchvision, PEFT or accelerate. The CPU stack does not include these
packages.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(sys.prefix, "oracles")  # requirements/oracles.lock
_ANY = DistributionFinder.Context()


def is_there(*packages: str) -> bool:
    """Return whether launch/setup.sh has installed all of these packages."""
    return all((FOLDER / package).is_dir() for package in packages)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests if one of these packages is missing."""
    return pytest.mark.skipif(
        not is_there(*packages), reason=f"launch/setup.sh did not install {' and '.join(packages)}"
    )


def link(directory: Path, *packages: str) -> Path:
    """Create a folder with only these packages, for the Python path of processes."""
    for package in packages:
        for entry in FOLDER.glob(f"{package}*"):
            (directory / entry.name).symlink_to(entry)
    return directory


@cache
def peft() -> Any:
    """Import PEFT and its dependency accelerate into this process."""
    finder = _Finder(("accelerate", "peft"))
    sys.meta_path.append(finder)
    try:
        return importlib.import_module("peft")
    finally:
        sys.meta_path.remove(finder)


@dataclass(frozen=True)
class _Finder(DistributionFinder):
    """Find some packages of the folder and their metadata."""

    names: tuple[str, ...]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(FOLDER)], target) if name in self.names else None

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterable[Distribution]:
        if context.name not in self.names:
            return ()
        return MetadataPathFinder.find_distributions(DistributionFinder.Context(name=context.name, path=[str(FOLDER)]))
