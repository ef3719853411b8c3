"""A user's function over the rows of data files, ``data.transform``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlhf_mcore.config.data_rows import RowLimits, read_rows
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.user_functions import load_function

Row = dict[str, Any]
Transform = Callable[[Row], Row | None]


def load_transform(spec: str | None) -> Transform | None:
    """The function that ``data.transform`` names; None where it is not set."""
    return None if spec is None else load_function(spec, "data.transform")


def transformed_rows(file: Path, limits: RowLimits, transform: Transform | None) -> Iterator[tuple[str, Row | None]]:
    """Yield (place, row) as ``read_rows``, every row passed through ``transform``; None for one that it leaves out.

    Raises:
        ConfigError: as ``read_rows``; the function fails, or returns something else than a row: naming the place.
    """
    for place, row in read_rows(file, limits):
        if transform is None:
            yield place, row
            continue
        try:
            made = transform(row)
        except Exception as error:
            raise ConfigError(
                f"{place}: data.transform failed ({type(error).__name__}: {error}); correct the function"
            ) from error
        if made is not None and not isinstance(made, dict):
            raise ConfigError(
                f"{place}: data.transform returned {type(made).__name__} {made!r:.60}, not a row (a dict) or None"
            )
        yield place, made
