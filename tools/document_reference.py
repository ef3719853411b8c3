#!/usr/bin/env python3
"""Write the pages of docs/reference/ from the code: keys (also of other trainers), commands, metrics, exit codes, faults, APIs.

    .venv/bin/python tools/document_reference.py

This also runs tools/document_config.py. A test compares the pages with the texts that this module generates.
"""

from __future__ import annotations

import argparse
import html
import re
import runpy
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf_mcore.cli.main import COMMANDS, PLUGINS, SUMMARIES, module_of  # noqa: E402
from rlhf_mcore.cli.terminal import EPILOG, TOOL_EPILOG  # noqa: E402
from rlhf_mcore.config.choices import PRESETS  # noqa: E402
from rlhf_mcore.environments.agents import endpoint  # noqa: E402
from rlhf_mcore.environments.agents.dialects import (  # noqa: E402
    Dialect,
    RequestError,
    TurnOutput,
)
from rlhf_mcore.environments.agents.openai_api import MAX_N  # noqa: E402
from rlhf_mcore.metrics.catalogue import GROUPS, Metric  # noqa: E402
from rlhf_mcore.metrics.rules import MEASURES, RULES, MetricRule  # noqa: E402
from rlhf_mcore_contrib.migrate.pages import PAGES as TRAINERS  # noqa: E402
from rlhf_mcore_contrib.migrate.pages import key_rows  # noqa: E402
from tests.faults import FAULTS, find_fault_tests  # noqa: E402
from tools import document_config  # noqa: E402
from tools.doc_links import GENERATED, WIDE, relative_links  # noqa: E402

PAGES = ROOT / "docs" / "reference"
HEAD = GENERATED.format("tools/document_reference.py")
OURS = ("rlhf_mcore.", "rlhf_mcore_contrib.")


def pages() -> dict[str, str]:
    """Return path below docs/reference/ -> text, without the pages of tools/document_config.py."""
    made = {f"cli/{name}.md": command_page(name) for name in commands()}
    made |= {
        "index.md": index_page(),
        "metrics.md": metrics_page(),
        "health-rules.md": health_page(),
        "presets.md": presets_page(),
        "exit-codes.md": exit_codes_page(),
        "faults.md": faults_page(),
        "agent-protocol.md": agent_protocol_page(),
        "python.md": python_page(),
    }
    made |= {f"migration/{name}.md": migration_page(name) for name in TRAINERS}
    return {path: relative_links(text, f"reference/{path}") for path, text in made.items()}


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", HEAD, *(part.strip("\n") for part in parts if part)]) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _text(words: str) -> str:
    """Escape text of a help for Markdown."""
    return html.escape(" ".join(words.split()), quote=False).replace("*", "\\*")


# --------------------------------------------------------------------------------------------------------------- commands
def commands() -> list[str]:
    """List the commands of the package and of contrib/. Commands of other installed plug-ins are left out."""
    return [name for name in COMMANDS if module_of(name).startswith(OURS)]


def command_page(name: str) -> str:
    """Describe a command: usage, arguments, options, examples and exit codes."""
    parser = import_module(module_of(name))._parser()
    plugin = PLUGINS.get(name, "").split(".")[1:2]
    notes = [f"This command is a [plug-in](../contrib/{plugin[0]}/README.md) of `contrib/`."] if plugin else []
    codes = "" if name == "completion" else "See [exit codes](reference/exit-codes.md)."
    return _page(f"rlhf-mcore {name}", *notes, *_describe(parser, "##"), _examples(parser), codes)


def _describe(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    """Describe a parser and its subcommands in blocks of Markdown."""
    yield _text(parser.description or "")
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=100)
    usage = re.sub(r"\n +", "\n    ", parser.format_usage().removeprefix("usage: ").strip())
    yield f"```text\n{usage}\n```"
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    inner = [action for action in shown if isinstance(action, argparse._SubParsersAction)]
    arguments = [action for action in shown if not action.option_strings and action not in inner]
    options = [action for action in shown if action.option_strings]
    for title, actions in (("argument", arguments), ("option", options)):
        if actions:
            yield _table((title, "meaning"), [(f"`{_name(action)}`", _help(parser, action)) for action in actions])
    for action in inner:
        for name, sub in action.choices.items():
            yield f"{level} `{name}`"
            help_ = next((choice.help for choice in action._choices_actions if choice.dest == name), "")
            if help_ and not sub.description:
                yield _text(f"{help_[0].upper()}{help_[1:]}.")
            yield from _describe(sub, f"{level}#")


def _name(action: argparse.Action) -> str:
    metavar = action.metavar or (
        ("{" + ",".join(map(str, action.choices)) + "}") if action.choices else action.dest.upper()
    )
    metavar = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    if not action.option_strings:
        return metavar if action.metavar or action.choices else action.dest
    return ", ".join(action.option_strings) + (f" {metavar}" if action.nargs != 0 else "")


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return _text(parser._get_formatter()._expand_help(action)) if action.help else ""


def _examples(parser: argparse.ArgumentParser) -> str:
    found = re.search(r"^examples?:\n((?:  .*\n)+)", parser.epilog or "", re.MULTILINE)
    return f"## Examples\n\n```bash\n{textwrap.dedent(found[1]).strip()}\n```" if found else ""


# ---------------------------------------------------------------------------------------------------------------- metrics
def metrics_page() -> str:
    """List all metrics, by group."""
    parts = []
    for title, metrics in GROUPS.items():
        head = ("metric", "meaning", "unit", "healthy", "what to do")
        parts += [f"## {title}", _table(head, list(map(_metric, metrics)))]
    intro = (
        "`<...>` stands for a variable part of a name, such as a phase or a data source. "
        "[Monitoring](operations/monitoring.md) explains where metrics are written. "
        "[Health rules](reference/health-rules.md) lists the bounds."
    )
    return WIDE + _page("Metrics", intro, *parts)


def _metric(metric: Metric) -> tuple[str, ...]:
    return f"`{metric.name}`", _text(metric.meaning), metric.unit, _text(metric.range), _text(metric.advice)


def health_page() -> str:
    """List the rules that judge metrics."""
    intro = (
        "The report's health checks and the default alarms judge these numbers. The bounds are rules of thumb for "
        "policy-gradient training of language models. Recent: the mean of the last tenth of the values, at most 20 of them."
    )
    head = ("rule", "metric", "judged number", "watch from", "trouble from", "alarm after", "what to do")
    return WIDE + _page("Health rules", intro, _table(head, list(map(_rule, RULES))))


def _rule(rule: MetricRule) -> tuple[str, ...]:
    judged = MEASURES[rule.measure].text + (", as a share of the responses" if rule.counts else "")
    alarm = f"{rule.alarm_steps} steps" if rule.alarm_steps else "no alarm"
    bounds = (rule.shown(rule.watch), rule.shown(rule.bad))
    return rule.name, f"`{rule.metric}`", judged, *bounds, alarm, _text(rule.remedy)


# ------------------------------------------------------------------------------------------------------------------ others
def presets_page() -> str:
    """List what each preset sets."""
    rows = []
    for name, settings in PRESETS.items():
        cells = [
            f"`{key}: {str(value).lower() if isinstance(value, bool) else value}`" for key, value in settings.items()
        ]
        rows.append((f"`{name}`", ", ".join(cells)))
    intro = (
        "`algorithm: NAME`, or `algorithm.preset: NAME` together with other keys, sets these keys of the group `algorithm`. "
        "Keys that you set yourself win. [Choose an algorithm](algorithms/choose.md) compares them and names the papers."
    )
    return WIDE + _page("Presets", intro, _table(("preset", "sets"), rows))


def exit_codes_page() -> str:
    """List the exit codes of commands."""

    def table(epilog: str) -> str:
        rows = re.findall(r"^  (\S+) +(.*)$", epilog, re.MULTILINE)
        return _table(("code", "meaning"), [(f"`{code}`" if code.isdigit() else code, text) for code, text in rows])

    return _page("Exit codes", "## Training", table(EPILOG), "## Other commands", table(TOOL_EPILOG))


def faults_page() -> str:
    """List the faults that tests inject."""
    files = find_fault_tests()
    rows = [
        (f"{number:02}", injected, expected, ", ".join(f"`{file}`" for file in files.get(number, [])) or "not yet")
        for number, (injected, expected) in FAULTS.items()
    ]
    intro = (
        "The tests inject these faults. The number is in the names of the tests: `pytest -k fault_13` injects one. "
        "[Reliability](operations/reliability.md) states the guarantees."
    )
    return _page("Faults", intro, _table(("#", "injected", "expected", "tests"), rows))


class _RecordedBody(dict[str, Any]):
    """A request that records the names of the fields that are read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


# A request that every API of the endpoint accepts, and values of which each supported field accepts one.
_REQUEST = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
_TOOL = {"type": "function", "name": "f", "function": {"name": "f"}}
_VALUES = (True, 1, "x", "auto", {"type": "auto"}, {"include_usage": True}, [_TOOL])


def agent_protocol_page() -> str:
    """List the requests of the agent endpoint with their fields, and its limits."""
    dialects = {path: endpoint.dialect_at(path) for path in endpoint.served_paths()}
    requests = [
        (f"`POST {path}`", *_fields(dialect))
        for path, dialect in dialects.items()
        if type(dialect).__module__.startswith(OURS)
    ]
    requests += [(f"`POST {endpoint.BEGIN}`", "none; the episode starts over", ""), ("`GET /v1/models`", "none", "")]
    limits = [
        ("size of a request, including its images", f"{endpoint.MAX_BYTES >> 20} MiB"),
        ("concurrent turns of an episode", str(endpoint.MAX_WAITING)),
        ("turns per request (`n`)", str(MAX_N)),
    ]
    intro = (
        "[Agents](guide/agents/index.md#endpoint) send these requests to the policy. The key of the episode is the bearer token, "
        "or the header `x-api-key`. All other fields, such as `model` and `temperature`, are ignored."
    )
    head = ("request", "supported fields", "rejected fields")
    return _page("Agent protocol", intro, _table(head, requests), "## Limits", _table(("limit", "value"), limits))


def _fields(dialect: Dialect) -> tuple[str, str]:
    """Return the supported and the rejected fields of an API."""
    body = _RecordedBody(_REQUEST)
    dialect.read(body)
    dialect.write(body, [TurnOutput({"content": ""}, (), "stop", 0)])
    supported = {name for name in body.read if any(_accepts(dialect, {name: value}) for value in _VALUES)}
    supported |= body.read & _REQUEST.keys()
    return _names(supported), _names(body.read - supported)


def _names(fields: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(fields))


def _accepts(dialect: Dialect, fields: Mapping[str, Any]) -> bool:
    try:
        dialect.read({**_REQUEST, **fields})
    except RequestError:
        return False
    return True


def python_page() -> str:
    """Let mkdocstrings describe the public names of the package."""
    names = re.findall(r" as (\w+)$", (ROOT / "rlhf_mcore/api/__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    intro = "`import rlhf_mcore as rm` gives these names. [Python](guide/python.md) shows how to use them."
    return _page("Python API", intro, *(f"::: rlhf_mcore.api.{name}" for name in sorted(names, key=str.lower)))


def migration_page(name: str) -> str:
    """List the keys of another trainer that ``migrate`` converts."""
    trainer = TRAINERS[name][0].name
    intro = (
        f"`rlhf-mcore migrate` converts these keys of {trainer} ([guide](migrating/{name}.md)). Keys in one row are converted "
        f"together. `default` is {trainer}'s, of the first key, if it differs from ours. `migrate` lists other keys with a reason."
    )
    return WIDE + _page(f"Keys of {trainer}", intro, _table((trainer, "default", "here"), list(key_rows(name))))


def index_page() -> str:
    """List the pages of the reference."""
    keys = " · ".join(f"[`{name}`](reference/config/{name}.md)" for name in document_config.pages())
    summaries = {name: SUMMARIES.get(name) or import_module(PLUGINS[name]).SUMMARY for name in commands()}
    rows = [(f"[`{name}`](reference/cli/{name}.md)", _text(summary)) for name, summary in summaries.items()]
    others = [
        ("[Presets](reference/presets.md)", "what `algorithm: NAME` sets"),
        ("[Metrics](reference/metrics.md)", "names, meanings, units and healthy ranges"),
        ("[Health rules](reference/health-rules.md)", "bounds of the report's health checks and of the default alarms"),
        ("[Exit codes](reference/exit-codes.md)", "what a command returns to the shell"),
        ("[Faults](reference/faults.md)", "faults that tests inject, and the expected outcomes"),
        *(
            (f"[Keys of {TRAINERS[name][0].name}](reference/migration/{name}.md)", "and our counterparts")
            for name in TRAINERS
        ),
        ("[Agent protocol](reference/agent-protocol.md)", "requests, fields and limits of the agent endpoint"),
        ("[Python API](reference/python.md)", "`import rlhf_mcore as rm`"),
    ]
    return _page(
        "Reference",
        "These pages are generated from the code of this version.",
        "## Configuration keys",
        f"One page per group: {keys}",
        "`rlhf-mcore config explain KEY` prints the same in a terminal, and `configs/base.yaml` contains every key with its default.",
        "## Commands",
        _table(("command", "purpose"), rows),
        "## Other tables",
        _table(("page", "content"), others),
    )


def write() -> None:
    """Write all pages, and delete pages of commands that no longer exist."""
    runpy.run_path(str(ROOT / "tools" / "document_config.py"), run_name="__main__")
    made = pages()
    for page in (PAGES / "cli").glob("*.md"):
        page.unlink()
    for path, text in made.items():
        (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
        (PAGES / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
