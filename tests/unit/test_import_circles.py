"""Check that no modules of the package import each other in a circle, even inside functions. Imports of types are allowed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rlhf_mcore"


def module_files() -> dict[str, Path]:
    files = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


def imports(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Yield the ``modules`` that code imports, without imports for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from [name] if name in modules else [node.module] * (node.module in modules)
        yield from imports(node, modules)


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    files = module_files()
    graph = {name: set(imports(ast.parse(file.read_bytes()), {*files} - {name})) for name, file in files.items()}
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def later():\n    from b import thing\n", ["a", "b", "a"]),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import b\n", []),
        ("import c\n", []),
    ],
)
def test_a_circle_is_one_by_any_import_that_runs(code: str, expected: list[str]) -> None:
    graph = {"a": set(imports(ast.parse(code), {"b", "c"})), "b": {"a"}, "c": set[str]()}
    assert sorted(set(circle(graph))) == sorted(set(expected))
