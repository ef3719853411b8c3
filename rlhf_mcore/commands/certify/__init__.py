"""``rlhf-mcore certify``: what is installed here, held against transformers, layout by layout, and one table of it."""

from __future__ import annotations

from rlhf_mcore.commands.certify.command import _parser, main

__all__ = ["SUMMARY", "_parser", "main"]
SUMMARY = "hold what is installed against transformers, family by family, layout by layout; the first thing to run on a cluster"
