"""Read what a launch script would start: bash runs it in a sandbox in which no command is found, and traces it.

Every bash in there begins with ``prelude.bash``. A value that only the user's machine knows (a variable of the environment, the
output of a command) is a marked name in the words that it becomes part of; ``named_unknowns`` writes it for our configuration.
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

ISOLATION = "filters"  # the least that a script is run with
LIMITS = Limits(cpu_s=10, memory_bytes=2**29, scratch_bytes=2**24, output_bytes=2**24, processes=64)
PRELUDE = Path(__file__).with_name("prelude.bash")
ALWAYS_SET = ("HOME", "USER", "PWD", "LOGNAME", "HOSTNAME")  # in every login: no user has to set them
# Standard input holds the prelude and the script. What the script prints is dropped; the trace is the output, to the end of the last
# process that could write to it.
_START = (
    'IFS= read -r -d "" prelude; printf %s "$prelude" > .prelude; cat > script.sh; '
    'env -i LC_ALL=C.UTF-8 BASH_ENV="$PWD/.prelude" BASH_XTRACEFD=98 "$BASH" script.sh 98>&1 < /dev/null > /dev/null | cat'
)
_REPAIRS = (  # pattern, replacement
    (r"\\[ \t]+$", r"\\"),  # meant as a line that goes on
    (r"(\\\n)(?:[ \t]*#[^\n]*\n)+", r"\1"),  # comments between such lines end the command, which nobody means
    (r"^(\s*(?:export )?[\w.+-]+)=<([\w-]+)>", r"\1='<\2>'"),  # to be filled in
    (r"((?:^|;)\s*(?:done|[)}]))[ \t]*[&\d]?>>?[ \t]*[^\s|&;]+", r"\1"),  # a log file in a directory that is not here
)
_RECORD = re.compile(r"^\++@(\d+)@(\d+)@ ", re.MULTILINE)  # PS4: the nesting of shells, the line
_TOKEN = re.compile(r"\$'((?:[^'\\]|\\.)*)'|'([^']*)'|\\(.)|(\$(?!')|[^\s'\\$]+)|(\s+)", re.DOTALL)
_NO_COMMAND = re.compile(r"(for|select|case|\[\[|\(\(|__\w+|set \+x$)(\s|$)|\w+(\[[^]]*\])?\+?=")
_SHELLS = ("bash", "sh", "zsh", "ssh", "sbatch", "srun", "eval")  # whose scripts are traced, too
_MATTERS = re.compile(r"python|openrlhf|verl|torchrun|deepspeed|ray job|\w=")
_MARK = re.compile(r"@\{(-?)(\w+)\}@")
_OPEN, _CLOSE = "\ue000", "\ue001"  # a mark between them is plain text in YAML
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
    """Hold what a script would start, and what had to be decided to know it."""

    commands: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Record:
    """A command of the trace. ``level``: 0 in the script itself, more in shells that it starts."""

    level: int
    line: int
    text: str


def read_script(text: str) -> Script:
    """Run a bash script where it can reach nothing, and list the commands that it tried to start, with their words expanded.

    Raises:
        ConfigError: this machine does not isolate programs, or bash cannot be run in there.
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
        raise ConfigError(f"bash does not run in a sandbox here ({shortened(reason)}); correct that, {_OTHERWISE}")
    return result


def _plain_commands(text: str, level: Level) -> list[list[str]]:
    """Split the lines of a script without variables: all that is read where nothing can be run.

    Raises:
        ConfigError: the script is another one.
    """
    if re.search(r"[$`]", text):
        raise ConfigError(
            "bash runs a launch script where it can reach nothing, and this machine does not isolate programs "
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
    """Split a command of the trace, which is quoted as bash quotes, into words."""
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
    """Tell whether a command is a shell with a script in one of its words: its commands are in the trace themselves."""
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
            command = shortened(record.text)
            notes.append(f"line {record.line}: {command}: the other file is not read; put what it sets into the script")
        elif name == "__unknown" and re.sub(r"[^A-Za-z0-9]", "_", command := " ".join(_words(rest))) in used:
            notes.append(f"line {record.line}: the output of `{shortened(command)}` is not known: nothing is run")
    notes += _branches(text, {record.line for record in own})
    return list(dict.fromkeys(notes))


def _branches(text: str, executed: set[int]) -> Iterator[str]:
    """Report branches that were not taken, by their first lines."""
    above = ""
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        if number not in executed and re.search(r"(\bthen|\belse|\bdo|^[^($]+\))$", above) and _MATTERS.search(line):
            yield f"line {number}: not taken, as bash decides with nothing set ({shortened(above)}): {shortened(line)}"
        above = line


def named_unknowns(text: str) -> str:
    """Write a text for our configuration: variables come from the environment, other unknowns are spelt out.

    A variable that is not set must not keep the configuration from loading: the stand-in names it wherever it turns up.
    """

    def name(match: re.Match[str]) -> str:
        is_output, known = match[1], match[2]
        if is_output:
            return f"{re.sub('_+', '_', known).strip('_')}_is_not_known"
        return f"${{oc.env:{known}}}" if known in ALWAYS_SET else f"${{oc.env:{known},{known}_is_not_set}}"

    return _UNKNOWN.sub(name, text)


def shortened(text: str) -> str:
    """Cut a text to one line of a message."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
