"""What validation says of a small configuration with a few settings changed."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.validate import validate


def check(*overrides: str, world_size: int | None = None) -> list[str]:
    """The problems of run.yaml with these overrides."""
    try:
        validate(load_config("run.yaml", overrides), world_size)
    except ConfigError as error:
        return error.problems
    return []


def only(problems: Sequence[str]) -> str:
    assert len(problems) == 1, problems
    return problems[0]
