"""What mkdocs calls while it builds the site (mkdocs.yml), which asks nothing of a network when it is read.

Links to files outside of docs/ are shown as their paths: on a code host they work, and the site has no such files. The script that
draws diagrams and the one that the search needs on a page from the disk are files of the site. Where ``launch/docs.sh`` could not get
the first, diagrams are their text: the theme would look for it elsewhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mkdocs
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")
_SCRIPTS = Path(mkdocs.__file__).parents[1]
_MERMAID = _SCRIPTS / "mermaid.min.js"
_PLACE = "assets/mermaid.min.js"
_OF_SEARCH = _SCRIPTS / "iframe-worker.js"


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the scripts to the site."""
    for script in (_MERMAID, _OF_SEARCH):
        if script.is_file():
            files.append(File.generated(config, f"assets/{script.name}", abs_src_path=str(script)))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to ``../path`` in a page by ``path``."""
    if not _MERMAID.is_file():
        markdown = markdown.replace("```mermaid\n", "```text\n")
    return _OUTSIDE.sub(r"`\2`", markdown)


def on_post_page(output: str, *, page: Page, **_: Any) -> str:
    """Load the script of diagrams before the theme looks for it."""
    if 'class="mermaid"' not in output or not _MERMAID.is_file():
        return output
    return output.replace("</head>", f'<script src="{get_relative_url(_PLACE, page.url)}"></script></head>', 1)
