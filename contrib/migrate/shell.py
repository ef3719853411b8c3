"""Find the commands that a launch script would start. Bash runs the script in a sandbox without any commands, and traces it.

Every bash in the sandbox first reads ``prelude.bash``. Some values are known only on the user's machine, such as environment variables
and outputs of commands. A marked name replaces them in the traced words. ``named_unknowns`` writes these names for our configuration.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.sandbox.run import REMEDIES, Level, Limits, Program, Reason, Result, Sandbox, machine_level

ISOLATION = "filters"  # least isolation level for running a script
LIMITS = Limits(cpu_s=10, memory_bytes=2**29, scratch_bytes=2**24, output_bytes=2**24, processes=64)
PRELUDE = Path(__file__).with_name("prelude.bash")
ALWAYS_SET = ("HOME", "USER", "PWD", "LOGNAME", "HOSTNAME")  # set by every login, so the user need not set them
# Standard input contains the prelude and the script. The output of the script is dropped. The result is the trace, which is complete
# when the last process that can write to it has ended.
_START = (
    'IFS= read -r -d "" prelude; printf %s "$prelude" > .prelude; cat > script.sh; '
    'env -i LC_ALL=C.UTF-8 BASH_ENV="$PWD/.prelude" BASH_XTRACEFD=98 "$BASH" script.sh 98>&1 < /dev/null > /dev/null | cat'
)
_REPAIRS = (  # pattern, replacement
    (r"\\[ \t]+$", r"\\"),  # spaces after a backslash, meant as a line continuation
    (r"(\\\n)(?:[ \t]*#[^\n]*\n)+", r"\1"),  # comments between continued lines would end the command
    (r"^(\s*(?:export )?[\w.+-]+)=<([\w-]+)>", r"\1='<\2>'"),  # placeholders for the user
    (
        r"((?:^|;)\s*(?:done|[)}]))[ \t]*[&\d]?>>?[ \t]*[^\s|&;]+",
        r"\1",
    ),  # a log file in a directory that does not exist here
)
_RECORD = re.compile(r"^\++@(\d+)@(\d+)@ ", re.MULTILINE)  # PS4: nesting level of the shell, line number
_TOKEN = re.compile(r"\$'((?:[^'\\]|\\.)*)'|'([^']*)'|\\(.)|(\$(?!')|[^\s'\\$]+)|(\s+)", re.DOTALL)
_NO_COMMAND = re.compile(r"(for|select|case|\[\[|\(\(|__\w+|set \+x$)(\s|$)|\w+(\[[^]]*\])?\+?=")
_SHELLS = ("bash", "sh", "zsh", "ssh", "sbatch", "srun", "eval")  # commands whose scripts are traced too
_MATTERS = re.compile(r"python|openrlhf|verl|torchrun|deepspeed|ray job|\w=")
_MARK = re.compile(r"@\{(-?)(\w+)\}@")
_OPEN, _CLOSE = "\ue000", "\ue001"  # delimiters around a mark; YAML reads them as plain text
_UNKNOWN = re.compile(f"{_OPEN}(-?)(\\w+){_CLOSE}")
_STOPPED = {
    Reason.TIMEOUT: "it did not end in time",
    Reason.MEMORY: "it took too much memory",
    Reason.KILLED: "it was killed",
    Reason.OUTPUT_LIMIT: "it wrote too much",
}
_OTHERWISE = (
    "or give what the script starts in a file without variables, as `bash -x SCRIPT` prints it, or, of verl, the YAML that the "
    "script prints with `--cfg job --resolve` behind its last override"
)


@dataclass(slots=True)
class Script:
    """Commands that a script would start, and notes on the decisions that finding them required."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Record:
    """A command of the trace. ``level``: 0 in the script itself, higher in the shells that it starts."""

    level: int
    line: int
    text: str


def read_script(text: str) -> Script:
    """Run a bash script in a sandbox, and list the commands that it tried to start, with expanded words.

    Raises:
        ConfigError: this machine cannot isolate programs, or bash does not run in the sandbox.
    """
    level = machine_level()
    if not level.reaches(ISOLATION):
        return Script(_plain_commands(text, level))
    for pattern, replacement in _REPAIRS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    result = _run(text, level)
    records = list(_records(result.stdout))
    commands = [_words(record.text) for record in records if not _NO_COMMAND.match(record.text)]
    return Script([words for words in commands if words and not _is_nested(words)], _notes(text, records, result))


def _run(text: str, level: Level) -> Result:
    program = Program(kind="command", argv=("bash", "--norc", "-c", _START))
    with Sandbox(level.name) as sandbox:
        result = sandbox.run(program, LIMITS, stdin=PRELUDE.read_bytes() + b"\0" + text.encode(errors="replace"))
    reason = result.detail or result.stderr.strip().rpartition("\n")[2]
    if result.reason is Reason.REFUSED or (reason and not result.stdout):
        raise ConfigError(f"bash does not run in a sandbox here ({shorten(reason)}); correct that, {_OTHERWISE}")
    return result


def _plain_commands(text: str, level: Level) -> list[list[str]]:
    """Split the lines of a script without variables. Only such scripts can be read without a sandbox.

    Raises:
        ConfigError: the script uses variables or outputs of commands, or has unbalanced quotes.
    """
    if re.search(r"[$`]", text):
        raise ConfigError(
            "bash runs a launch script only in a sandbox, and this machine does not isolate programs "
            f"({level.name}; {'; '.join(level.missing)}): {REMEDIES[ISOLATION]}, {_OTHERWISE}"
        )
    try:
        return [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    except ValueError as error:
        raise ConfigError(f"the script cannot be read ({error}); correct it") from error


def _records(trace: str) -> Iterator[_Record]:
    starts = list(_RECORD.finditer(trace))
    for start, following in zip_longest(starts, starts[1:]):
        end = following.start() if following else len(trace)
        yield _Record(int(start[1]), int(start[2]), trace[start.end() : end].rstrip("\n"))


def _words(text: str) -> list[str]:
    """Split a command of the trace into words, according to the quoting of bash."""
    words = [""]
    is_open = False
    for ansi, quoted, escaped, plain, space in _TOKEN.findall(text):
        if space and is_open:
            words.append("")
        is_open = not space
        if ansi:
            escapes = ansi.replace("\\E", "\\033").encode().decode("unicode_escape")
            ansi = escapes.encode("latin-1").decode(errors="replace")
        words[-1] += ansi + quoted + escaped + plain
    return [_MARK.sub(rf"{_OPEN}\1\2{_CLOSE}", word) for word in (words if is_open else words[:-1])]


def _is_nested(words: list[str]) -> bool:
    """Return whether a command is a shell with a script in one of its words. The trace contains the commands of this script."""
    return (words[0] in _SHELLS or "bash" in words) and any(re.search(r"\s", word.strip()) for word in words)


def _notes(text: str, records: list[_Record], result: Result) -> list[str]:
    mistakes = re.findall(r"^script\.sh: (line \d+: .*(?:syntax error|unexpected EOF).*)$", result.stderr, re.MULTILINE)
    notes = [f"{mistake}: bash reads no further" for mistake in mistakes]
    if result.reason in _STOPPED:
        notes.append(f"the script was stopped, {_STOPPED[result.reason]}: what it had started by then was read")
    own = [record for record in records if record.level == 0]
    used = {mark for record in records for mark in re.findall(r"@\{-(\w+)\}@", record.text)}
    for record in own:
        name, _, rest = record.text.partition(" ")
        if name in ("source", "."):
            command = shorten(record.text)
            notes.append(f"line {record.line}: {command}: the other file is not read; put what it sets into the script")
        elif name == "__unknown" and re.sub(r"[^A-Za-z0-9]", "_", command := " ".join(_words(rest))) in used:
            notes.append(
                f"line {record.line}: the output of `{shorten(command)}` is not known, because no command is run"
            )
    notes += _branches(text, {record.line for record in own})
    return list(dict.fromkeys(notes))


def _branches(text: str, executed: set[int]) -> Iterator[str]:
    """Yield a note for each branch that was not taken, with its first line."""
    above = ""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        if number not in executed and re.search(r"(\bthen|\belse|\bdo|^[^($]+\))$", above) and _MATTERS.search(line):
            yield f"line {number}: not taken, because bash ran with no variable set ({shorten(above)}): {shorten(line)}"
        above = line


def named_unknowns(text: str) -> str:
    """Replace marks by text for our configuration: environment references for variables, names for other unknown values.

    An unset variable must not prevent the configuration from loading, so the reference has a default that names the variable.
    """

    def name(match: re.Match[str]) -> str:
        is_output, known = match[1], match[2]
        if is_output:
            return f"{re.sub('_+', '_', known).strip('_')}_is_not_known"
        return f"${{oc.env:{known}}}" if known in ALWAYS_SET else f"${{oc.env:{known},{known}_is_not_set}}"

    return _UNKNOWN.sub(name, text)


def shorten(text: str) -> str:
    """Shorten a text to one line of a message."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
