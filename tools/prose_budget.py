#!/usr/bin/env python3
"""Count systematic faults of the prose in code and pages, and compare the counts with a budget that may only fall.

    .venv/bin/python tools/prose_budget.py                    counts and budgets
    .venv/bin/python tools/prose_budget.py --list message     faults of a surface, with file and line
    .venv/bin/python tools/prose_budget.py --lower            write lower counts into tools/prose_budget.json

CONTRIBUTING.md, "Writing", has the rules. A rule matches phrases, so it is a mirror: read the sentence, and rewrite its meaning.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_suffix(".json")
GENERATED = "docs/reference/"  # their sentences are in the code
MAX_WORDS = 35  # in a sentence; 25 is the aim

_START = r"(?:^|(?<=[.:;] ))"  # the start of a sentence or a clause
_SUBJECT = r"(?:there|it|they|that|this|these|one|none|some|any|all|both|several|many|no|nothing|an?|the|its|each|every|\w+s)\b"
_PREPOSITION = (
    r"(?:of|from|by|with|in|on|for|than|and|but|is|are|has|have|reads?|takes?|keeps?|returns?|writes?|prints?|needs?)"
)
PHRASES = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "where instead of if": (
            rf"(?<!know)(?<!shows)(?<!says)(?<!see)(?<!place)(?<!file) where {_SUBJECT}"
            rf"|{_START}Where (?!is|are|do|does)[a-z]"
        ),
        "what as a noun": (
            rf"\b{_PREPOSITION} what\b(?! (?:if|to do|follows|happens))"
            rf"|{_START}What (?!is|are|does|do|did|to|if|happens)\w+ [^?]*$"
        ),
        "that of": r"\b(?:that|those) of\b(?! course)|\bthose (?:that|which|whose|it|they|in|with)\b",
        "genitive first": rf"{_START}Of (?!course)[a-z0-9`]|\b(?:is|are|was) of (?:an?|all|its|that|this|these|those|both|one)\b",
        "so many": r"\bso (?:many|much|long|often)\b(?!,? (?:that|as|more|far|it|they|the|a|we|you))",
        "old place": r"\bin the place of\b|\b(?:beside|behind) (?:it|them|these|those|that)\b|\ball the same\b|\bas ever\b",
        "draw": r"\b(?:draws?|drew|drawn|drawing)\b(?! (?:a |the |from a )?(?:chart|plot|line|diagram|curve|table|tree|distribution))",
        "old verb": (
            r"\b(?:brings?|brought|heard|mended?|tells?|told|let go|lets? (?:it|them) go"
            r"|gives? back|stands? for|of yours|of ours)\b"
        ),
        "negated noun": r"\b(?:nobody|somebody)\b|\bnone (?:is|are|was|were)\b|\b(?:what|one|that) is no\b",
    }.items()
}
_PRONOUN_FIRST = re.compile(r"(Those|That|What|One|It|They|Of|Where|Whether|None|The same|As)\b")
_BAD_NAME = re.compile(
    r"_?(?:[a-z]+ed|made|found|told|held|taken|left|sent|cut|kept|drawn|shown|known|given|done|beside|what_\w+|how|whose)$"
)
_MESSAGES = {
    "ConfigError",
    "ValueError",
    "RuntimeError",
    "TypeError",
    "Problem",
    "key",
    "add_argument",
    "command_parser",
    "say",
}


class Text(NamedTuple):
    """A piece of prose with its file, line and surface."""

    file: str
    line: int
    surface: str
    text: str


def texts_of(file: str, content: str) -> Iterator[Text]:
    """Yield the prose of a file."""
    read = _markdown if file.endswith(".md") else _python
    yield from (Text(file, *found) for found in read(content))


def _python(content: str) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, "name", node.name
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, "docstring", docstring
        if isinstance(node, ast.Call) and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in _MESSAGES:
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if len(_literal(argument)) > 14:
                    yield argument.lineno, "message", _literal(argument)
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#!|# (noqa|type:|pragma|-{5})", token.string):
            yield token.start[0], "comment", token.string.lstrip("# ")


def _literal(node: ast.expr) -> str:
    """Return the text of a string or an f-string, with X for its values."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "X" for part in parts
    )


def _markdown(content: str) -> Iterator[tuple[int, str, str]]:
    """Yield paragraphs, items of lists, and rows of tables."""
    content = re.sub(r"(?ms)^```.*?^```$|<!--.*?-->", lambda code: "\n" * code[0].count("\n"), content)
    paragraph = r"^(?!    |\t|#|\||\s*$).*(?:\n(?!\s*$|\s*[-*|#] |\s*\d+\. |    ).*)*"
    for found in re.finditer(rf"(?m)^\|(?!-).*$|{paragraph}", content):
        yield content.count("\n", 0, found.start()) + 1, "page", found[0]


def faults(surface: str, text: str) -> list[str]:
    """Name the faults of a text."""
    if surface == "name":
        return ["participle as a name"] if _BAD_NAME.match(text) else []
    plain = " ".join(re.sub(r"`+[^`]*`+|\]\([^)]*\)|\$[^$]*\$", "X", text).split())
    found = [name for name, pattern in PHRASES.items() for _ in pattern.finditer(plain)]
    sentences = re.split(r"[.!?](?:\s|$)|\|", plain)
    found += ["long sentence"] * sum(len(sentence.split()) > MAX_WORDS for sentence in sentences)
    if surface == "docstring" and _PRONOUN_FIRST.match(plain):
        found.append("pronoun first")
    return found


def find_faults() -> list[tuple[Text, str]]:
    """List the faults of all tracked files."""
    listed = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [file for file in listed.stdout.splitlines() if not file.startswith(GENERATED) and (ROOT / file).is_file()]
    found = []
    for file in files:
        for text in texts_of(file, (ROOT / file).read_text(encoding="utf-8")):
            found += [(text, fault) for fault in faults(text.surface, text.text)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--list", metavar="SURFACE", help="list the faults of docstring, comment, message, page or name"
    )
    parser.add_argument("--lower", action="store_true", help="write counts that are below their budgets")
    args = parser.parse_args()
    found = find_faults()
    counts = Counter(text.surface for text, _ in found)
    if args.list:
        for text, fault in found:
            if text.surface == args.list:
                print(f"{text.file}:{text.line}: {fault}: {' '.join(text.text.split())[:160]}")
        return 0
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    print(f"{'surface':12}{'faults':>8}{'budget':>8}")
    for surface, most in budget.items():
        print(f"{surface:12}{counts[surface]:>8}{most:>8}")
    if args.lower:
        lower = {surface: min(most, counts[surface]) for surface, most in budget.items()}
        BUDGET.write_text(json.dumps(lower, indent=2) + "\n", encoding="utf-8")
    return int(any(counts[surface] > most for surface, most in budget.items()))


if __name__ == "__main__":
    raise SystemExit(main())
