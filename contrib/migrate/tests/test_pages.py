"""The migration guides and their key tables name only keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_mcore.config.keys import KEYS
from rlhf_mcore_contrib.migrate.pages import PAGES, key_rows

DOCS = Path(__file__).resolve().parents[3] / "docs" / "migrating"


@pytest.mark.parametrize("page", list(PAGES))
def test_every_row_of_a_key_table_begins_with_one_of_our_keys(page: str) -> None:
    table, joints, _, _ = PAGES[page]
    assert {joint.theirs[0] for joint in table.joints} == set(joints)
    for theirs, _, ours in key_rows(page):
        found = re.match(r"`([a-z_0-9.]+)`", ours)
        assert ours == "not needed" or (
            found and (found[1] in KEYS or any(key.startswith(found[1] + ".") for key in KEYS))
        ), theirs


@pytest.mark.parametrize("page", ["verl.md", "openrlhf.md", "megatron-lm.md", "trl.md", "slime.md", "nemo-rl.md"])
def test_the_first_key_of_a_line_is_one_of_ours(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8").partition("## Checkpoints")[0]
    found = re.findall(r"^\| .*? \| `([a-z_0-9]+(?:\.[a-z_0-9]+)*)[`:].*? \|$", text, re.MULTILINE)
    assert len(found) > 2
    assert [key for key in found if key not in KEYS] == []
