"""The migration guides name all keys of the tables, and only keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_mcore.config.keys import KEYS
from rlhf_mcore_contrib.migrate import openrlhf, trl, verl
from rlhf_mcore_contrib.migrate.table import Table

DOCS = Path(__file__).resolve().parents[3] / "docs" / "migrating"
SHORT = {"actor_rollout_ref.actor.": "ACTOR.", "actor_rollout_ref.rollout.": "ROLLOUT."}


def rows(page: str) -> list[tuple[str, str]]:
    """Return both cells of every row in the key tables of a page."""
    text = (DOCS / page).read_text(encoding="utf-8").partition("## Checkpoints")[0]
    return [(left, right) for left, right in re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.MULTILINE) if "`" in left]


@pytest.mark.parametrize(
    ("page", "table"), [("verl.md", verl.TABLE), ("openrlhf.md", openrlhf.TABLE), ("trl.md", trl.TABLE)]
)
def test_every_key_that_is_carried_over_is_on_the_page(page: str, table: Table) -> None:
    left = " ".join(cell for cell, _ in rows(page))
    right = " ".join(cell for _, cell in rows(page))
    for row in table.rows:
        name = row.theirs
        for long, short in SHORT.items():
            name = name.replace(long, short)
        group = name.rpartition(".")[0] + ".*`"  # as for the actor
        assert name in left or group in left, row.theirs
        assert row.ours.rpartition(".")[2] in right, row.ours
    for joint in table.joints:
        first = joint.theirs[0]
        assert first.rpartition(".")[2] in left or first.rpartition(".")[0] + ".*`" in left, first


@pytest.mark.parametrize(
    "page",
    ["verl.md", "openrlhf.md", "megatron-lm.md", "trl.md", "slime.md", "nemo-rl.md"],
)
def test_the_first_key_of_a_line_is_one_of_ours(page: str) -> None:
    found = [re.match(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)", right) for _, right in rows(page)]
    named = [match[1] for match in found if match]
    assert len(named) > 25
    assert [key for key in named if key not in KEYS] == []
