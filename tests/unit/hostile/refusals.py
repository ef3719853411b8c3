"""Every hostile input must end in a readable error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhf_mcore.config.errors import ConfigError

LONGEST_MESSAGE = 10_000  # fifty problems of a line or two


def refusal(action: Callable[..., object], *args: object) -> str:
    """Return the error message of ``action(*args)``, after checking that it is printable and short enough to read."""
    with pytest.raises(ConfigError) as caught:
        action(*args)
    message = str(caught.value)
    assert len(message) <= LONGEST_MESSAGE
    assert message.replace("\n", "").isprintable()
    return message
