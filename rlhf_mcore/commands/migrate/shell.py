"""Commands of a launch script, found by walking its syntax tree with the values it gives its variables. Nothing is run.

The grammar is tree-sitter's (tree-sitter-bash): bashlex is GPL and knows neither arithmetic nor arrays. What a run would decide is
decided as in a shell without arguments, in which no variable is set, no file is there and every command succeeds; which branches
were not taken for that reason is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tree_sitter import Language, Node, Parser
from tree_sitter_bash import language

from rlhf_mcore.commands.migrate.shell_words import (
    Words,
    basename,
    is_unknown,
    matches,
    shortened,
    source_between,
    source_of,
)
from rlhf_mcore.config.errors import ConfigError

MAX_SCRIPT = 1 << 20  # characters; published scripts have a few thousand
MAX_STATEMENTS = 20_000  # executed ones: a loop that waits for something never ends here
MAX_ROUNDS = 100  # of a while loop
MAX_COMMANDS = 2_000
MAX_DEPTH = 40  # of functions that call functions, and of scripts in words of scripts
_SHELLS = ("bash", "sh", "zsh", "sbatch", "ssh", "srun", "eval", "cat", "tee")  # what is fed to them may be a script
_LAUNCH = re.compile(r"openrlhf\.cli\.|verl\.trainer|main_ppo|main_dapo|\s-m\s+(?:verl|recipe)\.")
_MATTERS = re.compile(r"python|openrlhf|verl|torchrun|deepspeed|ray job|\w=")


@dataclass(slots=True)
class Script:
    """What a script would start, and what had to be decided to know it."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The words of all commands."""
        return [word for command in self.commands for word in command]


def read_script(text: str) -> Script:
    """All commands of a bash script with their words expanded. Unknown values are marked: see ``shell_words``.

    Raises:
        ConfigError: the script is longer, more deeply nested or longer running than any that somebody wrote.
    """
    script = Script()
    try:
        _Runner(script).run_text(text)
    except RecursionError as error:
        raise ConfigError(
            "the script is nested too deeply to be read; migrate only what starts the training"
        ) from error
    return script


class _Runner:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.words = Words(output_of=self._output, note=self._note)
        self.functions: dict[str, Node] = {}
        self.num_statements = 0
        self.depth = 0

    def run_text(self, text: str) -> None:
        """Parse and walk. Words of a script may be scripts themselves (``bash -c "..."``)."""
        if len(text) > MAX_SCRIPT:
            raise ConfigError(
                f"the script has more than {MAX_SCRIPT} characters; migrate only what starts the training"
            )
        # A comment line between continued lines ends the command for a shell; whoever wrote one meant it as a comment.
        text = re.sub(r"(\\[ \t]*\n)(?:[ \t]*#[^\n]*\n)+", r"\1", re.sub(r"\\[ \t]+\n", "\\\n", text))
        text = re.sub(r"\[\$(\w+)", r"[${\1}", text)  # the grammar cuts the word a=[$B] after the $
        tree = Parser(Language(language())).parse(text.encode("utf-8", "replace"))
        self._body(tree.root_node.children)

    # ------------------------------------------------------------------------------------------------------- statements
    def _body(self, nodes: Sequence[Node]) -> bool:
        """Execute statements in order. Returns whether the last has succeeded."""
        succeeded = True
        for node in nodes:
            if node.is_named and node.type != "comment":
                succeeded = self._statement(node)
        return succeeded

    def _statement(self, node: Node) -> bool:
        self.num_statements += 1
        if self.num_statements > MAX_STATEMENTS:
            raise ConfigError(
                f"the script makes more than {MAX_STATEMENTS} steps; migrate only what starts the training"
            )
        handler = getattr(self, f"_{node.type}", None)
        if handler is not None:
            return bool(handler(node))
        return self._body(
            node.children
        )  # groups, pipelines, subshells, do ... done, and what the parser could not read

    def _variable_assignment(self, node: Node) -> bool:
        target, value = node.named_children[0], node.named_children[1:]
        append = any(child.type == "+=" for child in node.children)
        if target.type == "subscript":
            name, index = (source_of(child) for child in target.named_children[:2])
            self.words.assign(
                name, [f"[{index}]={self.words.text(value[0])}" if value else ""], append=True, is_array=True
            )
        elif value and value[0].type == "array":
            elements = [
                word
                for child in value[0].named_children
                if child.type != "comment"
                for word in self.words.expand(child)
            ]
            self.words.assign(source_of(target), elements, append=append, is_array=True)
        else:
            text = self.words.text(value[0]) if value else ""
            self.words.assign(source_of(target), [text], append=append)
        return True

    def _variable_assignments(self, node: Node) -> bool:
        return self._body(node.children)

    def _declaration_command(self, node: Node) -> bool:
        return self._body([child for child in node.children if child.type == "variable_assignment"])

    def _unset_command(self, node: Node) -> bool:
        for child in node.named_children:
            self.words.variables.pop(source_of(child), None)
        return True

    def _function_definition(self, node: Node) -> bool:
        self.functions[source_of(node.named_children[0])] = node.named_children[-1]
        return True

    def _test_command(self, node: Node) -> bool:
        return self.words.test(node)

    def _compound_statement(self, node: Node) -> bool:
        if node.children[0].type == "((":
            return bool(self.words.arithmetic(node))
        return self._body(node.children)

    def _negated_command(self, node: Node) -> bool:
        return not self._body(node.children)

    def _list(self, node: Node) -> bool:
        """``a && b``, ``a || b``."""
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        succeeded = self._statement(left)
        if succeeded == (operator == "&&"):
            return self._statement(right)
        self._not_taken(right, f"{source_of(left)} {operator}")
        return succeeded

    def _if_statement(self, node: Node) -> bool:
        taken = False
        condition: list[Node] = []
        body: list[Node] | None = None
        asked = ""
        for child in node.children:
            if child.type == "then":
                asked, body = " ".join(map(source_of, condition)), []
            elif child.type in ("elif_clause", "else_clause", "fi"):
                if body is not None:
                    taken = self._branch(asked, condition, body, taken)
                    body = None
                if child.type != "fi":
                    then = next((place for place, inner in enumerate(child.children) if inner.type == "then"), 0)
                    tested = child.children[1:then]
                    text = " ".join(map(source_of, tested)) or "else"
                    taken = self._branch(text, tested, child.children[then + 1 :], taken)
            elif body is not None:
                body.append(child)
            elif child.type != "if":
                condition.append(child)
        return True

    def _branch(self, asked: str, condition: Sequence[Node], body: Sequence[Node], taken: bool) -> bool:
        """Execute a branch if its condition holds and none was taken before. Returns whether one is taken now."""
        if not taken and self._body(condition):
            self._body(body)
            return True
        for node in body[:1]:
            self._not_taken(node, asked, " ".join(map(source_of, body)))
        return taken

    def _case_statement(self, node: Node) -> bool:
        subject = self.words.text(node.named_children[0])
        taken = False
        for item in node.named_children[1:]:
            if item.type != "case_item":
                continue
            end = next(place for place, child in enumerate(item.children) if child.type == ")")
            patterns = [self.words.text(child) for child in item.children[:end] if child.is_named]
            if not taken and any(matches(subject if not is_unknown(subject) else "", pattern) for pattern in patterns):
                taken = True
                self._body(item.children[end + 1 :])
            else:
                self._not_taken(item, f"case {source_of(node.named_children[0])}")
        return True

    def _for_statement(self, node: Node) -> bool:
        name, *rest = [child for child in node.named_children if child.type != "comment"]
        body = rest.pop()
        values = [word for child in rest for word in self.words.expand(child)]
        for value in values:
            self.words.assign(source_of(name), [value])
            self._statement(body)
        return True

    def _c_style_for_statement(self, node: Node) -> bool:
        *parts, body = [child for child in node.named_children if child.type != "comment"]
        if len(parts) != 3:
            return self._statement(body)
        self.words.arithmetic(parts[0])
        for _ in range(MAX_ROUNDS):
            if not self.words.arithmetic(parts[1]):
                break
            self._statement(body)
            self.words.arithmetic(parts[2])
        return True

    def _while_statement(self, node: Node) -> bool:
        *condition, body = [child for child in node.children if child.is_named and child.type != "comment"]
        until = node.children[0].type == "until"
        for _ in range(MAX_ROUNDS):
            before = len(self.script.commands)
            if self._body(condition) == until:
                return True
            self._statement(body)
            if (
                self.script.commands[before:]
                == self.script.commands[before - (len(self.script.commands) - before) : before]
            ):
                break  # the same commands once more: it waits for something
        return True

    # --------------------------------------------------------------------------------------------------------- commands
    def _command(self, node: Node) -> bool:
        words: list[str] = []
        fed: list[str] = []
        name = next((child for child in node.children if child.type == "command_name"), node.children[-1])
        for child in node.children:
            if child.type == "variable_assignment" and "\n" in source_between(node, child, name):
                self._variable_assignment(
                    child
                )  # a line of its own, which the grammar takes for a prefix of the command
            if child.type in ("variable_assignment", "comment") or child.type.endswith("redirect"):
                if child.type in ("heredoc_redirect", "herestring_redirect"):
                    fed.append(self._fed(child))
                continue
            words += self.words.expand(child)
        return self._execute(node, words, fed)

    def _redirected_statement(self, node: Node) -> bool:
        body, *redirects = node.named_children
        fed = [self._fed(child) for child in redirects if child.type in ("heredoc_redirect", "herestring_redirect")]
        if not fed or body.type != "command":
            return self._statement(body)
        return self._execute(body, [word for child in body.children for word in self.words.expand(child)], fed)

    def _fed(self, redirect: Node) -> str:
        """A here-document, or a here-string."""
        if redirect.type == "herestring_redirect":
            return self.words.text(redirect.named_children[-1])
        quoted = any(child.type == "heredoc_start" and source_of(child)[:1] in "'\"\\" for child in redirect.children)
        bodies = [child for child in redirect.named_children if child.type == "heredoc_body"]
        if quoted or not bodies:
            return "".join(map(source_of, bodies))
        return self.words.joined_text(
            self.words.between(bodies[0], bodies[0].start_byte, bodies[0].end_byte, quoted=True)
        )

    def _execute(self, node: Node, words: list[str], fed: Sequence[str]) -> bool:
        if not words:
            return True
        name, *rest = words
        if name in self.functions:
            outer, self.words.arguments = self.words.arguments, rest
            with self._deeper():
                self._statement(self.functions[name])
            self.words.arguments = outer
        elif name in ("false",):
            return False
        elif name == "read" and fed:
            self.words.assign(words[-1], [fed[0].strip()])
        elif name == "shift":
            del self.words.arguments[: int(rest[0]) if rest and rest[0].isdigit() else 1]
        elif name == "set" and "--" in rest:
            self.words.arguments = rest[rest.index("--") + 1 :]
        elif name in ("source", "."):
            self._note(
                node, f"{shortened(source_of(node))}: the other file is not read; put what it sets into the script"
            )
        else:
            if len(self.script.commands) >= MAX_COMMANDS:
                raise ConfigError(
                    f"the script starts more than {MAX_COMMANDS} commands; migrate only what starts the training"
                )
            self._nested(words, [*words, *fed] if name in _SHELLS or "bash" in words else words)
        return True

    def _nested(self, words: list[str], candidates: Sequence[str]) -> None:
        """Scripts among the words: of ``bash -c``, ``eval``, ``ssh``, and what is fed to a shell."""
        scripts = [word for word in candidates if re.search(r"\s", word.strip()) and _LAUNCH.search(word)]
        if words[0] == "eval" and not scripts:
            scripts = [text for text in [" ".join(words[1:])] if _LAUNCH.search(text)]
        if not scripts:
            self.script.commands.append(words)
            return
        with self._deeper():
            for text in scripts:
                self.run_text(text)

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(
                f"the script calls itself more than {MAX_DEPTH} deep; migrate only what starts the training"
            )
        yield
        self.depth -= 1

    def _output(self, node: Node) -> str | None:
        """What a command substitution prints, where the script alone determines it; None where it does not."""
        inner = [child for child in node.named_children if child.type != "comment"]
        if len(inner) != 1:
            return None
        if inner[0].type == "redirected_statement" and source_of(inner[0]).startswith("cat"):
            fed = [self._fed(child) for child in inner[0].named_children if child.type == "heredoc_redirect"]
            return "".join(fed) if fed else None
        if inner[0].type != "command":
            return None
        words = [word for child in inner[0].children for word in self.words.expand(child)]
        match words:
            case ["echo", *rest]:
                return " ".join(word for word in rest if word not in ("-n", "-e"))
            case ["pwd"]:
                return "."
            case ["dirname", path]:
                return path.rpartition("/")[0] or "."
            case ["basename", *_]:
                return basename(words)
        return None

    # ------------------------------------------------------------------------------------------------------------ notes
    def _note(self, node: Node, text: str) -> None:
        note = f"line {node.start_point[0] + 1}: {text}"
        if note not in self.script.notes:
            self.script.notes.append(note)

    def _not_taken(self, node: Node, asked: str, body: str | None = None) -> None:
        text = source_of(node) if body is None else body
        if _MATTERS.search(text):
            self._note(node, f"not taken, as a shell with nothing set decides ({shortened(asked)}): {shortened(text)}")
