"""Find tool calls in the policy's text with vLLM's own parsers."""

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
    """Look up a parser in vLLM's table. The table is read as text, because importing vLLM is slow and has side effects.

    Raises:
        ConfigError: vLLM is not installed, or has no such parser.
    """
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{KEY}={name} is a parser of vLLM, which is not installed here; install it, or set {KEY}=null and let the environment "
            "read calls from the text"
        )
    names: list[str] = []
    # Another vLLM version keeps its table elsewhere; the engine checks again.
    with suppress(OSError, SyntaxError, ValueError):
        source = Path(spec.submodule_search_locations[0], "tool_parsers", "__init__.py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == _TABLE for target in node.targets):
                names = sorted(ast.literal_eval(node.value))
    if names and name not in names:
        raise _unknown(name, names)


def _unknown(name: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(f"{KEY}={name} is not a parser of the installed vLLM; choose from {', '.join(names)}")


class ToolCallParser:
    """Converts the text of a turn to a message in the format of OpenAI's API.

    Args:
        name: a name of vLLM's ``--tool-call-parser``.
        tools: the schemas in the rendered prompt.

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
            ):  # they log a traceback for each malformed call
                logging.getLogger(logger).setLevel(logging.CRITICAL)
        self._class = ToolParserManager.get_tool_parser(name)
        self._request = ChatCompletionRequest(messages=[], model="", tools=list(tools) or None)
        vocabulary = tokenizer.get_vocab()
        self._tokenizer = copy.copy(tokenizer)
        # Computed once; otherwise each call would build it again from all tokens.
        self._tokenizer.get_vocab = lambda: vocabulary
        try:
            self._parse("")
        except Exception as error:
            reason = str(error).rstrip(".")
            raise ConfigError(
                f"{KEY}={name} does not fit the tokenizer of the model: {reason}; choose the parser of the model's family"
            ) from error

    def __call__(self, text: str) -> dict[str, Any]:
        """Parse a response into ``{"role": "assistant", "content", "tool_calls"}``.

        ``text`` contains special tokens, except the final token of the turn. ``tool_calls`` are ``{"id", "type": "function",
        "function": {"name", "arguments"}}`` with arguments as a JSON text. Text that the parser cannot read becomes the
        content.
        """
        try:
            return self._parse(text)
        except Exception:  # parsers fail on unexpected text of the policy, such as JSON nested 1,000 levels deep
            return {"role": "assistant", "content": text, "tool_calls": []}

    def _parse(self, text: str) -> dict[str, Any]:
        parser = self._class(self._tokenizer, self._request.tools)  # a new one for each text, because it has state
        parsed = parser.extract_tool_calls(text, self._request)
        calls = [
            {"id": f"call_{place}", "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for place, each in enumerate(call.function for call in parsed.tool_calls)
        ]
        return {"role": "assistant", "content": parsed.content or "", "tool_calls": calls}
