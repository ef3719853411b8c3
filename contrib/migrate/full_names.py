"""Look up another trainer's key by its full name, for the core's messages about unknown keys."""

from __future__ import annotations

from rlhf_mcore.config.other_names import OtherName
from rlhf_mcore_contrib.migrate import openrlhf, verl


def find_full_name(name: str, *, rows: bool) -> OtherName | None:
    """Look up a dotted name in the tables.

    Args:
        name: for example ``actor_rollout_ref.rollout.n``.
        rows: look for keys that are one key here; otherwise for keys with a reason why they are not.
    """
    if "." not in name:
        return None
    for table in (verl.TABLE, openrlhf.TABLE):
        if rows:
            if ours := tuple(row.ours for row in table.rows if row.theirs == name):
                return OtherName(ours[:1], trainer=table.name)
        elif reason := table.reasons.get(name):
            return OtherName((), reason, table.name)
        elif any(name in joint.theirs for joint in table.joints):
            return OtherName((), f"it is a key of {table.name}'s", table.name)
    return None
