"""The pictures of docs/images, in Chromium, of runs that were made: python tools/take_screenshots.py RUN RUN

The display of the first run as it was after two thirds of its steps, the report of both, and rollouts of the second, whose tokens are
coloured if it has recorded them (logging.rollout_tokens). Needs what ./launch/test.sh --with browser installs.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import rich.console
from playwright.sync_api import sync_playwright
from rich.terminal_theme import MONOKAI

from rlhf_mcore.commands.report.command import main as report
from rlhf_mcore.observability.console import Console

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = {"width": 1180, "height": 940}
CLOCK = "timing/unix_time"


def display(run: Path) -> str:
    """Write a page with the live display of a run, from what it has recorded."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    until = 2 * len(lines) // 3
    sample = json.loads((run / "rollouts" / f"step-{lines[until - 1]['step']:06d}.jsonl").read_text().splitlines()[0])
    now = lines[0][CLOCK]
    output, shown = (
        rich.console.Console(file=io.StringIO(), width=110, height=50, force_terminal=True, record=record)
        for record in (False, True)
    )
    with Console(
        "rich", lines[-1]["step"], f"{run.parent.name} / {run.name}", output=output, clock=lambda: now
    ) as console:
        for line in lines[:until]:
            now = line[CLOCK]
            console.step(line["step"], line)
        console.sample(lines[until - 1]["step"], sample["prompt"], sample["response"], sample["score"])
        console.phase("generate")
        assert console.display is not None
        shown.print(console.display.render())
    return shown.export_html(inline_styles=True, theme=MONOKAI)


def main(runs: list[str]) -> int:
    """Write the pictures; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        out = Path(folder) / "report.html"
        if report([*runs, "--out", str(out)]) != 0:
            return 1
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE)
        page.set_content(f"<style>pre {{ display: inline-block; padding: 8px }}</style>{display(Path(runs[0]))}")
        page.locator("pre").screenshot(path=IMAGES / "console.png")
        page.goto(out.as_uri())
        page.locator(".chart canvas").first.wait_for()
        page.screenshot(path=IMAGES / "report.png")
        page.get_by_role("tab", name="Rollouts").click()
        page.locator("#filter-run").select_option(index=1)
        if page.locator("#filter-colour").count():
            page.locator("#filter-colour").select_option("advantages")
        page.locator("details.group > summary").first.click()
        page.locator(".sample").first.wait_for()
        page.screenshot(path=IMAGES / "rollouts.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
