"""Parse ids of the Hugging Face hub and find them in the local cache."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PART = r"[A-Za-z0-9][\w.-]*"
QUICKSTART_MODEL = "quickstart/model"  # a path in configs/quickstart that looks like an id
_MODEL = re.compile(rf"(?P<repo>{_PART}/{_PART})(@(?P<revision>[\w./-]+))?")
_DATA = re.compile(rf"(?P<repo>{_PART}/{_PART})(/(?P<config>{_PART}))?(@(?P<revision>[\w./-]+))?(:(?P<split>{_PART}))?")
_SNAPSHOT = re.compile(
    r"/(?P<kind>models|datasets)--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(/|$)"
)


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository on the Hub, with revision (a commit, branch or tag), configuration and split."""

    kind: str  # model | dataset
    repo: str
    revision: str = "main"
    config: str | None = None
    split: str | None = None

    @property
    def folder(self) -> Path:
        """The repository's folder in the local cache."""
        from huggingface_hub.constants import HF_HUB_CACHE

        return Path(HF_HUB_CACHE, f"{self.kind}s--{self.repo.replace('/', '--')}")

    def find_snapshot(self) -> Path | None:
        """Return the revision's snapshot in the local cache, or None. The snapshot may be incomplete."""
        commit = self.revision
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            try:
                commit = (self.folder / "refs" / commit).read_text(encoding="ascii").strip()
            except (OSError, ValueError):
                return None
        snapshot = self.folder / "snapshots" / commit
        return snapshot if re.fullmatch(r"[0-9a-f]{40}", commit) and snapshot.is_dir() else None

    def command(self) -> str:
        """Return the command that downloads the repository, or creates the quickstart's model."""
        if self.repo == QUICKSTART_MODEL:
            return "python tools/make_quickstart.py"
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        return f"HF_HUB_OFFLINE=0 hf download {self.repo}{kind}" + (
            f" --revision {self.revision}" if self.revision != "main" else ""
        )


def model_id(path: str) -> HubId | None:
    """Return the model id in a path, or None if it has another form, or if the path or its first folder exists locally."""
    match = _MODEL.fullmatch(path)
    if match is None or os.path.lexists(path) or os.path.lexists(path.partition("/")[0]):
        return None
    return HubId("model", match["repo"], match["revision"] or "main")


def data_id(path: str) -> HubId | None:
    """Return the data set id in a path, or None, as ``model_id``: ``ORG/NAME``, ``ORG/NAME:test``, ``ORG/NAME/CONFIG:test``."""
    match = _DATA.fullmatch(path)
    if match is None or path.endswith((".parquet", ".jsonl")) or os.path.lexists(path.partition("/")[0]):
        return None
    return HubId("dataset", match["repo"], match["revision"] or "main", match["config"], match["split"])


def id_of_snapshot(path: str) -> HubId | None:
    """Return the id with its commit for a path in a Hub cache, or None for other paths."""
    match = _SNAPSHOT.search(path)
    if match is None:
        return None
    return HubId(match["kind"].removesuffix("s"), f"{match['org']}/{match['name']}", match["commit"])


def absent_hint(path: str, *, is_data: bool = False) -> str:
    """Return a suffix for messages about a missing path: the download command if it may be a Hub id, else ""."""
    hub_id = (data_id if is_data else model_id)(path)
    if hub_id is None:
        return ""
    from huggingface_hub.constants import HF_HUB_CACHE

    return f". As an id of the Hugging Face hub it is not in the cache {HF_HUB_CACHE}, and HF_HUB_OFFLINE=1: {hub_id.command()}"
