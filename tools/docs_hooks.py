"""Hooks that mkdocs calls while it builds the site (mkdocs.yml). A reader of the site needs no network.

- READMEs of plug-ins, pages of measurements, CONTRIBUTING.md and CHANGELOG.md become pages of the site.
- Links to other files outside docs/ become the path of the file, because the site does not contain it.
- The scripts for diagrams and for search from the disk become files of the site. If ``launch/docs.sh`` could not fetch the first,
  diagrams are shown as text; otherwise the theme would load the script from the network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import mkdocs
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)")
_SCRIPTS = Path(mkdocs.__file__).parents[1]
_MERMAID = _SCRIPTS / "mermaid.min.js"
_PLACE = "assets/mermaid.min.js"
_OF_SEARCH = _SCRIPTS / "iframe-worker.js"


def _outside_pages() -> dict[str, str]:
    """Return path in the repository -> path below docs/ of the pages that lie outside docs/."""
    pages = {
        "CONTRIBUTING.md": "contributing.md",
        "CHANGELOG.md": "changelog.md",
        "contrib/README.md": "plugins/index.md",
    }
    for path in sorted(ROOT.glob("contrib/*/README.md")):
        pages[path.relative_to(ROOT).as_posix()] = f"plugins/{path.parent.name}.md"
    for path in sorted([*ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("benchmarks/results/*.svg")]):
        pages[path.relative_to(ROOT).as_posix()] = f"measurements/{path.name}"
    return pages


PAGES = _outside_pages()


def on_config(config: MkDocsConfig) -> None:
    """List the generated pages of a folder in the navigation: an entry ``Title: reference/cli/`` becomes a section."""

    def expand(entries: list[dict[str, object]]) -> None:
        for entry in entries:
            for title, value in entry.items():
                if isinstance(value, list):
                    expand(value)
                elif str(value).endswith("/"):
                    entry[title] = [f"{value}{page.name}" for page in sorted((ROOT / "docs" / str(value)).glob("*.md"))]

    expand(config.nav or [])


@event_priority(100)  # before the redirects look for their targets
def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add pages from outside docs/ and the scripts to the site."""
    for path, uri in PAGES.items():
        file = File.generated(config, uri, abs_src_path=str(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(file)
    for script in (_MERMAID, _OF_SEARCH):
        if script.is_file():
            files.append(File.generated(config, f"assets/{script.name}", abs_src_path=str(script)))


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace links that cross the border of docs/ by links within the site, or by the path of the file."""
    if not _MERMAID.is_file():
        markdown = markdown.replace("```mermaid\n", "```text\n")
    uri = page.file.src_uri
    sources = {site: path for path, site in PAGES.items()}
    folder = os.path.dirname(sources.get(uri, f"docs/{uri}"))

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = os.path.normpath(f"{folder}/{target}")
        inside = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)
        if inside is None:
            return f"`{path}`"
        return f"[{text}]({os.path.relpath(inside, os.path.dirname(uri) or '.')}{anchor})"

    return _LINK.sub(link, markdown)


def on_post_page(output: str, *, page: Page, **_: object) -> str:
    """Load the script of diagrams before the theme looks for it."""
    if 'class="mermaid"' not in output or not _MERMAID.is_file():
        return output
    return output.replace("</head>", f'<script src="{get_relative_url(_PLACE, page.url)}"></script></head>', 1)
