"""Rules among the keys of ``environment``."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mcore.config.choices import ENVIRONMENTS, is_file_spec
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.tool_schemas import read_tools
from rlhf_mcore.config.user_functions import function_problems


def environment_problems(cfg: Config) -> Iterator[str]:
    """List the problems with the environment of a run: its function, its tools, its tokens."""
    own = cfg.environment
    if own.function is None:
        return
    if own.function not in ENVIRONMENTS and not is_file_spec(own.function):
        yield f"environment.function={own.function} is neither path/to/file.py:Class nor one of {', '.join(ENVIRONMENTS)}; correct it"
    elif own.function not in ENVIRONMENTS:
        yield from map(FileProblem, function_problems(own.function, "environment.function"))
    try:
        read_tools(own.tools)
    except ConfigError as error:
        yield FileProblem(str(error))
    if own.max_tokens is not None and own.max_tokens < cfg.rollout.sampling.max_new_tokens:
        yield (
            f"environment.max_tokens={own.max_tokens} of an episode is less than rollout.sampling.max_new_tokens="
            f"{cfg.rollout.sampling.max_new_tokens} of one turn; raise it, or lower that"
        )
