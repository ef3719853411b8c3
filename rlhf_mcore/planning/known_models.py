"""Replace models that are not on this machine by the config.json of a well-known model with the same name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import isdir
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhf_mcore.config.schema import Config

KNOWN = Path(__file__).resolve().parents[2] / "configs" / "models"
_ENDS = re.compile(r"[-_.](reward|rm|critic|value|sft|instruct|chat)([-_.]?model)?$", re.IGNORECASE)


@contextmanager
def with_known_configs(cfg: Config) -> Iterator[list[str]]:
    """Within this block, point every missing model path to a directory with the config.json of a known model.

    An unknown reward model gets the size of ``model.path``. Yield a message for every replaced path.
    """
    notes: list[str] = []
    with TemporaryDirectory(prefix="rlhf-mcore-plan-") as directory:
        for key in ("model", "critic", "reference", "teacher"):
            owner = getattr(cfg, key)
            if _is_missing(owner.path) and (known := _by_name(str(owner.path))) is not None:
                notes.append(
                    f"{key}.path={owner.path} is not on this machine; planned with configs/models/{known.name}"
                )
                owner.path = str(known)
        reward = cfg.reward.model
        if _is_missing(reward.path):
            source = _by_name(str(reward.path)) or Path(cfg.model.path)
            if (source / "config.json").is_file():
                notes.append(
                    f"reward.model.path={reward.path} is not on this machine; planned as {source.name} with a scalar head"
                )
                reward.path = _with_scalar_head(source, Path(directory))
        yield notes


def _is_missing(path: str | None) -> bool:
    return path is not None and path != "???" and not isdir(path)


def _by_name(path: str) -> Path | None:
    """Find the well-known model whose name is the last part of a path, ignoring endings such as -reward."""
    if not KNOWN.is_dir():  # an installed package contains no configs directory
        return None
    known = {folder.name.lower(): folder for folder in KNOWN.iterdir()}
    name = Path(path).name.lower()
    return known.get(name) or known.get(_ENDS.sub("", name))


def _with_scalar_head(source: Path, directory: Path) -> str:
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    content["architectures"] = [
        re.sub("For[A-Z][A-Za-z]*$", "ForSequenceClassification", name) for name in content["architectures"]
    ]
    content |= {"num_labels": 1, "id2label": {"0": "score"}}
    (directory / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(directory)
