"""Groups of ``reward`` for services on other machines: a server, a judge, Ray."""

from __future__ import annotations

import re
from typing import Optional

from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.key import ABOVE_0, AT_LEAST_1, FINITE, key

SCORE = r"(?i)score[\s:=*_]{0,6}(-?[0-9]+(?:\.[0-9]+)?)"
RESPONSE = "{response}"
_TRY = "time limit per attempt of a request in seconds; a request has at most 5 attempts within 5 times this limit"


def is_address(text: str) -> bool:
    """Return whether a text is ``host:port``."""
    port = re.fullmatch(r"[^:]+:(\d{1,5})", text)
    return port is not None and 1 <= int(port[1]) <= 65535


class RemoteRewardConfig(Group):
    """A server that scores responses; it replaces the rules."""

    url: Optional[str] = key(
        None,
        "URL to which responses are posted, such as `http://127.0.0.1:8900/score`",
        null="none",
        more="`rlhf-mcore serve-reward` is such a server; [rewards](guide/rewards/services.md) defines the protocol for other "
        "servers.",
    )
    token_env: Optional[str] = key(None, "environment variable that contains the server's token", null="none")
    batch_size: int = key(32, "responses per request", AT_LEAST_1)
    concurrency: int = key(8, "concurrent requests per rank", AT_LEAST_1)
    timeout_s: float = key(60.0, _TRY, ABOVE_0)


class JudgeConfig(Group):
    """A language model that grades responses with a rubric; its grade is added."""

    url: Optional[str] = key(
        None, "base URL of an OpenAI-compatible API, such as `http://127.0.0.1:8000/v1`", null="none"
    )
    model: Optional[str] = key(None, "name of the model at that URL", null="none; required with `url`")
    weight: float = key(1.0, "weight of its grade (between 0 and 1) in the sum", FINITE)
    rubric: Optional[str] = key(
        None,
        "prompt for the judge, with `{response}` and optionally `{prompt}`, `{ground_truth}` and `{data_source}`, or the "
        "path of a text file with it",
        null="the built-in rubric",
        more="A text without `{response}` is a path.",
    )

    @property
    def rubric_file(self) -> str | None:
        """The path of the rubric file, or None if the configuration contains the rubric."""
        return None if self.rubric is None or RESPONSE in self.rubric else self.rubric

    images: bool = key(False, "send the images of the prompt to the judge, before the rubric")
    parse: str = key(SCORE, "RE2 expression whose first group is the score; the last match in the answer is used")
    max_score: float = key(10.0, "highest score; scores from 0 to this value become grades from 0 to 1", ABOVE_0)
    max_tokens: int = key(1024, "maximum length of the judge's answer in tokens", AT_LEAST_1)
    token_env: Optional[str] = key(None, "environment variable that contains the API key", null="none")
    concurrency: int = key(16, "concurrent requests per rank", AT_LEAST_1)
    timeout_s: float = key(120.0, _TRY, ABOVE_0)


class RewardRayConfig(Group):
    """Set the resources of workers in a Ray cluster."""

    cpus_per_worker: float = key(
        1.0, "Ray: number of cores reserved per worker; use 0.1 for workers that wait for a service", ABOVE_0
    )
