"""The doctor's line about the sandbox."""

from __future__ import annotations

import pytest

from rlhf_mcore.commands.doctor.isolation import check_isolation
from rlhf_mcore.sandbox.run import Level


@pytest.mark.parametrize(
    ("level", "severity"),
    [
        (Level("namespaces", ("namespaces", "Landlock 7", "seccomp", "rlimits")), "ok"),
        (Level("namespaces", ("namespaces", "rlimits"), ("seccomp: no libseccomp.so.2",)), "note"),
        (
            Level("filters", ("Landlock 4", "seccomp", "rlimits"), ("namespaces: unshare: Operation not permitted",)),
            "note",
        ),
        (Level("rlimits", ("rlimits",), ("filters: Landlock: not in this kernel",)), "warning"),
    ],
)
def test_how_bad_a_level_is(level: Level, severity: str) -> None:
    finding = check_isolation(level)
    assert (finding.check, finding.severity) == ("sandbox", severity)
    assert all(text in finding.found for text in (level.name, *level.walls, *level.missing))
    assert ("reward.sandbox.minimum=filters" in finding.consequence) == (severity == "warning")
