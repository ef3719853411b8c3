"""Configurations in Python: the classes of ``config.schema``, and YAML files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlhf_mcore.api.arguments import checked_flag, checked_list, checked_path, refusal
from rlhf_mcore.config import load
from rlhf_mcore.config.schema import Config as Config


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, without_model: bool = False) -> Config:
    """Read a configuration from a YAML file. Null values that mean "derived" stay null.

    Args:
        path: path of the file.
        overrides: further settings, ["a.b=c", ...], as on the command line.
        without_model: allow a configuration without ``model.path``, which is then "none".

    Raises:
        ConfigError: the file is invalid. The message lists all unknown keys, wrong types, unresolved references and missing values.
    """
    file, texts = (
        checked_path("path", path),
        checked_list("overrides", overrides, "texts such as 'trainer.num_steps=5'"),
    )
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise refusal("overrides", wrong[0], "give a list of texts such as 'trainer.num_steps=5'")
    return load.load_config(file, texts, without_model=checked_flag("without_model", without_model))
