"""Digest a function that was given from Python: its code, and the user's own values that the code reads.

A notebook's cells define helpers, constants and classes beside the function, and a change of any of them makes another reward. Code of
installed packages counts by its name. A value that the code itself changes (a counter, a growing list) does not count: it differs
from run to run of the same function.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN = (str, bytes, int, float, complex, type(None), type(...), range)
_MUTATORS = re.compile(
    "add|append(left)?|clear|discard|extend|insert|pop(item|left)?|remove|reverse|setdefault|sort|update"
)
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).resolve().parents[1])


def function_digest(function: Callable[..., Any]) -> str:
    """Compute the same digest in every process for a function that was defined in the same way."""
    return hashlib.sha256(repr(_Describer().describe(function)).encode(errors="surrogatepass")).hexdigest()


class _Describer:
    """Describes values without addresses and without the order of sets. What was described before is its number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # a value that is gone would leave its address to another

    def describe(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, re.Pattern):
            return "pattern", value.pattern, value.flags
        if id(value) in self._numbers:
            return "again", self._numbers[id(value)]
        self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, tuple | list):
            return type(value).__name__, [self.describe(item) for item in value]
        if isinstance(value, set | frozenset):
            return "set", sorted(repr(_Describer().describe(item)) for item in value)
        if isinstance(value, Mapping):
            return "dict", [(self.describe(key), self.describe(item)) for key, item in value.items()]
        if isinstance(value, functools.partial):
            return "partial", [self.describe(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, MethodType):
            return "method", self.describe(value.__func__), self.describe(value.__self__)
        if isinstance(value, ModuleType):
            return "module", value.__name__, _own_text(value)
        return self._describe_definition(value)

    def _describe_definition(self, value: Any) -> Any:
        """Describe a function, a class, or an object of one."""
        kind = value if hasattr(value, "__qualname__") else type(value)
        name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"
        if isinstance(value, FunctionType):
            return self._function(value) if _is_own(value.__module__, value.__code__.co_filename) else name
        members = getattr(kind, "__dict__", {}).values()
        file = next((each.__code__.co_filename for each in members if isinstance(each, FunctionType)), "")
        if not _is_own(getattr(kind, "__module__", None), file):
            array = getattr(value, "tobytes", None)  # of numpy
            return name, hashlib.sha256(array()).hexdigest() if callable(array) and value is not kind else ""
        if isinstance(value, type):
            return "class", value.__qualname__, [self.describe(base) for base in value.__bases__], self._members(value)
        changed = {
            name
            for member in _functions_of(kind)
            for name in _stored_attributes(member.__code__) | _mutated_names(member)
        }
        attributes = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in changed}
        return "object", self.describe(kind), self.describe(attributes)

    def _members(self, kind: type) -> Any:
        skipped = ("__dict__", "__weakref__", "__doc__", "__module__", "__static_attributes__", "__firstlineno__")
        members = {name: item for name, item in vars(kind).items() if name not in skipped}
        return [(name, self.describe(getattr(item, "__func__", item))) for name, item in members.items()]

    def _function(self, function: FunctionType) -> Any:
        changed = _mutated_names(function)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        closure = {name: _content(cell) for name, cell in cells.items() if name not in changed}
        read = {name for code in _codes(function.__code__) for name in code.co_names} - changed
        globals_ = {name: function.__globals__[name] for name in sorted(read) if name in function.__globals__}
        parts = (function.__code__, function.__defaults__, function.__kwdefaults__, closure, globals_)
        return function.__qualname__, [self.describe(part) for part in parts]

    def _code(self, code: CodeType) -> Any:
        constants = [self.describe(constant) for constant in code.co_consts]
        return code.co_code.hex(), code.co_names, code.co_varnames[: code.co_argcount], constants


def _codes(code: CodeType) -> Iterator[CodeType]:
    """List a function's code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _mutated_names(function: FunctionType) -> set[str]:
    """List the names outside of the function that its code changes, as far as its instructions show."""
    names: set[str] = set()
    for code in _codes(function.__code__):
        steps = [each for each in dis.get_instructions(code) if each.opname not in ("PRECALL", "CACHE", "PUSH_NULL")]
        assigned = {_line(each) for each in steps if each.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")}
        for each, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
            if each.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                names.add(each.argval)
            elif each.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR"):
                calls = after.opname in ("LOAD_METHOD", "LOAD_ATTR") and _MUTATORS.fullmatch(after.argval)
                value = function.__globals__.get(each.argval) if each.opname == "LOAD_GLOBAL" else []
                if calls or (_line(each) in assigned and isinstance(value, list | dict)):
                    names.add(each.argval)
    return names


def _line(instruction: dis.Instruction) -> int | None:
    return instruction.positions.lineno if instruction.positions is not None else None


def _stored_attributes(code: CodeType) -> set[str]:
    """List the attributes that a method assigns. ``__init__`` makes them, so it does not count."""
    if code.co_name == "__init__":
        return set()
    return {
        each.argval for inner in _codes(code) for each in dis.get_instructions(inner) if each.opname == "STORE_ATTR"
    }


def _functions_of(kind: type) -> list[FunctionType]:
    return [item for each in kind.__mro__ for item in vars(each).values() if isinstance(item, FunctionType)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _is_own(module: str | None, file: str = "") -> bool:
    """Tell whether code is a user's: of a script, a notebook or a module that is not installed."""
    path = file or str(getattr(sys.modules.get(module or ""), "__file__", None) or "")
    if module == "__main__" or not path:
        return module == "__main__"
    return not path.startswith((*_LIBRARIES, _PACKAGE, "<frozen"))


def _own_text(module: ModuleType) -> str:
    """Return the digest of a user's module, and nothing for one that is installed."""
    path = Path(getattr(module, "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest() if _is_own(module.__name__) and path.is_file() else ""
