"""Digest a function that was given from Python: its source, and the user's functions, classes and constants that it names.

A change of any of them changes the reward. For installed packages only names are digested. Values that the code changes (a counter,
a growing list) are excluded, because they differ between runs.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_CONSTANTS = (str, bytes, int, float, complex, type(None), type(...), range)
_CHANGE = re.compile(  # matches names whose values the code changes
    r"(\w+)(?:\[[^\]\n]*\]\s*(?:[-+*/|&]|//|\*\*)?=(?!=)|\s*(?:[-+*/|&]|//|\*\*)=(?!=)"
    r"|\.(?:add|append|clear|discard|extend|insert|pop|popitem|popleft|remove|setdefault|sort|update)\()"
    r"|\b(?:global|nonlocal)\s+(\w+(?:\s*,\s*\w+)*)"
)
_PATHS = sysconfig.get_paths()
_INSTALLED = (*(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen")
_PACKAGE = str(Path(__file__).resolve().parents[1])


def function_digest(function: Callable[..., Any]) -> str:
    """Return a digest that is equal in every process for functions with the same definition. Warn about code without source."""
    return hashlib.sha256("\n".join(_texts(function, {})).encode(errors="surrogatepass")).hexdigest()


def _texts(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Yield texts for a value and for all values that it contains or names. ``seen`` keeps values alive, so that ids are unique."""
    if id(value) in seen and not isinstance(value, _CONSTANTS):
        yield "again"
        return
    seen[id(value)] = value
    text, inside = _describe(value)
    yield f"{text} of {len(inside)}"
    for part in reversed(inside):
        yield from _texts(part, seen)


def _describe(value: Any) -> tuple[str, Sequence[Any]]:
    """Return a text for a value without its contents, and the values that it contains or names."""
    if isinstance(value, _CONSTANTS):
        return repr(value), ()
    if isinstance(value, re.Pattern):
        return "pattern", (value.pattern, value.flags)
    if isinstance(value, list | tuple):
        return "list", value
    if isinstance(value, Mapping):
        return "mapping", [*value, *value.values()]
    if isinstance(value, set | frozenset):
        return "set", sorted(value, key=repr)
    if isinstance(value, functools.partial):
        return "partial", (value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return "method", (value.__func__, value.__self__)
    code = value if isinstance(value, FunctionType | ModuleType | type) else type(value)
    if not _is_own(code):
        names = (getattr(code, "__module__", ""), code.__name__, getattr(value, "__qualname__", ""))
        array = b"" if value is code else getattr(value, "tobytes", bytes)()
        return f"{names}", (array,)
    if isinstance(value, FunctionType):
        return _describe_function(value)
    if isinstance(value, ModuleType):
        return _source_of(value), ()
    if isinstance(value, type):
        constants = [item for item in vars(value).items() if isinstance(item[1], _CONSTANTS) and item[0][:2] != "__"]
        return value.__qualname__, [*value.__bases__, *_functions_of(value), *constants]
    methods = [function for function in _functions_of(type(value)) if function.__name__ != "__init__"]
    changed = {name for method in methods for name in _changed_names(_source_of(method.__code__))}
    return "object", (code, {name: item for name, item in vars(value).items() if name not in changed})


def _describe_function(function: FunctionType) -> tuple[str, Sequence[Any]]:
    source = _source_of(function.__code__)
    named = {*_names(function.__code__)} - {*_changed_names(source)}
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    values = [(name, known[name]) for name in sorted(named & {*known})]
    return source, (function.__defaults__, function.__kwdefaults__, *values)


def _source_of(code: CodeType | ModuleType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        name = code.co_name if isinstance(code, CodeType) else code.__name__
        warnings.warn(f"{name}: no source is available, so a resumed run cannot detect its changes", stacklevel=2)
        return ""


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code and its inner functions read."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _changed_names(source: str) -> Iterator[str]:
    for name, declared in _CHANGE.findall(source):
        yield from filter(None, (name, *re.split(r"\s*,\s*", declared)))


def _functions_of(kind: type) -> list[FunctionType]:
    """Return the functions of a class that have a source, without the functions that a dataclass generates."""
    parts = [getattr(item, "fget", None) or getattr(item, "__func__", item) for item in vars(kind).values()]
    return [part for part in parts if isinstance(part, FunctionType) and part.__code__.co_filename != "<string>"]


def _is_own(code: FunctionType | ModuleType | type) -> bool:
    """Return whether code is the user's: from a script, a notebook or a module that is not installed."""
    module = code.__name__ if isinstance(code, ModuleType) else code.__module__
    functions = [code] if isinstance(code, FunctionType) else _functions_of(code) if isinstance(code, type) else []
    file = functions[0].__code__.co_filename if functions else getattr(sys.modules.get(module or ""), "__file__", None)
    if file and file.startswith((*_INSTALLED, _PACKAGE)):
        return False
    return module == "__main__" or bool(file)
