"""Check and load functions in users' files (``path/to/file.py:name``). Checking does not execute the files."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from os.path import isfile
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import MissingFile, read_bytes
from rlhf_mcore.readers.function_digest import function_digest

MAX_CODE_BYTES = 2**20  # a hundred times a long reward function; parsing needs a hundred times this memory


class OwnFunction(str):
    """The value of a function key if the function was given from Python. It is called in this process."""

    function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> OwnFunction:
        text = super().__new__(cls, f"python:{getattr(function, '__qualname__', type(function).__qualname__)}")
        text.function = function
        return text

    def __deepcopy__(self, memo: object) -> OwnFunction:
        return self

    def fingerprint(self) -> str:
        """Return a hash of the function's name, its code, and the user's values that the code reads."""
        return hashlib.sha256(f"{self} {function_digest(self.function)}".encode()).hexdigest()


def is_file_spec(text: str) -> bool:
    """Return whether a value names a function in a file, not a built-in function."""
    return ":" in text or text.endswith(".py")


def function_problems(spec: str, key: str) -> Iterator[str]:
    """List problems with ``key: path/to/file.py:name``. The file is parsed but not executed."""
    if isinstance(spec, OwnFunction):
        return
    prefix = f"{key}={spec}"
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name.isidentifier():
        yield f"{prefix} is not of the form path/to/file.py:name"
        return
    try:
        tree = parse_file(path)
    except MissingFile:
        yield f"{prefix}: {path} does not exist (looked from {Path.cwd()}); correct the path"
    except ConfigError as error:
        yield f"{prefix}: {error}"
    else:
        defined: set[str] = set()
        imported: set[str] = set()
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Assign):
                defined.update(target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                imported.update(alias.asname or alias.name for alias in node.names)
        if name not in defined | imported:
            yield f"{prefix}: {path} does not define {name}; it defines: {', '.join(sorted(defined)) or 'nothing'}"


def parse_file(path: str | Path) -> ast.Module:
    """Parse a Python file without executing it.

    Raises:
        MissingFile: the file does not exist.
        ConfigError: it is not a regular file, larger than ``MAX_CODE_BYTES``, or not valid Python.
    """
    data = read_bytes(path, limit=MAX_CODE_BYTES, remedy="correct the file")
    try:
        return ast.parse(data)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not valid Python ({error.msg}); correct the file") from error
    except (
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:  # a NUL character, or brackets nested too deeply for the parser
        raise ConfigError(f"{path}: not valid Python ({error or 'nested too deep'}); correct the file") from error


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """Load the function that ``key: path/to/file.py:name`` names. Every call executes the file.

    Raises:
        ConfigError: the file or the name is missing, or the file fails to import. The message names ``key``.
    """
    if isinstance(spec, OwnFunction):
        return spec.function
    file, _, name = spec.rpartition(":")
    if not file or not name:
        raise ConfigError(f"{key} is {spec!r}: write it as path/to/file.py:name")
    path = Path(file).expanduser().resolve()
    if not isfile(path):
        raise ConfigError(f"{key} is {spec!r}, but there is no file {path}: correct the path")
    function = getattr(_load_module(path, spec, key), name, None)
    if function is None:
        raise ConfigError(f"{key} is {spec!r}, but {path} defines no {name!r}: correct the name")
    if not callable(function):
        raise ConfigError(
            f"{key} is {spec!r}, but {name!r} is not a function ({type(function).__name__}): name a function"
        )
    return function


def _load_module(path: Path, spec: str, key: str) -> ModuleType:
    """Execute a user's file as a module with a unique name, so that it shadows nothing."""
    module_name = f"rlhf_mcore_user_{hashlib.sha256(f'{key} {path}'.encode()).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{key} is {spec!r}, but {path.name} is not a Python file: name a file that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses and annotations look up their module there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(
            f"{key} is {spec!r}, but {path} fails to import "
            f"({type(error).__name__}: {error}){place_of(error, spec)}: correct the file"
        ) from error
    return module


def place_of(error: BaseException, spec: str) -> str:
    """Return the line of ``path/to/file.py:name`` that raised an exception, as " (file.py, line 7)", or "" for other code."""
    path = Path(spec.rpartition(":")[0]).expanduser().resolve()
    if isinstance(error, SyntaxError):
        return ""  # its text contains file and line
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if Path(frame.f_code.co_filename) == path]
    return f" ({path.name}, line {lines[-1]})" if lines else ""
