"""The engine for external vLLM servers. Tokens are sent over HTTP, and servers read weights from a directory.

Start with ``engine``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhf_mcore.config.engine_kinds import EngineKind
from rlhf_mcore.redaction import without_secrets

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import ModelConfig, RolloutConfig
    from rlhf_mcore.geometry import ModelGeometry
    from rlhf_mcore.rollout.engine import AnsweringEngine, EngineModel


@dataclass(frozen=True, slots=True)
class _Server(EngineKind):
    def model_problems(
        self, cfg: RolloutConfig, model: ModelConfig, geometry: ModelGeometry, *, records_routes: bool
    ) -> Iterator[str]:
        return _problems(cfg)

    def build(self, cfg: RolloutConfig, model: EngineModel) -> AnsweringEngine:
        from rlhf_mcore.rollout.server.engine import ServerEngine

        return ServerEngine(cfg, model)


KIND = _Server(
    "server",
    runs_apart=False,
    weights="full",
    temperatures=(0.01, 2.0),
    own_keys=("rollout.server",),
)


def _problems(cfg: RolloutConfig) -> Iterator[str]:
    """Yield the problems of settings that servers do not support. No request is sent to a server."""
    urls = cfg.server.urls
    if not urls:
        yield "rollout.engine=server needs rollout.server.urls; list the servers, such as [http://10.0.0.7:8000]"
    for url in urls:
        if not _is_address(url):
            yield f"rollout.server.urls has {without_secrets(url)!r}, which is not a server address; use http://host:port"
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield f"rollout.server.urls has {without_secrets(url)!r} more than once; list each server once"
    if cfg.server.weights_dir is None:
        yield (
            "rollout.engine=server needs rollout.server.weights_dir; name a directory with one path on the trainer and the servers"
        )
    variable = cfg.server.token_env
    if variable is not None and not os.environ.get(variable):
        yield f"rollout.server.token_env={variable!r}: that environment variable is not set; export it, or set the key to null"
    sampling = cfg.sampling
    if sampling.top_p != 1 or sampling.top_k != -1:
        yield (
            f"rollout.sampling.top_p={sampling.top_p:g}, top_k={sampling.top_k}: rollout.engine=server does not report the "
            "candidates of each sampled token; set them to 1 and -1"
        )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an open bracket, or a port that is not a number
        return False
