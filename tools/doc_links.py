"""Links on generated pages. Help texts name pages by their path below docs/: ``[rewards](guide/rewards/index.md)``."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = "<!-- Written by {}. Do not edit. -->"


def relative_links(markdown: str, page: str) -> str:
    """Make links to pages below docs/ relative to ``page``, which is itself a path below docs/."""

    def relative(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if target in _moved():
            target, anchor = _moved()[target], ""
        return f"]({os.path.relpath(target, os.path.dirname(page))}{anchor})"

    return re.sub(r"\]\((?![a-z]+:)([^)#\s]+\.md)(#[^)]*)?\)", relative, markdown)


@cache
def _moved() -> dict[str, str]:
    """Return old page -> new page, from the redirects of mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return dict(re.findall(r"^        ([\w-]+\.md): (\S+\.md)$", text, re.MULTILINE))
