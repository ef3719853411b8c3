"""Words of a shell script: variables, parameter expansion, quoting, arithmetic and tests, on tree-sitter's syntax tree.

Nothing is run and no file is read. What only a run would know (the environment, the output of a command) is a marked name in a
value, empty in tests and in arithmetic an unknown, which ``named_unknowns`` turns into text for our configuration.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tree_sitter import Node

from rlhf_mcore.config.errors import ConfigError

MAX_VALUE = 1 << 16  # characters: A=$A$A in a loop doubles them every time
MAX_PATTERN = 256
ALWAYS_SET = ("HOME", "USER", "PWD", "LOGNAME", "HOSTNAME")  # in every login: no user has to set them
_OPEN, _CLOSE = "\ue000", "\ue001"  # around the name of something unknown; private characters, in no script
_UNKNOWN = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")
_FIXED = {"#": "0", "?": "0", "$": "1", "!": "", "-": "", "_": "", "RANDOM": "0", "SECONDS": "0"}
_ANSI_C = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


def unknown(name: str) -> str:
    """A placeholder for the value of the variable ``name``, or for what other words describe. It is one word."""
    return f"{_OPEN}{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_') + '?' if not name.isidentifier() else name}{_CLOSE}"


def is_unknown(text: str) -> bool:
    """Whether part of a value is not in the script."""
    return _OPEN in text


def without_unknowns(text: str) -> str:
    """A text as the shell has it where nothing is set."""
    return _UNKNOWN.sub("", text)


def named_unknowns(text: str) -> str:
    """A text for our configuration: variables come from the environment, other unknowns are spelt out.

    A variable that is not set must not keep the configuration from loading: the stand-in names it wherever it turns up.
    """

    def name(match: re.Match[str]) -> str:
        known = match[1]
        if known.endswith("?"):
            return f"{known[:-1]}_is_not_known"
        return f"${{oc.env:{known}}}" if known in ALWAYS_SET else f"${{oc.env:{known},{known}_is_not_set}}"

    return _UNKNOWN.sub(name, text)


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a word. Unquoted ones are split at spaces; several values are several words."""

    values: tuple[str, ...]
    quoted: bool


@dataclass(slots=True)
class Words:
    """The state of a script that its words depend on."""

    arguments: list[str] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    output_of: Callable[[Node], str | None] = lambda node: None  # of a command substitution; None: not known
    note: Callable[[Node, str], None] = lambda node, text: None

    # -------------------------------------------------------------------------------------------------------- variables
    def assign(self, name: str, values: Sequence[str], *, append: bool = False, is_array: bool = False) -> None:
        old = self.variables.get(name, []) if append else []
        values = [*old, *values] if is_array or not old else [old[0] + "".join(values), *old[1:]]
        if sum(map(len, values)) > MAX_VALUE:
            raise ConfigError(
                f"the script gives {name} more than {MAX_VALUE} characters; migrate only what starts the training"
            )
        self.variables[name] = list(values)

    def value(self, name: str) -> list[str] | None:
        """The values of a variable or argument; None where it is not set."""
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return [str(len(self.arguments))]
        if name == "0":
            return ["script.sh"]
        if name.isdigit():
            number = int(name)
            return [self.arguments[number - 1]] if number <= len(self.arguments) else None
        if name in self.variables:
            return self.variables[name]
        return [_FIXED[name]] if name in _FIXED else None

    # ------------------------------------------------------------------------------------------------------------ words
    def expand(self, node: Node) -> list[str]:
        """The words that a word of the script becomes: none, one or several."""
        words: list[str] = []
        current: str | None = None
        for part in self._parts(node, quoted=False):
            values: list[str] = list(part.values)
            for number, value in enumerate(values):
                if number and current is not None:
                    words.append(current)
                    current = None
                if part.quoted:
                    current = (current or "") + value
                    continue
                pieces = value.split()
                if current is not None and value[:1].isspace():
                    words.append(current)
                    current = None
                for place, piece in enumerate(pieces):
                    if place and current is not None:
                        words.append(current)
                        current = None
                    current = (current or "") + piece
                if pieces and value[-1:].isspace() and current is not None:
                    words.append(current)
                    current = None
        if current is not None:
            words.append(current)
        return words

    def text(self, node: Node) -> str:
        """A word as one text: an assigned value, a pattern, an operand."""
        return self.joined_text(self._parts(node, quoted=True))

    def between(self, node: Node, start: int, end: int, *, quoted: bool) -> list[_Part]:
        """What stands between two bytes of a node: its children there, and the text between them, which has no node."""
        parts: list[_Part] = []
        place = start
        for child in node.children:
            if child.start_byte < start or child.end_byte > end:
                continue
            if child.start_byte > place:
                parts.append(_literal(_source(node, place, child.start_byte), quoted))
            parts += self._parts(child, quoted=quoted)
            place = child.end_byte
        if place < end:
            parts.append(_literal(_source(node, place, end), quoted))
        return parts

    def joined_text(self, parts: Sequence[_Part]) -> str:
        text = "".join(" ".join(part.values) for part in parts)
        if len(text) > MAX_VALUE:
            raise ConfigError(
                f"a word of the script has more than {MAX_VALUE} characters; migrate only what starts the training"
            )
        return text

    def _parts(self, node: Node, *, quoted: bool) -> list[_Part]:
        """The pieces of a word. In strings the grammar counts space before a $ as part of what follows it."""
        text = source_of(node)
        if quoted and text[:1].isspace() and node.type.endswith(("expansion", "substitution")):
            return [_Part((text[: len(text) - len(text.lstrip())],), True), *self._pieces(node, quoted=quoted)]
        return self._pieces(node, quoted=quoted)

    def _pieces(self, node: Node, *, quoted: bool) -> list[_Part]:
        kind = node.type
        if kind in ("concatenation", "command_name"):
            return self.between(node, node.start_byte, node.end_byte, quoted=quoted)
        if kind in ("string", "translated_string"):
            start = node.start_byte + (2 if kind == "translated_string" else 1)
            return self.between(node, start, node.end_byte - 1, quoted=True) or [_Part(("",), True)]
        if kind == "raw_string":
            return [_Part((source_of(node)[1:-1],), True)]
        if kind == "ansi_c_string":
            body = re.sub(r"\\(.)", lambda match: _ANSI_C.get(match[1], match[0]), source_of(node)[2:-1])
            return [_Part((body,), True)]
        if kind in ("string_content", "heredoc_content"):
            return [_literal(source_of(node), True)]
        if kind == "simple_expansion":
            return [self._variable(source_of(node).lstrip()[1:], quoted=quoted)]
        if kind == "expansion":
            return [self._expansion(node, quoted=quoted)]
        if kind == "arithmetic_expansion":
            found = self.arithmetic(node)
            return [_Part((str(found) if found is not None else unknown(source_of(node)),), True)]
        if kind == "command_substitution":
            return [_Part((self._substitution(node),), quoted)]
        if kind == "process_substitution":
            return [_Part((unknown(source_of(node)),), True)]
        return [_literal(source_of(node), quoted)]

    def _substitution(self, node: Node) -> str:
        found = self.output_of(node)
        if found is None:
            self.note(node, f"the output of {shortened(source_of(node))} is not known: nothing is run")
            return unknown(source_of(node))
        return found.rstrip("\n")

    def _variable(self, name: str, *, quoted: bool) -> _Part:
        values = self.value(name)
        if name in ("@", "*"):
            values = values or []
            return _Part((" ".join(values),) if name == "*" and quoted else tuple(values), quoted)
        return _Part((values[0] if values else ("" if values is not None else unknown(_shown(name)),)[0],), quoted)

    def _expansion(self, node: Node, *, quoted: bool) -> _Part:
        """``${...}``."""
        inner = [child for child in node.children if child.type not in ("${", "}")]
        prefix = inner.pop(0).type if inner and inner[0].type in ("!", "#") and len(inner) > 1 else ""
        if not inner:
            return _Part((unknown(source_of(node)),), quoted)
        name, index = _name_and_index(inner[0], self)
        values = self.value(name)
        if prefix == "#":
            held = values or []
            return _Part((str(len(held) if index in ("@", "*") else len(held[0]) if held else 0),), quoted)
        if prefix == "!":
            values = self.value(values[0]) if values else None
        if index is not None and index not in ("@", "*"):
            values = _element(values, index)
        if len(inner) > 1:
            symbol, rest = (
                inner[1],
                self.joined_text(self.between(node, inner[1].end_byte, node.end_byte - 1, quoted=True)),
            )
            values = self._modified(name, values, symbol.type, rest)
        if index in ("@", "*") or name in ("@", "*"):
            held = values or []
            whole = (" ".join(held),) if "*" in (index, name) and quoted else tuple(held)
            return _Part(whole, quoted)
        return _Part((values[0] if values else "" if values is not None else unknown(_shown(name)),), quoted)

    def _modified(self, name: str, values: list[str] | None, symbol: str, rest: str) -> list[str] | None:
        is_set = values is not None and (
            not symbol.startswith(":") or any(map(without_unknowns, values)) or any(map(is_unknown, values))
        )
        match symbol.lstrip(":"):
            case "-" | "=" if symbol in ("-", ":-", "=", ":="):
                if is_set:
                    return values
                if "=" in symbol:
                    self.assign(name, [rest])
                return [rest]
            case "+" if symbol in ("+", ":+"):
                return [rest] if is_set else [""]
            case "?" if symbol in ("?", ":?"):
                return values if is_set else None
        if values is None or any(map(is_unknown, values)):
            return values
        return [_changed(value, symbol, rest) for value in values]

    # -------------------------------------------------------------------------------------------- arithmetic and tests
    def arithmetic(self, node: Node) -> int | None:
        """The value of ``$(( ))``, ``(( ))`` and what is in them, in 64 bits; None where it is not known."""
        kind = node.type
        operands = [child for child in node.named_children if child.type != "comment"]
        if kind in (
            "number",
            "word",
            "string",
            "simple_expansion",
            "expansion",
            "variable_name",
            "subscript",
            "concatenation",
        ):
            return self._operand(node)
        if kind == "unary_expression" and operands:
            value = self.arithmetic(operands[-1])
            return None if value is None else int(_SIGNS.get(node.children[0].type, operator.pos)(value))
        if kind == "postfix_expression" and operands:
            value = self.arithmetic(operands[0])
            if value is not None and operands[0].type in ("variable_name", "word"):
                self.assign(source_of(operands[0]), [str(value + (1 if "++" in source_of(node) else -1))])
            return value
        if kind == "ternary_expression" and len(operands) == 3:
            chosen = self.arithmetic(operands[0])
            return None if chosen is None else self.arithmetic(operands[1 if chosen else 2])
        if kind == "binary_expression" and len(operands) == 2:
            return self._binary(node, *operands)
        if kind == "variable_assignment" and operands:
            value = self.arithmetic(operands[-1])
            self.assign(source_of(operands[0]), [str(value or 0)])
            return value
        return self.arithmetic(operands[-1]) if operands else None

    def _operand(self, node: Node) -> int | None:
        text = " ".join(self.value(source_of(node)) or ["0"]) if node.type == "variable_name" else self.text(node)
        try:
            return int(text.strip() or "0", 0) if len(text) < 20 else None
        except ValueError:
            held = self.value(text) if text.isidentifier() else None
            return int(held[0]) if held and re.fullmatch(r"-?\d{1,18}", held[0]) else None

    def _binary(self, node: Node, first: Node, second: Node) -> int | None:
        symbol = node.children[1].type
        left, right = self.arithmetic(first), self.arithmetic(second)
        if left is None or right is None:
            return None
        found = _calculated(
            symbol.removesuffix("=") if first.type == "variable_name" and symbol in _ASSIGNING else symbol,
            left,
            right,
        )
        if first.type == "variable_name" and symbol in (*_ASSIGNING, "=") and found is not None:
            self.assign(source_of(first), [str(found)])
        return found

    def test(self, node: Node) -> bool:
        """Whether a ``[ ]``, ``[[ ]]`` or part of one holds where nothing is set. No file is there."""
        kind = node.type
        operands = node.named_children
        if kind == "test_command":
            if node.children[0].type == "((":
                return bool(self.arithmetic(node))
            return bool(operands) and self.test(operands[0])
        if kind in ("parenthesized_expression",) and operands:
            return self.test(operands[0])
        if kind == "unary_expression":
            symbol = (
                source_of(operands[0]) if operands and operands[0].type == "test_operator" else node.children[0].type
            )
            if symbol == "!":
                return not self.test(operands[-1])
            operand = without_unknowns(self.text(operands[-1])) if operands else ""
            return {"-z": not operand, "-n": bool(operand)}.get(symbol, False)
        if kind == "binary_expression" and len(node.children) >= 3:
            return self._comparison(node)
        return bool(without_unknowns(self.text(node)))

    def _comparison(self, node: Node) -> bool:
        left, symbol, right = node.children[0], source_of(node.children[1]), node.children[-1]
        if symbol in ("&&", "-a"):
            return self.test(left) and self.test(right)
        if symbol in ("||", "-o"):
            return self.test(left) or self.test(right)
        first, second = without_unknowns(self.text(left)), without_unknowns(self.text(right))
        if symbol in ("=", "=="):
            return matches(first, second)
        if symbol == "!=":
            return not matches(first, second)
        if symbol in _NUMERIC:
            numbers = [int(text) if re.fullmatch(r"-?\d{1,18}", text) else 0 for text in (first, second)]
            return _NUMERIC[symbol](*numbers)
        return {"<": first < second, ">": first > second}.get(symbol, False)


_NUMERIC: dict[str, Callable[[int, int], bool]] = {
    f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_SIGNS: dict[str, Callable[[int], int]] = {"-": operator.neg, "!": operator.not_, "~": operator.invert}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "&&": lambda left, right: bool(left and right),
    "||": lambda left, right: bool(left or right),
    "=": lambda left, right: right,
}
_ASSIGNING = ("+=", "-=", "*=", "/=", "%=")


def _calculated(symbol: str, left: int, right: int) -> int | None:
    if symbol in ("/", "%"):
        if right == 0:
            return None
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards zero, as in C
        return quotient if symbol == "/" else left - quotient * right
    if symbol == "**":
        return left**right if 0 <= right < 64 and abs(left) < 1 << 16 and abs(left**right) < 1 << 63 else None
    if symbol in ("<<", ">>"):
        return None if not 0 <= right < 63 else (left << right if symbol == "<<" else left >> right)
    found = int(_ARITHMETIC[symbol](left, right)) if symbol in _ARITHMETIC else None
    return found if found is not None and abs(found) < 1 << 63 else None


def matches(text: str, pattern: str) -> bool:
    """A shell pattern. Long ones are compared as texts: they are no patterns that somebody has written."""
    return fnmatch.fnmatchcase(text, pattern) if len(pattern) <= MAX_PATTERN else text == pattern


def shortened(text: str) -> str:
    """One line of a message."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


def source_between(parent: Node, first: Node, second: Node) -> str:
    """The text of ``parent`` from the end of one child to the beginning of another, without continued lines."""
    return _source(parent, first.end_byte, second.start_byte).replace("\\\n", "")


def source_of(node: Node) -> str:
    """The source text of a node."""
    return (node.text or b"").decode("utf-8", "replace")


def _source(node: Node, start: int, end: int) -> str:
    return (node.text or b"")[start - node.start_byte : end - node.start_byte].decode("utf-8", "replace")


def _literal(text: str, quoted: bool) -> _Part:
    """Text that is in the script, without its escapes. It is never split: a space in it is quoted or escaped."""
    escaped = r'\\([$`"\\\n])' if quoted else r"\\(.|\n)"
    return _Part((re.sub(escaped, lambda match: "" if match[1] == "\n" else match[1], text),), True)


def _shown(name: str) -> str:
    return f"argument {name}" if name.isdigit() else name


def _name_and_index(node: Node, words: Words) -> tuple[str, str | None]:
    if node.type != "subscript":
        return source_of(node), None
    name, index = node.named_children[0], node.named_children[-1]
    return source_of(name), words.text(index) if len(node.named_children) > 1 else ""


def _element(values: list[str] | None, index: str) -> list[str] | None:
    named = [value.partition("]=")[2] for value in values or [] if value.startswith(f"[{index}]=")]
    if named or not re.fullmatch(r"-?\d{1,9}", index):
        return named[-1:] or None
    held = values or []
    return [held[int(index)]] if -len(held) <= int(index) < len(held) else None


def _changed(value: str, symbol: str, rest: str) -> str:
    """Parameter expansion with an symbol that cuts or replaces."""
    if symbol in ("#", "##", "%", "%%"):
        return _trimmed(value, rest, from_end=symbol[0] == "%", longest=len(symbol) == 2)
    if symbol in ("/", "//", "/#", "/%"):
        pattern, _, new = rest.partition("/")
        return value.replace(pattern, new, -1 if symbol == "//" else 1) if pattern else value
    if symbol == ":":
        start, _, length = rest.strip().partition(":")
        if not re.fullmatch(r"-?\d{1,9}", start.strip()) or not re.fullmatch(r"-?\d{0,9}", length.strip()):
            return value
        cut = value[int(start) :]
        return cut[: int(length)] if length.strip() else cut
    return {
        "^^": value.upper(),
        ",,": value.lower(),
        "^": value[:1].upper() + value[1:],
        ",": value[:1].lower() + value[1:],
    }.get(symbol, value)


def _trimmed(value: str, pattern: str, *, from_end: bool, longest: bool) -> str:
    """Without its shortest or longest beginning or end that matches."""
    if len(value) > 4096:
        return value
    lengths = range(len(value), -1, -1) if longest else range(len(value) + 1)
    for length in lengths:
        end = value[len(value) - length :] if from_end else value[:length]
        if matches(end, pattern):
            return value[: len(value) - length] if from_end else value[length:]
    return value


def basename(words: Sequence[str]) -> str | None:
    """What ``basename PATH [SUFFIX]`` prints."""
    if len(words) not in (2, 3):
        return None
    name = PurePosixPath(words[1]).name
    return name.removesuffix(words[2]) if len(words) == 3 else name
