"""The documentation as a site: it builds, its links lead somewhere, and a browser that opens it from the disk needs no network.

Skipped without mkdocs-material, Chromium and playwright: `./launch/test.sh --with docs --with browser` installs them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, run_command

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MKDOCS = Path(sys.prefix) / "docs"
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(not (MKDOCS / "iframe-worker.js").is_file(), reason="needs ./launch/docs.sh install"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(folder)]
    done = run_command(command, ROOT, {**os.environ, "PYTHONPATH": str(MKDOCS), "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def page(site: Path) -> Iterator[Any]:
    """A page that is opened from the disk, with every request that leaves it."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.asked = []
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(f"file://{site}/index.html")
        yield page
        browser.close()


def test_every_page_is_built_and_links_lead_somewhere(site: Path) -> None:
    """``--strict`` makes a broken link an error of the build."""
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}


def test_the_search_works_from_the_disk_without_a_network(page: Any, site: Path) -> None:
    page.locator("input[name=query]").fill("watchdog_s")
    found = page.locator(".md-search-result__link").first
    found.wait_for(timeout=20_000)
    assert "reference/config/" in " ".join(
        page.locator(".md-search-result__link").evaluate_all("links => links.map(link => link.href)")
    )
    assert [url for url in page.asked if not url.startswith((f"file://{site}/", "data:", "blob:"))] == []
