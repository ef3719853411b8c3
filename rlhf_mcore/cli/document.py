"""Hand the resolved configuration from the process that starts a run to its ranks.

The document lives in memory of the starter, as a file without a name: a kill leaves nothing behind, and other users cannot read the
secrets in it. Ranks open it by the starter's process id, and import the schema, not what reads and checks files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.redaction import FromEnvironment

_ENVIRONMENT = "!environment"  # a text from there, and how it was written


class _Dumper(yaml.SafeDumper):
    """Plain values, and texts from the environment."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Read what ``_Dumper`` writes."""


_Dumper.add_representer(
    FromEnvironment, lambda dumper, text: dumper.represent_sequence(_ENVIRONMENT, [str(text), text.shown])
)
_Loader.add_constructor(_ENVIRONMENT, lambda loader, node: FromEnvironment(*loader.construct_sequence(node)))


@contextmanager
def offer(cfg: Config) -> Iterator[Path]:
    """Offer ``cfg`` to processes that this one starts. Yields the path that they call ``receive`` with."""
    with os.fdopen(os.memfd_create("rlhf_mcore-config"), "w", encoding="utf-8") as file:
        yaml.dump(to_dict(cfg), file, _Dumper)
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def receive(path: str | Path) -> Config:
    """Build the configuration that the starter of this process offers."""
    text = Path(path).read_text(encoding="utf-8")
    return Config.read(yaml.load(text, _Loader))  # noqa: S506 (a SafeLoader with one more tag)
