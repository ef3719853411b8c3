"""The values of keys that name functions: one of ours, ``path/to/file.py:name``, or one that was given from Python."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any


class OwnFunction(str):
    """The value of a key that names a function, where the function itself was given from Python: it is called in this process."""

    function: Callable[..., Any]

    def __new__(cls, function: Callable[..., Any]) -> OwnFunction:
        text = super().__new__(cls, f"python:{getattr(function, '__qualname__', type(function).__qualname__)}")
        text.function = function
        return text

    def __deepcopy__(self, memo: object) -> OwnFunction:
        return self

    def fingerprint(self) -> str:
        """Hash a function's name, its code, and the user's own values that the code reads."""
        from rlhf_mcore.config.function_digest import function_digest

        return hashlib.sha256(f"{self} {function_digest(self.function)}".encode()).hexdigest()


def is_file_spec(text: str) -> bool:
    """Tell whether a value names a function of a file, rather than one of ours."""
    return ":" in text or text.endswith(".py")
