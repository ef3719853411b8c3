"""Python values as JSON lines, between a test and the tested code. Nothing is pickled or evaluated.

Plain values are sent as copies without their class. For example, a subclass of ``int`` whose ``__eq__`` is always true
arrives as an int. Other objects stay in their process, which sends a number instead.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

MAX_LINE_BYTES = 2**26
MAX_INT_CHARS = 2**20  # hexadecimal digits of an int
# Hexadecimal digits per term of a Fraction, whose terms are divided by their greatest common divisor; and digits of a Decimal.
MAX_TERM_CHARS = 2**14
MAX_EXPONENT = 10**5  # limit for a Decimal; a comparison with a Fraction expands it
MAX_SAME_HASHES = 100  # per set or dict, which compares items with equal hashes with each other
_SAFE_INT = 2**53
Keep = Callable[[Any], Any]  # returns the message for an object that is not plain


def refuse(value: Any) -> Any:
    """The ``Keep`` for a side that cannot pass objects. It always raises TypeError."""
    raise TypeError(f"a {type(value).__name__} cannot be passed to the code under test")


def to_json(value: Any, keep: Keep = refuse) -> Any:
    """Convert a value to JSON. A value without a JSON form becomes an object with one key, the name of its type."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_SAFE_INT <= number <= _SAFE_INT else {"int": hex(number)}
    if isinstance(value, float):
        real = float.__float__(value)
        return real if math.isfinite(real) else {"float": repr(real)}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            items = [to_json(item, keep) for item in kind.__iter__(value)]
            return items if name == "list" else {name: items}
    if isinstance(value, dict):
        return {"dict": [[to_json(key, keep), to_json(item, keep)] for key, item in dict.items(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [to_json(value.real), to_json(value.imag)]}
    if isinstance(value, Decimal):
        return {"Decimal": str(value)}
    if isinstance(value, Fraction):
        return {"Fraction": [to_json(value.numerator), to_json(value.denominator)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufcU":
        return to_json(value.item(), keep)
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"array": [value.dtype.str, to_json(value.tolist(), keep)]}
    return keep(value)


_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def from_json(value: Any, kept: Callable[[str, Any], Any]) -> Any:
    """Convert the result of ``to_json`` back to a value. ``kept(name, content)`` converts objects with other names.

    The text may be hostile. Nothing is imported, no allocation is larger than the text, and numbers are bounded before they are
    created.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, RecursionError: the text is not a result of ``to_json``, or exceeds a
        limit.
    """
    if isinstance(value, list):
        return [from_json(item, kept) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in ("tuple", "set", "frozenset"):
        items = [from_json(item, kept) for item in _of_type(content, list)]
        return _SEQUENCES[name](items if name == "tuple" else _hashable(items))
    if name == "dict":
        keys = _hashable([from_json(key, kept) for key, _ in _of_type(content, list)])
        return dict(zip(keys, (from_json(item, kept) for _, item in content), strict=True))
    if name in _FROM_TEXT:
        return _FROM_TEXT[name](_of_type(content, str))
    if name in ("complex", "Fraction", "range"):
        return _of_numbers(name, _of_type(content, list))
    return kept(name, content)


def _of_type(content: Any, kind: type) -> Any:
    if type(content) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {type(content).__name__}")
    return content


def _hashable(items: list[Any]) -> list[Any]:
    """Check that items can quickly be put into a set or become the keys of a dict. Return them."""
    hashes = sorted(map(hash, items))
    if any(first == last for first, last in zip(hashes, hashes[MAX_SAME_HASHES:], strict=False)):
        raise ValueError(f"more than {MAX_SAME_HASHES} items share one hash")
    return items


def _int(text: str) -> int:
    if len(text) > MAX_INT_CHARS:
        raise ValueError(f"an int of {len(text)} characters")
    return int(text, 16)


def _float(text: str) -> float:
    return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[text]


def _decimal(text: str) -> Decimal:
    match = _DECIMAL.fullmatch(text)
    if match is None or len(text) > MAX_TERM_CHARS or abs(int(match[1] or 0)) > MAX_EXPONENT:
        raise ValueError(f"{text:.40} is not a Decimal, or too large")
    return Decimal(text)


def _of_numbers(name: str, content: list[Any]) -> complex | Fraction | range:
    """Build a number or a range from plain numbers. Texts are rejected, because ``Fraction("1e9999999")`` would be computed."""
    numbers = [from_json(item, _no_number) for item in content]
    kinds = (int, float) if name == "complex" else (int,)
    if any(type(number) not in kinds for number in numbers) or len(numbers) != (3 if name == "range" else 2):
        raise TypeError(f"{name}: wrong number or type of values")
    if name == "Fraction":
        if max(number.bit_length() for number in numbers) > 4 * MAX_TERM_CHARS:
            raise ValueError("a Fraction of too many digits")
        return Fraction(*numbers)
    return complex(*numbers) if name == "complex" else range(*numbers)


def _no_number(name: str, content: Any) -> Any:
    raise TypeError(f"{name} is not a number")


_DECIMAL = re.compile(
    r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[Ee]([+-]?[0-9]{1,9}))?|[+-]?(?:Infinity|s?NaN[0-9]{0,9})", re.ASCII
)
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": _int,
    "float": _float,
    "Decimal": _decimal,
    "bytes": bytes.fromhex,
}


def array_from_json(content: Any, kept: Callable[[str, Any], Any]) -> Any:
    """Convert the content of an "array" object of ``to_json`` back to a NumPy array."""
    kind, items = content
    if not re.fullmatch(r"[<>|=]?[biufc][0-9]{1,2}", kind):
        raise ValueError(f"array type {kind!r:.20} is not supported")
    return importlib.import_module("numpy").array(from_json(items, kept), dtype=kind)


def update(value: Any, now: Any) -> None:
    """Update a mutable container in place to ``now``, after a call that may have changed it."""
    if isinstance(value, list) and isinstance(now, list):
        value[:] = now
    elif isinstance(value, dict | set) and isinstance(now, Mapping | Set):
        value.clear()
        value.update(now)


class Channel:
    """JSON lines to and from the other side."""

    def __init__(self, stream_in: BinaryIO, stream_out: BinaryIO) -> None:
        self._in, self._out = stream_in, stream_out

    def send(self, message: Any) -> None:
        self._out.write(json.dumps(message).encode("ascii") + b"\n")
        self._out.flush()

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: the other side has ended, or has sent an invalid message.
        """
        line = self._in.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the code under test has ended")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EOFError("the code under test has sent an invalid message") from error
