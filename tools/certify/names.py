"""List the names of Megatron-core, vLLM and transformers that our sources use, and check that the installed versions define them.

Few of these names are public API. The list is therefore built from the syntax trees of our modules: their imports, the attributes
and keywords of imports that they use, and the attributes that they read from objects of a library. The syntax does not show the type
of an object. An attribute counts as a library's if neither our sources nor other imports of the module define its name. It is then
searched among all words in the sources of the libraries that the module imports.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import rlhf_mcore
from rlhf_mcore.config.engine_kinds import engine_packages
from tools.certify import Table, row

LIBRARIES = ("megatron", *engine_packages(), "transformers")
PACKAGE = Path(rlhf_mcore.__file__).parent
_MISSING = object()


@dataclass(frozen=True, order=True, slots=True)
class Use:
    """A name of a library, and our first module that uses it. ``problem`` is empty if the name exists."""

    name: str
    where: str
    problem: str = ""


def check_all(root: Path = PACKAGE, libraries: tuple[str, ...] = LIBRARIES) -> list[Use]:
    """Find and check every use in the modules below ``root``. Installed libraries are imported, others are skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about missing kernels and deprecations
        return sorted(_check_all(root, tuple(name for name in libraries if find_spec(name))))


def _check_all(root: Path, libraries: tuple[str, ...]) -> Collection[Use]:
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(root.rglob("*.py"))}
    own = {word for tree in trees.values() for word in _own_names(tree)}
    words = {library: _words_of(library) for library in libraries}
    uses: dict[str, Use] = {}
    for file, tree in trees.items():
        where, imports = str(file.relative_to(root)), list(_imports(tree))
        ours = [(name, target) for name, target in imports if target.partition(".")[0] in libraries]
        for name, target in ours:
            for used, problem in ((target, _problem(target)), *_uses_of(tree, name, target)):
                uses.setdefault(used, Use(used, where, problem))
        if not ours:
            continue
        others = dict(imports).keys() - dict(ours).keys()
        known = (
            own | _common_words() | {word for name, target in imports if name in others for word in _members(target)}
        )
        among = sorted({target.partition(".")[0] for _, target in ours})
        for attribute in _attributes(tree, dict(imports).keys(), others):
            if attribute not in known:
                there = any(attribute in words[library] for library in among)
                name = f"{'/'.join(among)}: .{attribute}"
                uses.setdefault(name, Use(name, where, "" if there else "no source has this word"))
    return uses.values()


def names(device: str, folder: Path, ranks: int) -> Table:
    """Return a row for each missing name, and the number of all names."""
    uses = check_all()
    gone = [row(f"{use.name} ({use.where})", use.problem, "there", False) for use in uses if use.problem]
    absent = [row(f"names of {name}", "skipped: not installed") for name in LIBRARIES if not find_spec(name)]
    count = row("names that we use of the libraries", f"{len(uses)}, {len(gone)} not there", "0 not there", not gone)
    return [*absent, *gone, count]


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a module imports, with their targets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.partition(".")[0], alias.name) for alias in node.names)


def _attributes(tree: ast.Module, imported: Collection[str], others: Collection[str]) -> set[str]:
    """List attributes that a module reads from objects, except from its imports and their attributes.

    Results of calls of ``others`` (imports from other packages) are also excluded.
    """
    roots = {*imported}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            if any(_root(value, through_calls=True) in others for value in values):
                roots |= {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and not node.attr.startswith("__")
        and ast.unparse(node.value) != "super()"
        and _root(node) not in roots
        and _root(node, through_calls=True) not in others
    }


def _root(node: ast.AST, *, through_calls: bool = False) -> str:
    """Return the name at the start of a chain of attributes, or "" if there is none."""
    while isinstance(node, ast.Attribute) or (through_calls and isinstance(node, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def _uses_of(tree: ast.Module, name: str, target: str) -> Iterator[tuple[str, str]]:
    """Yield each use of ``name``, which refers to ``target``, with its problem."""
    attributes: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if owner == name:
                attributes.append(attribute)
            case ast.Call(func=ast.Name(id=called), keywords=keywords) if called == name:
                yield from _keywords(target, [word.arg for word in keywords if word.arg])
            case ast.Call(args=[ast.Name(id=owner), ast.Constant(value=str(attribute)), *_]) if owner == name:
                attributes.append(attribute)  # mock.patch.object(name, "attribute", ...), getattr(name, "attribute")
            case ast.ClassDef(bases=bases) if any(isinstance(base, ast.Name) and base.id == name for base in bases):
                reads = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
                attributes += [
                    each.attr for each in reads if ast.unparse(each.value) == "super()" and each.attr != "__init__"
                ]
    yield from ((f"{target}.{attribute}", _problem(f"{target}.{attribute}")) for attribute in attributes)


def _keywords(target: str, words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the keywords of a call, unless the signature accepts any keyword."""
    with contextlib.suppress(TypeError, ValueError):
        parameters = inspect.signature(_find(target)).parameters
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
            for word in words:
                yield f"{target}({word}=)", "" if word in parameters else "no such parameter"


def _problem(target: str) -> str:
    """Return the reason why a dotted name does not exist, or "".

    The result is also "" if the module defines the name under a condition that is false here.
    """
    try:
        if _find(target) is not _MISSING:
            return ""
        module, _, word = target.rpartition(".")
        return "" if re.search(rf"\b{word}\b", inspect.getsource(_find(module))) else "not there"
    except Exception as error:  # a library module that fails to import may raise any error
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _find(target: str) -> Any:
    """Find the object of a dotted name: a module, or an attribute below the longest module of it."""
    parts = target.split(".")
    owner: Any = import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        value = getattr(owner, part, _MISSING)
        if value is _MISSING and hasattr(owner, "__path__") and find_spec(".".join(parts[:number])):
            value = import_module(".".join(parts[:number]))
        if value is _MISSING:
            return _MISSING
        owner = value
    return owner


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that one of our modules defines; an attribute with such a name may belong to our own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "register_buffer"
        ):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def _members(target: str) -> set[str]:
    """Return the attributes of other imports of our module, and of the classes in them."""
    with contextlib.suppress(Exception):
        owner = _find(target)
        return _words_on(owner, *(vars(owner).values() if isinstance(owner, ModuleType) else ()))
    return set()


@cache
def _common_words() -> set[str]:
    """Return the attributes of objects that need no import."""
    import numpy as np
    import torch

    python = (os.stat_result, str, bytes, list, dict, set, tuple, int, float, BaseException, ModuleType, type(_find))
    return _words_on(*python, np.ndarray, torch.Tensor, torch.Generator, torch.nn.Module, torch.autograd.Function)


def _words_on(owner: Any, *classes: Any) -> set[str]:
    """List attributes of an object, and of the classes among others."""
    owners = [owner, *(each for each in classes if isinstance(each, type))]
    return {word for each in owners for word in (*dir(each), *getattr(each, "__annotations__", ()))}


def _words_of(library: str) -> set[str]:
    """List all words of the sources of a library."""
    spec = find_spec(library)
    folders = spec.submodule_search_locations if spec else None
    return {
        word
        for folder in folders or ()
        for file in Path(folder).rglob("*.py")
        for word in re.findall(r"[A-Za-z_]\w*", file.read_text(encoding="utf-8", errors="replace"))
    }
