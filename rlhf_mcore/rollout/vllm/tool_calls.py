"""Calls of tools in what the policy has written, found by vLLM's own parsers."""

from __future__ import annotations

import ast
import copy
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rollout.engine import DEBUG_VARIABLE
from rlhf_mcore.rollout.vllm.environment import prepare_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "environment.tool_parser"
_TABLE = "_TOOL_PARSERS_TO_REGISTER"


def check_tool_parser(name: str) -> None:
    """Look a parser up in vLLM's table, which is read and not imported: an import takes long, and has effects on the process.

    Raises:
        ConfigError: vLLM is not installed, or has no such parser.
    """
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{KEY}={name} is a parser of vLLM's, which is not installed here; install it, or set null and let the environment read "
            "calls from the text of a turn"
        )
    names: list[str] = []
    with suppress(OSError, SyntaxError, ValueError):  # another vLLM keeps its table elsewhere: the engine looks again
        source = Path(spec.submodule_search_locations[0], "tool_parsers", "__init__.py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == _TABLE for target in node.targets):
                names = sorted(ast.literal_eval(node.value))
    if names and name not in names:
        raise _unknown(name, names)


def _unknown(name: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(f"{KEY}={name} is no parser of the installed vLLM; choose from {', '.join(names)}")


class ToolCallParser:
    """The text of a turn -> a message as in OpenAI's API.

    Args:
        name: as of vLLM's ``--tool-call-parser``.
        tools: the schemas that the prompt was rendered with.

    Raises:
        ConfigError: vLLM has no such parser, or it does not fit the tokenizer.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        prepare_environment()
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        if name not in ToolParserManager.list_registered():
            raise _unknown(name, ToolParserManager.list_registered())
        if DEBUG_VARIABLE not in os.environ:
            for logger in (
                "vllm.tool_parsers",
                "vllm.parser",
            ):  # a traceback for each call that the policy has misspelt
                logging.getLogger(logger).setLevel(logging.CRITICAL)
        self._class = ToolParserManager.get_tool_parser(name)
        self._request = ChatCompletionRequest(messages=[], model="", tools=list(tools) or None)
        vocabulary = tokenizer.get_vocab()
        self._tokenizer = copy.copy(tokenizer)
        self._tokenizer.get_vocab = lambda: vocabulary  # made anew at each call, of all tokens
        try:
            self._parse("")
        except Exception as error:
            reason = str(error).rstrip(".")
            raise ConfigError(
                f"{KEY}={name} does not fit the tokenizer of the model: {reason}; choose the parser of the model's family"
            ) from error

    def __call__(self, text: str) -> dict[str, Any]:
        """Parse a response into ``{"role": "assistant", "content", "tool_calls"}``; ``text`` has special tokens, but not the one
        that ends the turn.

        ``tool_calls`` are ``{"id", "type": "function", "function": {"name", "arguments"}}`` with arguments as a JSON text. What no
        parser can read is content.
        """
        try:
            return self._parse(text)
        except Exception:  # the policy can write what a parser does not expect, as JSON nested 1,000 deep
            return {"role": "assistant", "content": text, "tool_calls": []}

    def _parse(self, text: str) -> dict[str, Any]:
        parser = self._class(self._tokenizer, self._request.tools)  # it keeps what it has seen
        parsed = parser.extract_tool_calls(text, self._request)
        calls = [
            {"id": f"call_{place}", "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for place, each in enumerate(call.function for call in parsed.tool_calls)
        ]
        return {"role": "assistant", "content": parsed.content or "", "tool_calls": calls}
