"""Words of a launch script: enough of the shell to read how a trainer is called. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

Variables = dict[str, list[str]]
_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\})")
_WHOLE_ARRAY = re.compile(r"^\$\{(\w+)\[[@*]\]\}$")


def script_words(text: str) -> list[str]:
    """All words of a script with its own variables filled in, comments and line continuations gone.

    A variable that the script does not set becomes ``${oc.env:NAME}``, which our configuration takes from the environment.
    """
    variables: Variables = {}
    words: list[str] = []
    for statement in _statements(text):
        assigned = _ASSIGNMENT.match(statement)
        if assigned and (value := _value(assigned[3], variables)) is not None:
            variables[assigned[1]] = [*(variables.get(assigned[1], []) if assigned[2] else []), *value]
        else:
            words += [word for raw in _split(statement) for word in _expanded(raw, variables)]
    return words


def _statements(text: str) -> Iterator[str]:
    """Lines, continued ones and arrays over several lines as one."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    pending = ""
    for line in re.sub(r"\\[ \t]*\n", " ", kept).splitlines():
        pending = f"{pending}\n{line}" if pending else line.strip()
        if _is_open(pending):
            continue
        if pending:
            yield pending
        pending = ""
    if pending:
        yield pending


def _is_open(statement: str) -> bool:
    array = _ASSIGNMENT.match(statement)
    if array and array[3].startswith("(") and not statement.rstrip().endswith(")"):
        return True
    try:
        shlex.split(statement, comments=True)
    except ValueError:  # a quotation goes on in the next line
        return True
    return False


def _split(statement: str) -> list[str]:
    try:
        return shlex.split(statement, comments=True)
    except ValueError:
        return statement.split()


def _value(text: str, variables: Mapping[str, list[str]]) -> list[str] | None:
    """The words of an assignment; None where a command follows it (``A=1 python ...``)."""
    if text.startswith("("):
        return [word for raw in _split(text.strip()[1:-1]) for word in _expanded(raw, variables)]
    words = _split(text)
    return [" ".join(_expanded(words[0], variables))] if len(words) == 1 else [""] if not words else None


def _expanded(word: str, variables: Mapping[str, list[str]]) -> list[str]:
    whole = _WHOLE_ARRAY.match(word)
    if whole:
        return list(variables.get(whole[1], []))

    def fill(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in variables:
            return " ".join(variables[name])
        return match[3] if match[3] is not None else f"${{oc.env:{name}}}"

    return [] if word in ("$@", "$*") else [_VARIABLE.sub(fill, word)]
