"""The report of a check: severity, finding, consequence and remedy; and its text for people and programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_mcore.commands.doctor.troubles import TROUBLES

SEVERITIES = ("ok", "note", "warning", "error")  # by rising badness; a note is worth knowing and costs nothing


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one node. ``consequence`` and ``remedy`` are empty where nothing has to be done."""

    check: str
    severity: str
    found: str
    consequence: str = ""
    remedy: str = ""
    node: str = ""

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity
        assert self.severity in ("ok", "note") or (self.consequence and self.remedy), self.check


def judge(check: str, severity: str, found: str, trouble: str = "", **values: object) -> Finding:
    """Make a finding. A bad one has the consequence and the remedy of its ``trouble``, or of its check, filled with ``values``."""
    if severity in ("ok", "note"):
        return Finding(check, severity, found)
    consequence, remedy = (text.format(**values) for text in TROUBLES[trouble or check])
    return Finding(check, severity, found, consequence, remedy)


def worst(findings: Iterable[Finding]) -> str:
    """Return the highest severity among findings; "ok" for none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Build what ``doctor --json`` prints."""
    return {"worst": worst(findings), "findings": [asdict(finding) for finding in findings]}


def as_text(findings: Sequence[Finding]) -> str:
    """Write a line per finding, with consequence and remedy under those that have them."""
    name_nodes = len({finding.node for finding in findings}) > 1
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        node = f" [{finding.node}]" if name_nodes and finding.node else ""
        lines.append(f"{finding.severity:<8} {finding.check:<{width}}  {finding.found}{node}")
        indent = " " * (width + 11)
        if finding.consequence:
            lines.append(f"{indent}so: {finding.consequence}")
        if finding.remedy:
            lines.append(f"{indent}do: {finding.remedy}")
    counts = {name: sum(f.severity == name for f in findings) for name in SEVERITIES[::-1]}
    summary = ", ".join(
        f"{count} {name}" + ("s" if count != 1 and name != "ok" else "") for name, count in counts.items() if count
    )
    return "\n".join([*lines, "", f"{summary or 'nothing checked'}"])
