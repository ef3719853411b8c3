"""Groups of ``reward``: what is outside of the trainer's machine (a server, a judge, Ray)."""

from __future__ import annotations

import re
from typing import Optional

from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.key import ABOVE_0, AT_LEAST_1, FINITE, key

SCORE = r"(?i)score[\s:=*_]{0,6}(-?[0-9]+(?:\.[0-9]+)?)"
RESPONSE = "{response}"
_TRY = "for one try of a request; a request has at most 5 tries, and 5 times as long for all of them"


def is_address(text: str) -> bool:
    """Return whether a text is ``host:port``."""
    port = re.fullmatch(r"[^:]+:(\d{1,5})", text)
    return port is not None and 1 <= int(port[1]) <= 65535


class RemoteRewardConfig(Group):
    """A server that scores responses; it replaces the rules."""

    url: Optional[str] = key(
        None,
        "where responses are posted to, such as `http://127.0.0.1:8900/score`",
        null="none",
        more="`rlhf-mcore serve-reward` is such a server; [rewards](guide/rewards/services.md) has what others have to do.",
    )
    token_env: Optional[str] = key(None, "environment variable that holds the server's token", null="none")
    batch_size: int = key(32, "responses of a request", AT_LEAST_1)
    concurrency: int = key(8, "requests of a rank at a time", AT_LEAST_1)
    timeout_s: float = key(60.0, _TRY, ABOVE_0)


class JudgeConfig(Group):
    """A language model that grades responses by a rubric; its grade is added."""

    url: Optional[str] = key(None, "base of an OpenAI-compatible API, such as `http://127.0.0.1:8000/v1`", null="none")
    model: Optional[str] = key(None, "name of the model there", null="has to be set with `url`")
    weight: float = key(1.0, "factor of its grade, which is between 0 and 1", FINITE)
    rubric: Optional[str] = key(
        None,
        "what the judge is told, with `{response}`, and `{prompt}`, `{ground_truth}` and `{data_source}`; or the path of a text file "
        "with it",
        null="a rubric of our own",
        more="A text without `{response}` is a path.",
    )

    @property
    def rubric_file(self) -> str | None:
        """The file of the rubric, unless it is written in the configuration."""
        return None if self.rubric is None or RESPONSE in self.rubric else self.rubric

    images: bool = key(False, "show a judge that reads images those of the prompt, before the rubric")
    parse: str = key(SCORE, "RE2 expression whose first group is the score; its last match in the answer counts")
    max_score: float = key(10.0, "the best score; scores from 0 to this become grades from 0 to 1", ABOVE_0)
    max_tokens: int = key(1024, "longest answer of the judge", AT_LEAST_1)
    token_env: Optional[str] = key(None, "environment variable that holds the API's key", null="none")
    concurrency: int = key(16, "requests of a rank at a time", AT_LEAST_1)
    timeout_s: float = key(120.0, _TRY, ABOVE_0)


class RewardRayConfig(Group):
    """Set what the workers of a Ray cluster take."""

    cpus_per_worker: float = key(1.0, "under Ray: cores that Ray counts for a worker; 0.1 for one that waits", ABOVE_0)
