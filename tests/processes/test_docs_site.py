"""The documentation as a site, opened from the disk in a real browser. Skipped without mkdocs-material, Chromium and playwright:
`./launch/test.sh --with docs --with browser` installs them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, finished

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MKDOCS = Path(sys.prefix) / "docs"
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(not (MKDOCS / "iframe-worker.js").is_file(), reason="needs ./launch/docs.sh install"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "--quiet", "build", "--strict", "--site-dir", str(folder)]
    done = finished(command, ROOT, {**os.environ, "PYTHONPATH": str(MKDOCS), "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def page(site: Path) -> Iterator[Any]:
    """A page that is opened from the disk, with every request that leaves it."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.asked = []
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(f"file://{site}/index.html")
        yield page
        browser.close()


def test_the_search_finds_pages_from_the_disk_and_asks_nothing_of_a_network(page: Any, site: Path) -> None:
    page.locator("input[name=query]").fill("watchdog_s")
    found = page.locator(".md-search-result__link").first
    found.wait_for(timeout=20_000)
    assert "configuration.html" in " ".join(
        page.locator(".md-search-result__link").evaluate_all("links => links.map(link => link.href)")
    )
    assert [url for url in page.asked if not url.startswith((f"file://{site}/", "data:", "blob:"))] == []


def test_the_reader_switches_between_light_and_dark_and_the_choice_stays(page: Any, site: Path) -> None:
    body = page.locator("body")
    assert body.get_attribute("data-md-color-scheme") == "default"
    page.locator("label[for=__palette_1]").click()
    assert body.get_attribute("data-md-color-scheme") == "slate"
    page.goto(f"file://{site}/algorithms.html")
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"
