"""Configurations in Python: the models of ``config.schema``, and YAML files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlhf_mcore.api.arguments import checked_flag, checked_list, checked_path, refusal
from rlhf_mcore.config import load
from rlhf_mcore.config.schema import Config as Config


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, without_model: bool = False) -> Config:
    """Read a configuration from a YAML file. Keys that are null for "derived" stay null.

    Args:
        path: of the file.
        overrides: further settings, ["a.b=c", ...], as on a command line.
        without_model: ``model.path`` need not be set, and is "none" then.

    Raises:
        ConfigError: all unknown keys, values of another type, references that do not resolve and missing values, at once.
    """
    file, texts = (
        checked_path("path", path),
        checked_list("overrides", overrides, "texts such as 'trainer.num_steps=5'"),
    )
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise refusal("overrides", wrong[0], "give a list of texts such as 'trainer.num_steps=5'")
    return load.load_config(file, texts, without_model=checked_flag("without_model", without_model))
