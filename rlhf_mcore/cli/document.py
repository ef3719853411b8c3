"""Pass the resolved configuration from the process that starts a run to its ranks.

The document is an unnamed file in the memory of the starting process. If that process is killed, no file remains, and other
users cannot read the secrets in it. Ranks open the document by the process id. They import only the schema, not the modules that
read and check files.
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

_ENVIRONMENT = "!environment"  # a value from an environment variable, with its original notation


class _Dumper(yaml.SafeDumper):
    """Dump plain values, and values from environment variables."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Load documents of ``_Dumper``."""


_Dumper.add_representer(
    FromEnvironment, lambda dumper, text: dumper.represent_sequence(_ENVIRONMENT, [str(text), text.shown])
)
_Loader.add_constructor(_ENVIRONMENT, lambda loader, node: FromEnvironment(*loader.construct_sequence(node)))


@contextmanager
def offer(cfg: Config) -> Iterator[Path]:
    """Offer ``cfg`` to child processes within the block. Yields the path that they pass to ``receive``."""
    with os.fdopen(os.memfd_create("rlhf_mcore-config"), "w", encoding="utf-8") as file:
        yaml.dump(to_dict(cfg), file, _Dumper)
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def receive(path: str | Path) -> Config:
    """Return the configuration that the parent process offers at ``path``."""
    text = Path(path).read_text(encoding="utf-8")
    return Config.read(yaml.load(text, _Loader))  # noqa: S506 (a SafeLoader with one more tag)
