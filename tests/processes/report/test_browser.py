"""Open the report in a real browser. Skipped without Chromium and playwright: `./launch/test.sh --with browser` installs both."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from PIL import Image

from rlhf_mcore.commands.report.command import main
from rlhf_mcore.commands.report.server import ReportServer
from tests.commands import ROOT

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.ci, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>"
STEPS, PROMPTS, SAMPLES = 79, 16, 8  # 10,112 rollouts


def write_run(directory: Path, seed: int, lr: float) -> None:
    """Write a run of 79 steps whose entropy collapses, with answers of random words."""
    rng = random.Random(seed)
    (directory / "rollouts").mkdir(parents=True)
    (directory / "config.yaml").write_text(f"seed: {seed}\nactor: {{optimizer: {{lr: {lr}}}}}\nproject: p\n")
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(STEPS + 1):
            reward = 0.3 + 0.6 * (1 - math.exp(-step / 20)) + rng.gauss(0, 0.02)
            timing = {"timing/generate_s": 2.0, "timing/update_s": 1.0, "timing/unix_time": 1.7e9 + 3.0 * step}
            timing["timing/prefix_hit"] = 0.5  # a share, but not of a phase
            metrics = {
                "reward/mean": reward,
                "actor/entropy": 2 * 0.93**step,
                "reward/errors": 0.0,
                "progress/samples": 128.0 * step,
            }
            file.write(json.dumps({"step": step, **metrics, **timing}) + "\n")
    for step in range(1, STEPS + 1):
        with (directory / "rollouts" / f"step-{step:06d}.jsonl").open("w") as file:
            for prompt in range(PROMPTS):
                for sample in range(SAMPLES):
                    record = {"step": step, "prompt_id": f"train#{prompt}", "sample": sample, "ground_truth": "7"}
                    words = rng.choices(["so", "the", "answer", "is", "seven"], k=60)
                    record |= {"prompt": f"What is {prompt}?", "response": " ".join(words), "num_tokens": 60}
                    record |= {"score": float(sample % 2), "finish_reason": "stop", "policy_version": step - 1}
                    file.write(json.dumps(record) + "\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "slow", 1, 0.001)
    write_run(folder / "fast", 2, 0.01)
    record = {"step": 79, "prompt_id": "x", "sample": 0, "prompt": HOSTILE, "response": f"needle {HOSTILE}"}
    turns = [{"writer": "policy", "text": "needle guess 5", "reward": 0.0}]
    turns += [{"writer": "environment", "text": "too low", "reward": 0.0}]
    with (folder / "slow" / "rollouts" / "step-000079.jsonl").open("a") as file:
        for sample, more in enumerate(({}, {"turns": turns}, {"failure": "timeout"})):
            file.write(json.dumps({**record, "sample": sample, "score": 1.0, "num_tokens": 900, **more}) + "\n")
    tokens = {"tokens": ["so ", HOSTILE, ""], "advantages": [1.0, -0.5, 0.0], "logprob_differences": [0.01, 0.0, -0.02]}
    with (folder / "slow" / "rollouts" / "tokens-000079.jsonl").open("w") as file:
        file.write(json.dumps({"prompt_id": "x", "sample": 0, **tokens}) + "\n")
    return [folder / "slow", folder / "fast"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """Open a page. Its console must stay empty, and it may request only itself."""
    page, said = browser.new_page(viewport={"width": 1300, "height": 900}), []
    page.set_default_timeout(120_000)  # a busy machine
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("requestfailed", lambda request: said.append(request.url[:80]))
    yield page
    page.close()
    assert said == []


def test_two_runs_side_by_side_with_ten_thousand_rollouts_each(page: Any, runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    assert main([*map(str, runs), "--out", str(out), "--rollouts", "11000"]) == 0
    page.goto(out.as_uri())
    assert page.title() == "slow, fast · rlhf_mcore"

    # Health: the entropy of both runs has collapsed (means of 8 steps, 72 apart: 0.93**72). No other rule fires.
    # The table of runs shows this for each run, and then each run's own page.
    assert page.locator("td.state.bad").count() == 4 and page.locator("td.state.watch").count() == 0
    assert "0.5 %" in page.locator("tr", has=page.locator("td.state.bad")).nth(2).inner_text()
    page.locator(".chart canvas").first.wait_for()

    # Charts: filter by name, choose the axis, hide a run.
    page.get_by_role("tab", name="Charts").click()
    page.locator("#metric-filter").fill("reward/me")
    page.locator("[data-metric='reward/mean'] canvas").wait_for()
    assert page.locator(".chart").count() == 1
    page.locator("#axis").select_option("hours")
    legend = page.locator(".chart .u-legend")
    legend.wait_for()
    assert "hours" in legend.inner_text() and "slow" in legend.inner_text() and "fast" in legend.inner_text()
    page.get_by_label("fast").uncheck()
    page.locator(".chart .u-legend").wait_for()
    assert "fast" not in page.locator(".chart .u-legend").inner_text()
    page.get_by_label("fast").check()

    # Time: generation takes two of three seconds.
    page.get_by_role("tab", name="Time").click()
    assert "66.7 %" in page.locator("tr", has_text="generate").first.inner_text()
    assert page.locator("tbody").first.locator("tr td:first-child").all_inner_texts() == ["generate", "update"]

    # Rollouts: the count, a search, matches shown as plain text, folded turns of an environment.
    page.get_by_role("tab", name="Rollouts").click()
    assert page.locator("#count").inner_text().startswith(f"{STEPS * PROMPTS * SAMPLES + 3} rollouts")
    assert page.locator("details.group").count() == 50
    page.locator("#more").click()
    assert page.locator("details.group").count() == 100
    page.locator("#filter-least").fill("1")
    page.locator("#filter-from").fill("79")
    assert (
        page.locator("#count").inner_text().startswith(f"{PROMPTS * SAMPLES // 2 + 3} rollouts in {PROMPTS + 1} groups")
    )
    page.locator("#filter-text").fill("NEEDLE")
    assert page.locator("#count").inner_text() == "3 rollouts in 1 group"
    page.locator("details.group > summary").click()
    page.locator(".sample").nth(2).wait_for()
    assert page.locator(".sample").count() == 3 and page.locator("mark").first.inner_text() == "needle"
    assert "<img src=x" in page.locator(".sample").first.inner_text() and page.locator("main img").count() == 0
    assert page.locator("details.environment").get_attribute("open") is None

    # Tokens: green for positive advantages, red for negative ones. The strength is the share of the group's largest.
    page.locator("#filter-colour").select_option("advantages")
    page.locator("details.group > summary").click()
    page.locator(".tokens span").nth(2).wait_for()
    strengths = [token.evaluate("span => span.style.background") for token in page.locator(".tokens span").all()]
    assert strengths == ["rgba(46, 160, 87, 0.75)", "rgba(214, 62, 62, 0.38)", "rgba(46, 160, 87, 0)"]
    assert page.locator(".tokens span").nth(1).inner_text() == HOSTILE
    assert page.locator(".tokens span").first.get_attribute("title") == "advantage 1, logprob difference 0.01"
    page.locator("#filter-colour").select_option("logprob_differences")
    page.locator("details.group > summary").click()
    assert "0.75" in page.locator(".tokens span").nth(2).evaluate("span => span.style.background")
    assert page.locator(".tokens").count() == 1
    page.locator("#filter-colour").select_option("")
    page.locator("#filter-failed").check()
    assert page.locator("#count").inner_text().startswith("1 rollout in 1 group")

    # Configuration: first the differences, then all keys.
    page.get_by_role("tab", name="Configuration").click()
    assert page.locator("tbody tr td:first-child").all_inner_texts() == ["seed", "actor.optimizer.lr"]
    page.locator("#config-all").check()
    page.locator("#config-filter").fill("proj")
    assert page.locator("tbody tr").all_inner_texts() == ["project\tp\tp"]
    assert page.title() == "slow, fast · rlhf_mcore"


def test_a_run_that_goes_on_is_seen_to(page: Any, runs: list[Path]) -> None:
    with ReportServer(runs[1:], 100, 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            page.get_by_text(f"step {STEPS} ").wait_for()
            with (runs[1] / "metrics.jsonl").open("a") as file:
                file.write('{"step": 123, "reward/mean": 0.9}\n')
            page.get_by_text("step 123 ").wait_for()
            assert page.get_by_text(f"step {STEPS} ").count() == 0
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write eleven runs: three seeds of one configuration, seven learning rates, and one with NaN from step 16.

    No response scores 0.
    """
    folder = tmp_path_factory.mktemp("outputs")
    for number in range(11):
        directory = folder / "p" / f"run-{number:02d}"
        (directory / "rollouts").mkdir(parents=True)
        lr = 1 if number < 3 else number
        (directory / "config.yaml").write_text(f"seed: {number}\nexperiment: {directory.name}\nactor: {{lr: {lr}}}\n")
        with (directory / "metrics.jsonl").open("w") as file:
            for step in range(31):
                spoiled = number == 10 and step >= 16
                line = {"reward/mean": None if spoiled else number + step / 30, "reward/share_zero": 0.0}
                line |= {"actor/grad_norm": None if spoiled else 1.0, "rollout/truncated_fraction": 0.0}
                file.write(json.dumps({"step": step, **line}) + "\n")
        for step in (1, 2):
            record = {"step": step, "prompt_id": "a", "sample": 0, "prompt": "p", "response": "r", "score": 1.0}
            (directory / "rollouts" / f"step-{step:06d}.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_a_live_index_of_all_runs(page: Any, many: Path) -> None:
    with ReportServer([], 100, 0, folder=many) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            rows = page.locator("table").first.locator("tbody tr")
            assert page.title() == "11 runs · rlhf_mcore" and rows.count() == 11
            cells = rows.nth(4).locator("td").all_inner_texts()
            assert [cells[0].strip(), cells[1], cells[3]] == ["run-04", "30", "5"]  # the last reward: 4 + 30 / 30
            swatches = page.locator("#runs .swatch").evaluate_all("all => all.map((one) => one.style.background)")
            assert len(set(swatches)) == 11, "every run has a colour of its own"

            # Three seeds form one line with a band. Eight runs have separate lines.
            chart = page.locator("[data-metric='reward/mean']")
            legend = chart.locator(".u-legend")
            chart.scroll_into_view_if_needed()  # charts are rendered only when visible
            legend.wait_for()
            assert "run-00, mean of 3 seeds" in legend.inner_text() and "run-01" not in legend.inner_text()
            assert legend.locator("tr").count() == 1 + 3 + 8
            page.locator("#seeds").uncheck()
            chart.scroll_into_view_if_needed()
            legend.wait_for()
            assert legend.locator("tr").count() == 1 + 11 and "run-01" in legend.inner_text()

            # Older values do not decide the rules of a metric that is now NaN.
            assert page.get_by_text("NaN from step 16: actor/grad_norm, reward/mean").count() == 1
            assert rows.nth(10).locator("td").all_inner_texts()[2:4] == ["✗ bad", "NaN"]

            # A share that is always 0 uses the axis of shares.
            page.get_by_role("tab", name="Charts").click()
            page.locator("#metric-filter").fill("share_zero")
            page.locator("[data-metric='reward/share_zero'] canvas").wait_for()

            # A new run is listed too. A run's own page shows its rollouts, the newest first.
            page.get_by_role("tab", name="Health").click()
            later = many / "q" / "later"
            later.mkdir(parents=True)
            (later / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
            page.get_by_role("link", name="later").wait_for()
            page.get_by_role("link", name="run-10").click()
            page.wait_for_url("**/run/p/run-10/")
            page.get_by_role("tab", name="Rollouts").click()
            steps = page.locator("details.group summary .faint:first-child").all_inner_texts()
            assert steps == ["step 2", "step 1"]
        finally:
            server.shutdown()
            thread.join()


def test_nothing_is_cut_on_a_narrow_screen(page: Any, runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    assert main([*map(str, runs), "--out", str(out), "--rollouts", "200"]) == 0
    page.set_viewport_size({"width": 390, "height": 844})
    for tab in ("Health", "Charts", "Time", "Rollouts", "Configuration"):
        page.goto("about:blank")
        page.goto(f"{out.as_uri()}#{tab}")
        page.locator("main > *").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, tab
        wide = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        assert page.locator(".scroll").evaluate_all(wide) == 0, tab


SITE = ROOT / "outputs" / "site"  # written by ./launch/docs.sh


@pytest.mark.skipif(not (SITE / "assets" / "mermaid.min.js").is_file(), reason="needs the site, with its diagrams")
def test_the_site_draws_its_diagrams_and_asks_nothing_of_a_network(browser: Any) -> None:
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((SITE / "concepts.html").as_uri())
    page.locator("div.mermaid").first.wait_for(timeout=120_000)  # the diagram has replaced its text
    page.wait_for_load_state("networkidle")
    assert page.locator("pre.mermaid").count() == 0 and page.locator("div.mermaid").first.bounding_box()["height"] > 50
    assert [url for url in asked if not url.startswith("file:")] == []
    page.close()


def test_a_prompt_shows_its_images(page: Any, tmp_path: Path) -> None:
    run, named = tmp_path / "run", ["0a" * 16, "0b" * 16]
    (run / "rollouts").mkdir(parents=True)
    (run / "images").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    Image.new("RGB", (60, 90), (220, 40, 40)).save(run / "images" / named[0], "PNG")
    row = {"step": 1, "prompt_id": "x", "sample": 0, "prompt": "what?", "response": "r", "score": 1.0, "images": named}
    (run / "rollouts" / "step-000001.jsonl").write_text(json.dumps(row) + "\n")
    assert main([str(run)]) == 0
    page.goto((run / "report.html").as_uri() + "#Rollouts")
    page.locator("details.group > summary").click()
    (size,) = page.locator(".pictures img").evaluate_all(
        "all => all.map((one) => [one.naturalWidth, one.naturalHeight])"
    )
    assert size == [60, 90]
    assert "1 image not in this page" in page.locator(".pictures").inner_text()
