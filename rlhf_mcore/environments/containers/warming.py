"""Prepare the containers of a run before it begins: tasks are read, images are pulled or built."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mcore.config.data_columns import row_limits
from rlhf_mcore.config.data_rows import mapping
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.source import load_transform, transformed_rows
from rlhf_mcore.environments.containers.kinds import containers_of, options_of
from rlhf_mcore.environments.containers.rows import task_of
from rlhf_mcore.environments.containers.task import Task

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


def warm(cfg: Config) -> None:
    """Read the tasks of all rows, and have what their containers need on this machine.

    Raises:
        ConfigError: naming the row whose task cannot be read, or what cannot be had.
    """
    containers = containers_of(options_of(cfg.environment))
    different = {(task.image, tuple(sorted(task.context.items()))): task for task in _tasks(cfg)}
    asyncio.run(containers.warm(different.values()))


def _tasks(cfg: Config) -> Iterator[Task]:
    limits, transform = row_limits(cfg.data), load_transform(cfg.data.transform)
    for file in (*cfg.data.train, *cfg.data.eval):
        for place, row in transformed_rows(Path(file), limits, transform):
            if row is None:
                continue
            try:
                yield task_of(mapping(row, "extra_info", place))
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from error
