"""Read and write pickles, because foreign formats contain them. Only ``foreign_tensors`` also reads some, with torch.

Reading imports nothing and calls nothing. Names of classes and functions become ``Name``, and calls become
``Shell`` with their arguments. Only opcodes of an allow-list are accepted. The reader is Python's own unpickler in
its pure Python version. Its memory grows with the bytes of the pickle, not with numbers inside them (a memo index,
a length).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch.distributed.checkpoint import metadata

from rlhf_mcore.foreign import shorten

_OPCODES = [
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1",
    "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET", "APPEND", "APPENDS", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL",
]  # fmt: skip
# Formats of tensors use names from these modules only.
_MODULES = ("torch", "megatron", "pathlib")
_DICT = ("collections", "OrderedDict")


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function named in a pickle. It is not resolved."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Shell:
    """A call of ``name`` that was not executed, with its arguments and the state for its result."""

    name: Name
    args: tuple[Any, ...]
    state: Any = None


class _Reader(pickle._Unpickler):
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPCODES
    }

    def find_class(self, module: str, name: str) -> Name:
        """Return a name if formats of tensors use it; otherwise raise an error."""
        if module.split(".")[0] not in _MODULES and (module, name) != _DICT:
            raise pickle.UnpicklingError(f"{shorten(module)}.{shorten(name)} is not allowed in such a file")
        return Name(module, name)

    def load_reduce(self) -> None:
        """Replace a call of a name by a shell, and reject any other call."""
        args = self.stack.pop()
        called = self.stack.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise pickle.UnpicklingError("a call of something other than a name")
        if (called.module, called.name) != _DICT:
            self.stack.append(Shell(called, args))
        elif not args:
            self.stack.append({})
        else:
            raise pickle.UnpicklingError("an OrderedDict with initial content")

    def load_build(self) -> None:
        """Store a shell's state."""
        state = self.stack.pop()
        built = self.stack[-1]
        if isinstance(built, Shell) and built.state is None:
            built.state = state
        elif not isinstance(built, dict):
            raise pickle.UnpicklingError("state of an object without state")

    def load_setitem(self) -> None:
        """Store one item of a dictionary."""
        value = self.stack.pop()
        key = self.stack.pop()
        self._store([key, value])

    def load_setitems(self) -> None:
        """Store several items of a dictionary."""
        self._store(self.pop_mark())

    def load_additems(self) -> None:
        """Add the members of a set."""
        members = self.pop_mark()
        target = self.stack[-1]
        if not isinstance(target, set) or not all(map(_is_key, members)):
            raise pickle.UnpicklingError("a malformed set")
        target.update(members)

    def _store(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(map(_is_key, items[::2])):
            raise pickle.UnpicklingError("a dictionary with unsupported keys")
        target.update(zip(items[::2], items[1::2], strict=True))

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_reduce  # its arguments on the stack are the same
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems


def _is_key(key: object) -> bool:
    """Return whether a key can be hashed without recursion. Hashing deeply nested tuples crashes the interpreter."""
    return isinstance(key, str | int | Name | Shell | type(None))


def read_pickle(data: bytes) -> Any:
    """Return the inert content of a pickle: plain values, names and shells.

    Raises:
        ValueError: the pickle is damaged, or contains objects that formats of tensors do not use.
    """
    try:
        return _Reader(BytesIO(data)).load()
    except Exception as error:  # an unpickler may raise any exception
        text = f"opcode {error} is not supported" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(shorten(text, 200)) from error


def save_values(values: dict[str, Any], path: Path) -> None:
    """Write plain values in the format of Megatron's ``common.pt``."""
    torch.save(values, path)


def save_chunk(value: torch.Tensor | list[None], file: BinaryIO) -> None:
    """Append a tensor, or an empty object, to a ``.distcp`` file."""
    torch.save(value, file)


def save_index(index: metadata.Metadata, path: Path) -> None:
    """Write the ``.metadata`` of a distributed checkpoint."""
    path.write_bytes(pickle.dumps(index))
