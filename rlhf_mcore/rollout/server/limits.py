"""State what a run with servers has to be told, and what servers do not tell it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


def model_problems(cfg: Config) -> Iterator[str]:
    """Name what keeps servers from drawing for a resolved configuration. None of them is asked."""
    urls = cfg.rollout.server.urls
    if not urls:
        yield "rollout.engine=server needs rollout.server.urls; list the servers, such as [http://10.0.0.7:8000]"
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            yield f"rollout.server.urls has {url!r}, which is no address of a server; give http://host:port"
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield f"rollout.server.urls has {url!r} more than once; list each server once"
    if cfg.rollout.server.weights_dir is None:
        yield (
            "rollout.engine=server needs rollout.server.weights_dir; name a directory that trainer and servers see at one path"
        )
    variable = cfg.rollout.server.token_env
    if variable is not None and not os.environ.get(variable):
        yield f"rollout.server.token_env={variable!r}: that environment variable is not set; export it, or set the key to null"
    sampling = cfg.rollout.sampling
    if sampling.top_p != 1 or sampling.top_k != -1:
        yield (
            f"rollout.sampling.top_p={sampling.top_p:g}, top_k={sampling.top_k}: rollout.engine=server does not tell what a token "
            "was drawn from; set them to 1 and -1"
        )
