"""Findings of checks, and their output as text and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

SEVERITIES = ("ok", "note", "warning", "error")  # in increasing order; a note needs no action
REINSTALL = "run ./launch/setup.sh, or install the versions of requirements/"
CONTAINER = "use the image that the Dockerfile builds; NVIDIA's PyTorch container includes it"
SYNCHRONISE = "synchronise the clocks (chrony or ntpd)"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check on one node. ``consequence`` and ``remedy`` are empty if no action is needed."""

    check: str
    severity: str
    found: str
    consequence: str = ""
    remedy: str = ""
    node: str = ""

    def __post_init__(self) -> None:
        assert self.severity in SEVERITIES, self.severity
        assert self.severity in ("ok", "note") or (self.consequence and self.remedy), self.check


def judge(check: str, severity: str | None, found: str, consequence: str, remedy: str) -> Finding:
    """Return a finding with this severity; None: nothing is wrong. Then the consequence and remedy of the problem are left out."""
    if severity in (None, "note"):
        return Finding(check, severity or "ok", found)
    return Finding(check, severity, found, consequence, remedy)


def worst(findings: Iterable[Finding]) -> str:
    """Return the highest severity among findings; "ok" for none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the content of ``doctor --json``."""
    return {"worst": worst(findings), "findings": [asdict(finding) for finding in findings]}


def as_text(findings: Sequence[Finding]) -> str:
    """Return one line per finding, followed by its consequence and remedy, if any."""
    name_nodes = len({finding.node for finding in findings}) > 1
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        node = f" [{finding.node}]" if name_nodes and finding.node else ""
        lines.append(f"{finding.severity:<8} {finding.check:<{width}}  {finding.found}{node}")
        for label, text in (("so", finding.consequence), ("do", finding.remedy)):
            if text:
                lines.append(f"{' ' * (width + 11)}{label}: {text}")
    counts = {name: sum(f.severity == name for f in findings) for name in SEVERITIES[::-1]}
    summary = ", ".join(
        f"{count} {name}" + ("s" if count != 1 and name != "ok" else "") for name, count in counts.items() if count
    )
    return "\n".join([*lines, "", f"{summary or 'nothing checked'}"])
