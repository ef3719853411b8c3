"""The one file that reads and writes pickles, because formats of others are made of them.

Reading imports nothing and calls nothing. Names of classes and functions become ``Name``, and a call of them becomes a ``Shell``
with the arguments. Only an allow-list of opcodes is known. The reader is Python's own, in its form written in Python: its memory
grows with the bytes of the pickle, and not with numbers in them (a memo index, a length).
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
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "POP",
    "POP_MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "EMPTY_DICT",
    "EMPTY_LIST",
    "EMPTY_TUPLE",
    "EMPTY_SET",
    "APPEND",
    "APPENDS",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
    "BINGET",
    "LONG_BINGET",
    "GLOBAL",
    "STACK_GLOBAL",
    "BINPERSID",
]
# Where the names come from that formats of tensors are made of; of no other module a name has a meaning in them.
_MODULES = ("torch", "megatron", "pathlib")
_DICT = ("collections", "OrderedDict")


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names. It is not looked up."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Shell:
    """A call of ``name`` that was not made, with its arguments and the state for its result."""

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
        """Return a name, if a format of tensors has it."""
        if module.split(".")[0] not in _MODULES and (module, name) != _DICT:
            raise pickle.UnpicklingError(f"{shorten(module)}.{shorten(name)} has no place in such a file")
        return Name(module, name)

    def persistent_load(self, pid: Any) -> Shell:
        """Return a storage of ``torch.save`` as a shell."""
        if not isinstance(pid, tuple):
            raise pickle.UnpicklingError("a storage without a description")
        return Shell(Name("", "storage"), pid)

    def load_reduce(self) -> None:
        """Make a shell of a call of a name, and refuse any other call."""
        args = self.stack.pop()
        called = self.stack.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise pickle.UnpicklingError("a call of what is no name")
        if (called.module, called.name) != _DICT:
            self.stack.append(Shell(called, args))
        elif not args:
            self.stack.append({})
        else:
            raise pickle.UnpicklingError("an OrderedDict that is made of other things")

    def load_build(self) -> None:
        """Keep the state of a shell. A dictionary of tensors has the versions of modules as state, and nobody needs them."""
        state = self.stack.pop()
        built = self.stack[-1]
        if isinstance(built, Shell) and built.state is None:
            built.state = state
        elif not isinstance(built, dict):
            raise pickle.UnpicklingError("state of what has none")

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
            raise pickle.UnpicklingError("an odd set")
        target.update(members)

    def _store(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(map(_is_key, items[::2])):
            raise pickle.UnpicklingError("a dictionary with odd keys")
        target.update(zip(items[::2], items[1::2], strict=True))

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_reduce  # the same arguments on the stack
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems


def _is_key(key: object) -> bool:
    """Tell whether a key can be hashed without following it: hashing a tuple of tuples of ... ends in a crash."""
    return isinstance(key, str | int | Name | Shell | type(None))


def read_pickle(data: bytes) -> Any:
    """Return the inert content of a pickle: plain values, names and shells.

    Raises:
        ValueError: it is damaged, or holds what formats of tensors do not.
    """
    try:
        return _Reader(BytesIO(data)).load()
    except Exception as error:  # an unpickler fails in every way there is
        text = f"opcode {error} is not read" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(shorten(text, 200)) from error


def save_values(values: dict[str, Any], path: Path) -> None:
    """Write plain values as Megatron's ``common.pt`` holds them."""
    torch.save(values, path)


def save_chunk(value: torch.Tensor | list[None], file: BinaryIO) -> None:
    """Append a tensor, or an empty object, to a ``.distcp`` file."""
    torch.save(value, file)


def save_index(index: metadata.Metadata, path: Path) -> None:
    """Write the ``.metadata`` of a distributed checkpoint."""
    path.write_bytes(pickle.dumps(index))
