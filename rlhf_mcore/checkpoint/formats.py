"""Versions of a checkpoint's documents (manifest, trainer_state.json, dataloader.json) and the migrations between them.

A release writes ``VERSION`` and reads every version before it. To change what a document holds, raise ``VERSION`` and add a migration
from the version before: documents of all older versions then pass through it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_mcore.checkpoint.layout import TRAINER_STATE
from rlhf_mcore.config.errors import ConfigError

VERSION = 2

Migration = Callable[[str, dict[str, Any]], dict[str, Any]]
MIGRATIONS: dict[int, Migration] = {}


def migration(version: int) -> Callable[[Migration], Migration]:
    """Register a function (name of the document, its content) -> its content in the version after ``version``."""

    def register(function: Migration) -> Migration:
        assert version not in MIGRATIONS, f"version {version} has a migration already"
        MIGRATIONS[version] = function
        return function

    return register


def migrate(path: Path, content: dict[str, Any], version: Any) -> dict[str, Any]:
    """Migrate the content of a document from its version to ``VERSION``.

    Raises:
        ConfigError: this release does not know the version.
    """
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ConfigError(
            f"{path}: format version {version!r}, but this release reads versions 1 to {VERSION}; "
            "use the release that wrote it, or choose another checkpoint"
        )
    for number in range(version, VERSION):
        content = MIGRATIONS[number](path.name, content)
    return content


@migration(1)
def _add_inputs(document: str, content: dict[str, Any]) -> dict[str, Any]:
    """Add the fingerprints of the run's inputs and its last steps, which version 2 keeps: none are known."""
    return {"inputs": None, "recent": [], **content} if document == TRAINER_STATE else content
