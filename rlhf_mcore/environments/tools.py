"""Tools that the policy calls: a calculator, Python in the sandbox, search, and functions from a file.

A call is ``<tool>NAME ARGUMENT</tool>`` in the text of a turn. If ``environment.tool_parser`` is set, the parser finds the calls.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.user_functions import load_function
from rlhf_mcore.sandbox.calculator import calculator

KEY = "environment.options.tools"
_CALL = re.compile(r"<tool>\s*(\S+)(.*?)</tool>", re.DOTALL)
_WORD = re.compile(r"\w+")

BUILT_IN = ("calculator", "python", "search")
Tool = Callable[..., Any]
_Call = tuple[str, list[Any], dict[str, Any]]  # name of the tool, positional arguments, named arguments


class Tools:
    """An environment that runs the policy's tool calls. An episode ends with the first turn that calls no tool.

    All rewards are 0. Use ``environment.score: reward`` to score the last turn.

    Args:
        tools: ``calculator``, ``python``, ``search``, or functions from a file as ``path/to/file.py:name``. A function takes
            one text, or the named arguments of a parsed call.
        corpus: documents of ``search``: a .jsonl file with "text" in each line, or a text file with a document in each line.
        role: role of the messages with results.
        results: number of documents that a search returns.
        cpu_s: CPU seconds of a program of the policy.
        isolation: minimum isolation of a program of the policy: rlimits, filters or namespaces.
        max_chars: maximum characters of a result; the rest is cut off.
    """

    def __init__(
        self,
        tools: Sequence[str] = ("calculator",),
        corpus: str | None = None,
        role: str = "tool",
        results: int = 3,
        cpu_s: float = 5.0,
        isolation: str = "filters",
        max_chars: int = 2000,
    ) -> None:
        self._role, self._max_chars = role, max_chars
        self._tools: dict[str, Tool] = {}
        for name in tools:
            if name == "calculator":
                self._tools[name] = calculator
            elif name == "python":
                self._tools[name] = partial(run_program, cpu_s=cpu_s, isolation=isolation)
            elif name == "search":
                if corpus is None:
                    raise ConfigError(f"{KEY} contains 'search', which needs a corpus; set environment.options.corpus")
                self._tools[name] = partial(find_documents, read_corpus(corpus), results)
            elif ":" in name:
                self._tools[name.rpartition(":")[2]] = load_function(name, KEY)
            else:
                raise ConfigError(
                    f"{KEY}: {name!r} is not a tool; use calculator, python, search, or path/to/file.py:name"
                )

    def reset(self, row: Any, seed: int) -> None:
        """Return no observation. The prompt must describe the tools if the policy does not know them."""

    def step(self, action: str | Mapping[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        """Return one message for each tool call, reward 0, and whether the turn has no calls."""
        if isinstance(action, str):
            calls: list[_Call] = [(name, [argument.strip()], {}) for name, argument in _CALL.findall(action)]
        else:
            calls = [self._parse(call["function"]) for call in action["tool_calls"]]
        return [{"role": self._role, "content": self._call(*call)} for call in calls], 0.0, not calls

    def _parse(self, function: Mapping[str, str]) -> _Call:
        """Parse the arguments of a call.

        A built-in tool gets its only argument as a text. A function from a file gets named arguments. Arguments that cannot be
        parsed are passed as one text.
        """
        name, given = function["name"], function["arguments"]
        try:
            arguments = json.loads(given)
        except ValueError:
            return name, [given], {}
        if not isinstance(arguments, dict) or (name in BUILT_IN and len(arguments) != 1):
            return name, [given], {}
        return (name, [str(*arguments.values())], {}) if name in BUILT_IN else (name, [], arguments)

    def _call(self, name: str, arguments: list[Any], named: dict[str, Any]) -> Any:
        tool = self._tools.get(name)
        if tool is None:
            return f"there is no tool {name}; there is: {', '.join(self._tools)}"
        try:
            inspect.signature(tool).bind(*arguments, **named)
        except TypeError as error:  # the policy's mistake
            return f"error: {error}"
        result = tool(*arguments, **named)
        has_parts = isinstance(result, list) and any(
            isinstance(p, Mapping) and "image" in str(p.get("type")) for p in result
        )
        return result if has_parts else str(result)[: self._max_chars]


# ---------------------------------------------------------------------------------------------------------------- python
def run_program(code: str, cpu_s: float, isolation: str) -> str:
    """Run a program. Returns its standard output, followed by the error if it failed."""
    from rlhf_mcore.sandbox.run import Limits, run_python

    result = run_python(code, Limits(cpu_s=cpu_s), minimum=isolation)
    if result.ok:
        return result.stdout
    last = result.stderr.strip().splitlines()[-1:] or [result.detail or result.reason.value]
    return f"{result.stdout}{last[0]}"


# ---------------------------------------------------------------------------------------------------------------- search
class Index:
    """An index of documents, ranked by BM25 (Robertson and Zaragoza 2009, The Probabilistic Relevance Framework, eq. 3.15)."""

    k1, b = 1.2, 0.75

    def __init__(self, documents: Sequence[str]) -> None:
        self._documents = list(documents)
        self._lengths: list[int] = []
        self._places: dict[str, list[tuple[int, int]]] = {}  # word -> (index of a document, occurrences in it)
        for place, document in enumerate(self._documents):
            words = Counter(_words(document))
            self._lengths.append(words.total())
            for word, count in words.items():
                self._places.setdefault(word, []).append((place, count))
        self._mean_length = sum(self._lengths) / max(len(self._lengths), 1) or 1.0

    def search(self, query: str, results: int) -> list[str]:
        """Return the best documents, best first. Ties keep the order of the corpus."""
        scores: Counter[int] = Counter()
        for word in set(_words(query)):
            places = self._places.get(word, [])
            rarity = math.log(1 + (len(self._documents) - len(places) + 0.5) / (len(places) + 0.5))
            for place, count in places:
                norm = self.k1 * (1 - self.b + self.b * self._lengths[place] / self._mean_length)
                scores[place] += rarity * count * (self.k1 + 1) / (count + norm)  # type: ignore[assignment]
        best = sorted(scores, key=lambda place: (-scores[place], place))
        return [self._documents[place] for place in best[:results]]


def find_documents(index: Index, results: int, query: str) -> str:
    """Return the best documents as lines of a text."""
    return "\n".join(index.search(query, results)) or "nothing was found"


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


@lru_cache(maxsize=4)
def read_corpus(path: str) -> Index:
    """Read the documents of a file, once per process.

    Raises:
        ConfigError: the file cannot be read, or a line of a .jsonl file has no "text".
    """
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
        if not path.endswith(".jsonl"):
            return Index(lines)
        return Index([str(json.loads(line)["text"]) for line in lines])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"environment.options.corpus={path} cannot be read ({type(error).__name__}: {error}); give a .jsonl file with a "
            '"text" in each line, or a text file with a document in each'
        ) from error
