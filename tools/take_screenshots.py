"""The pictures of the report in docs/images, in Chromium, of runs that were made: python tools/take_screenshots.py RUN RUN

The second run is one with rollouts/tokens-*.jsonl (logging.rollout_tokens). Needs what ./launch/test.sh --with browser installs.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from rlhf_mcore.cli.report import main as report

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = {"width": 1180, "height": 760}


def main(runs: list[str]) -> int:
    """Write the pictures; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        out = Path(folder) / "report.html"
        if report([*runs, "--out", str(out)]) != 0:
            return 1
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE)
        page.goto(out.as_uri())
        page.locator(".chart canvas").first.wait_for()
        page.screenshot(path=IMAGES / "report.png")
        page.get_by_role("tab", name="Rollouts").click()
        page.locator("#filter-colour").select_option("advantages")
        page.locator("details.group > summary").first.click()
        page.locator(".sample").first.wait_for()
        page.screenshot(path=IMAGES / "rollouts.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
