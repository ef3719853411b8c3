"""Certify the installed libraries on this machine: parity, sync, sleep, resume, throughput.

``__main__`` runs the parts, each in a process of its own. ``layouts`` and ``worker`` compare tiny models of every
family with transformers; ``training`` runs trainings; ``throughput`` measures one device; ``names`` looks up what we use.
"""

from __future__ import annotations

Table = list[list[str]]  # rows: what, measured, expected, verdict


def row(what: str, measured: object, expected: str = "-", ok: bool | None = None) -> list[str]:
    """Make a row. ``ok`` is None if nothing is judged."""
    return [what, str(measured), expected, "-" if ok is None else "ok" if ok else "WRONG"]
