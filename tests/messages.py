"""Assert that a message names the field, its value and the remedy, in any wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

Names = object  # a name or a tuple of names


def assert_names(message: object, *, field: Names = (), value: Names = (), remedy: Names = ()) -> None:
    """Assert that a message contains each of these as a whole name or number. ``step=10`` does not contain ``step=1``."""
    text = str(message)
    for role, names in (("field", field), ("value", value), ("remedy", remedy)):
        for name in names if isinstance(names, tuple) else (names,):
            assert _is_named(str(name), text), f"the {role} {name!s} is not named in: {text}"


@contextmanager
def expect_error(
    error: type[BaseException], *, field: Names = (), value: Names = (), remedy: Names = ()
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error whose message names these, as in :func:`assert_names`."""
    assert (field, value, remedy) != ((), (), ()), "name something"
    with pytest.raises(error) as caught:
        yield caught
    assert_names(caught.value, field=field, value=value, remedy=remedy)


def _is_named(name: str, text: str) -> bool:
    before = r"(?<![\w.])" if name[:1].isalnum() else ""
    after = r"(?!\w|\.\d)" if name[-1:].isalnum() else ""
    return re.search(before + re.escape(name) + after, text) is not None
