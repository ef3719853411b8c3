"""Where programs of a model would run: the isolation that this machine gives."""

from __future__ import annotations

from rlhf_mcore.commands.doctor.findings import Finding
from rlhf_mcore.sandbox.run import REMEDIES, Level


def check_isolation(level: Level) -> Finding:
    """What stands around a program that the reward rule ``code`` or a tool runs."""
    found = f"{level.name}: {', '.join(level.walls)}"
    if level.name == "namespaces" and not level.missing:
        return Finding("sandbox", "ok", found)
    missing = f"{found}; missing: {'; '.join(level.missing)}"
    if level.reaches("filters"):  # enough for reward.sandbox.minimum as it is by default
        return Finding("sandbox", "note", missing)
    return Finding(
        "sandbox",
        "warning",
        missing,
        "a run with the reward rule code, or a tool that runs programs, is refused (reward.sandbox.minimum=filters)",
        REMEDIES["filters"],
    )
