"""The report as one HTML file: data, styles, scripts and the chart library (uPlot, MIT) are all inside.

Text of models and users reaches the page as JSON in a script element that is not executed, and is shown as text only. The page's own
policy forbids any other script and any request.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from rlhf_mcore import __version__
from rlhf_mcore.commands.report.health import verdicts
from rlhf_mcore.commands.report.run_data import RunData, different_keys, same_but_for_seeds
from rlhf_mcore.observability.files import json_line

FORMAT = "rlhf_mcore.report"
_NAMED = 4  # runs that a title names


def content(runs: Sequence[RunData], links: Sequence[str] = ()) -> dict[str, Any]:
    """Collect what the page shows: the runs in the order given, their verdicts, and the keys in which their configurations differ.

    Runs of one name are shown under their paths. ``links``: of the page of each run alone, where there are such.
    """
    names = [run.name for run in runs]
    runs = [replace(run, name=run.path) if names.count(run.name) > 1 else run for run in runs]
    return {
        "format": FORMAT,
        "version": __version__,
        "runs": [
            asdict(run) | {"verdicts": [asdict(verdict) for verdict in verdicts(run.metrics, run.not_finite)]}
            for run in runs
        ],
        "seeds": same_but_for_seeds([run.config for run in runs]),
        "links": list(links) or None,
        "different": different_keys([run.config for run in runs]) if runs else [],
    }


def as_json(runs: Sequence[RunData], links: Sequence[str] = ()) -> str:
    """Write ``content`` as JSON. A string in it cannot end the element that holds it: "<" is written as an escape."""
    return json.dumps(json.loads(json_line(content(runs, links))), ensure_ascii=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )


def page(runs: Sequence[RunData], live: bool = False, links: Sequence[str] = ()) -> str:
    """Write the whole page. ``live``: it asks the server that it came from for newer data."""
    scripts = [_asset("uPlot.iife.min.js"), _asset("report.js")]
    hashes, own_server = " ".join(map(_hash, scripts)), "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}; connect-src {own_server}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": escape(", ".join(run.name for run in runs) if len(runs) <= _NAMED else f"{len(runs)} runs"),
        "STYLE": _asset("uPlot.min.css") + _asset("report.css"),
        "LIVE": "true" if live else "false",
        "DATA": as_json(runs, links),
        "CHARTS": scripts[0],
        "SCRIPT": scripts[1],
    }
    pieces = _asset("report.html").split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return files("rlhf_mcore.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
