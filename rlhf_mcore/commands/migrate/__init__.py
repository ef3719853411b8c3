"""``rlhf-mcore migrate SRC -o OUT.yaml``: carry the common part of a configuration of verl, OpenRLHF or TRL over.

A launch script, a YAML file or a Python script enters; a configuration of ours leaves, with a list of all that could not be carried
over. Begin reading at ``convert.migrate``; the tables of keys are in ``config.other_trainers``.
"""

from __future__ import annotations

from rlhf_mcore.commands.migrate.command import _parser, main

__all__ = ["SUMMARY", "_parser", "main"]
SUMMARY = "carry a configuration of verl, OpenRLHF or TRL over"
