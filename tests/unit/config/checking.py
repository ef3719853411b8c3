"""Validate a small configuration with a few changed settings."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import WrongValues, load_config
from rlhf_mcore.config.validate import report_all, validate


def check(*overrides: str, world_size: int | None = None) -> list[str]:
    """Return the problems of run.yaml with these overrides."""
    try:
        validate(load_config("run.yaml", overrides), world_size)
    except WrongValues as error:
        return report_all(error, world_size).problems
    except ConfigError as error:
        return error.problems
    return []


def only(problems: Sequence[str]) -> str:
    assert len(problems) == 1, problems
    return problems[0]
