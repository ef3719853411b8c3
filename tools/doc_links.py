"""Links on generated pages. Help texts name pages by their path below docs/: ``[rewards](guide/rewards/index.md)``."""

from __future__ import annotations

import os
import re

GENERATED = "<!-- Written by {}. Do not edit. -->"
WIDE = "---\nhide: [toc]\n---\n\n"  # front matter of pages that are one wide table


def relative_links(markdown: str, page: str) -> str:
    """Make links to pages below docs/ relative to ``page``, which is itself a path below docs/."""

    def relative(found: re.Match[str]) -> str:
        return f"]({os.path.relpath(found[1], os.path.dirname(page))}{found[2] or ''})"

    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+\.md)(#[^)]*)?\)", relative, markdown)
