"""The files that a user's file imports of his own: modules beside it, or in the working directory."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.user_functions import parse_file


def imported_files(first: Path, roots: Sequence[Path]) -> set[Path]:
    """Find a file and all that it imports, by others too, from below ``roots``."""
    files, waiting = set[Path](), [first]
    while waiting:
        if (file := waiting.pop()) not in files:
            files.add(file)
            waiting += _imports_of(file, roots)
    return files


def _imports_of(file: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files below ``roots`` that a file imports by name."""
    try:
        tree = parse_file(file)
    except ConfigError:
        return  # it is refused elsewhere, or never imported
    for node in ast.walk(tree):
        names: list[str] = []
        places = list(roots)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
            if node.level:
                places = [file.parents[min(node.level, len(file.parents)) - 1]]
        for name in filter(None, names):
            if name.partition(".")[0] != "rlhf_mcore":
                yield from _module_files(name.split("."), places)


def _module_files(parts: Sequence[str], places: Sequence[Path]) -> Iterator[Path]:
    """Yield the file of a module and those of the packages that it is in."""
    for place in places:
        for length in range(1, len(parts) + 1):
            path = place.joinpath(*parts[:length])
            for candidate in (path.with_suffix(".py"), path / "__init__.py"):
                if candidate.is_file():
                    yield candidate.resolve()
