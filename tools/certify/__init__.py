"""Certify the installed libraries on this machine: parity, sync, sleep, resume, throughput.

``__main__`` runs the parts, each in a separate process. ``layouts`` and ``worker`` compare tiny models of every family with
transformers. ``training`` runs trainings, ``throughput`` measures one device, ``names`` checks the library names that we use.
"""

from __future__ import annotations

Table = list[list[str]]  # rows: what, measured, expected, verdict


def row(what: str, measured: object, expected: str = "-", ok: bool | None = None) -> list[str]:
    """Return a row of a table. ``ok`` is None if the row has no verdict."""
    return [what, str(measured), expected, "-" if ok is None else "ok" if ok else "WRONG"]
