"""What mkdocs calls while it builds the site (mkdocs.yml): links to files outside of docs/ are shown as their paths.

On a code host those links work; the site has no such files.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with links to ``../path`` replaced by ``path``."""
    return _OUTSIDE.sub(r"`\2`", markdown)
