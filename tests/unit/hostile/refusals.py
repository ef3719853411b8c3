"""What every hostile input has to end in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhf_mcore.config.errors import ConfigError

LONGEST_MESSAGE = 10_000  # fifty problems of a line or two


def refusal(action: Callable[..., object], *args: object) -> str:
    """Return the message that ``action(*args)`` is rejected with: printable and short enough to be read."""
    with pytest.raises(ConfigError) as caught:
        action(*args)
    message = str(caught.value)
    assert len(message) <= LONGEST_MESSAGE
    assert message.replace("\n", "").isprintable()
    return message
