from __future__ import annotations

import io
import math
import re

import pytest
import rich.console

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.figures import step_line
from rlhf_mcore.observability.live_display import sparkline
from tests.messages import expect_error

METRICS = {
    "reward/mean": 0.61,
    "loss/kl": 0.0123,
    "rollout/response_length_mean": 7.2,
    "rollout/truncated_fraction": 0.25,
    "rollout/logprob_diff_mean": 3.2e-7,
    "actor/grad_norm": 0.8,
    "timing/step_s": 2.14,
    "loss/policy": 0.5,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 110) -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def log_file() -> rich.console.Console:
    return rich.console.Console(file=io.StringIO(), force_terminal=False, no_color=True, width=80)


def read_output(output: rich.console.Console) -> str:
    assert isinstance(output.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.file.getvalue())


def render_display(console: Console, width: int = 110) -> list[str]:
    """The live display as lines of text."""
    output = rich.console.Console(file=io.StringIO(), width=width)
    assert console.display is not None
    output.print(console.display.render())
    return read_output(output).splitlines()


def test_a_step_is_one_line_in_a_log() -> None:
    assert step_line(7, 40, METRICS) == (
        "step  7/40  reward 0.610  kl 0.0123  len   7.2  cut off 25 %  grad norm  0.80  logprob diff 3e-07  time  2.1 s"
    )
    ahead = {"rollout/staleness_mean": 1.5, "rollout/staleness_max": 3.0, "timing/step_s": 1.0}
    assert step_line(7, 40, ahead) == "step  7/40  stale mean 1.50  max 3  time  1.0 s"
    assert step_line(12, 40, {"reward/mean": math.nan, "evaluate/accuracy": 0.55}) == (
        "step 12/40  reward   nan  accuracy 0.550"
    )


def test_labels_are_explained_once_and_only_those_that_are_shown() -> None:
    output = log_file()
    console = Console("plain", 3, "grpo", output=output)
    console.step(0, {"evaluate/accuracy": 0.5})
    for step in (1, 2):
        console.step(step, {"rollout/response_length_mean": 7.0, "rollout/logprob_diff_mean": 1e-7})
    lines = read_output(output).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "len:", "step", "step"]
    assert "logprob diff: engine against trainer" in lines[1] and "cut off" not in lines[1]


def test_lines_of_a_log_stand_in_columns() -> None:
    later = {**METRICS, "rollout/response_length_mean": 10.9, "timing/step_s": 12.0, "rollout/truncated_fraction": 0}
    assert len(step_line(7, 40, METRICS)) == len(step_line(8, 40, later))


def test_a_log_has_steps_notes_and_the_summary_but_no_phases() -> None:
    output = log_file()
    path = "outputs/" + "x" * 100
    with Console("plain", 2, "grpo", output=output) as console:
        console.note("[evaluate] accuracy 0.5")
        console.phase("generate")
        console.step(1, {"reward/mean": 0.25})
        console.step(2, {"reward/mean": 0.75})
        console.summary("Result", [("accuracy", "0.31", "0.74")], ("", "before", "after"), [f"Run directory {path}"])
    lines = [line.strip() for line in read_output(output).splitlines()]
    assert lines[:3] == ["[evaluate] accuracy 0.5", "step 1/2  reward 0.250", "step 2/2  reward 0.750"]
    text = "\n".join(lines)
    assert "generate" not in text
    assert re.search(r"before .* after", text) and re.search(r"accuracy .* 0\.31 .* 0\.74", text)
    assert lines[-1] == f"Run directory {path}"


@pytest.mark.parametrize("mode", ["plain", "json"])
def test_step_lines_are_thinned_but_for_evaluations_and_the_last_step(mode: str) -> None:
    output = log_file()
    with Console(mode, 30, "grpo", every=10, output=output) as console:
        for step in range(31):
            console.step(step, {"reward/mean": 0.5} | ({"evaluate/reward": 1.0} if step in (0, 15) else {}))
    numbers = re.findall(r'step"?[: ]\s*(\d+)', read_output(output))
    assert numbers == ["0", "1", "11", "15", "21", "30"]


def test_the_live_display_shows_progress_phase_and_figures() -> None:
    clock = Clock()
    console = Console("rich", 40, "quickstart", output=terminal(), clock=clock)
    assert "starting" in render_display(console)[2]
    for step in range(1, 13):
        console.step(step, {**METRICS, "reward/mean": 0.05 * step, "timing/step_s": 2.0})
    clock.now = 130.0
    console.phase("old logprobs")
    lines = render_display(console)
    assert "quickstart" in lines[0]
    assert "step 12/40" in lines[1] and "elapsed 0:00:30 · left 0:00:56 · 2.0 s/step" in lines[1]
    assert "old logprobs" in lines[2]
    assert "reward  ▁▁▂▃▃▄▅▆▆▇██  0.050 → 0.600" in lines[4]
    assert "length  ▅▅▅▅▅▅▅▅▅▅▅▅  7.2 → 7.2" in lines[5]
    assert [line.split()[1] for line in lines[9:15]] == ["7", "8", "9", "10", "11", "12"]
    assert lines[14].split()[2:-1] == ["0.600", "0.0123", "7.2", "25", "%", "0.80", "3e-07", "2.0", "s"]
    assert len({len(line) for line in lines}) == 1


def test_the_evaluation_before_training_is_no_step_of_the_pace() -> None:
    console = Console("rich", 11, "quickstart", output=terminal(), clock=Clock())
    console.step(0, {"evaluate/accuracy": 0.5, "timing/step_s": 0.5})
    text = "\n".join(render_display(console))
    assert "s/step" not in text and "left" not in text and "reward  " not in text
    console.step(1, {**METRICS, "timing/step_s": 20.0})
    assert "left 0:03:20 · 20.0 s/step" in render_display(console)[1]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_figure_is_cut_on_a_narrow_terminal(width: int) -> None:
    console = Console("rich", 40, "quickstart", output=terminal(width))
    console.step(1, {**METRICS, "actor/entropy": 1.25, "evaluate/accuracy": 0.5})
    lines = render_display(console, width)
    assert max(map(len, lines)) <= min(width, 110)
    assert "…" not in "".join(lines)
    assert "0.610" in lines[-2] and "0.500" in lines[-2]
    assert ("1.25" in lines[-2]) == (width >= 80)


def test_a_terminal_keeps_the_last_display_and_then_the_summary() -> None:
    output = terminal()
    with Console("rich", 2, "quickstart", output=output) as console:
        console.note("engines are up")
        console.phase("generate")
        console.step(1, METRICS)
        console.step(2, METRICS)
        console.summary("Result", [("reward", "0.31", "0.74")], ("", "before", "after"), ["Run directory  out"])
    text = read_output(output)
    assert "engines are up" in text
    assert text.index("Result") > text.rindex("step 2/2")
    assert text.rstrip().endswith("Run directory  out")


def test_a_run_that_fails_says_that_it_stopped() -> None:
    output = terminal()
    with pytest.raises(KeyError), Console("rich", 2, "quickstart", output=output) as console:
        console.phase("generate")
        raise KeyError
    assert read_output(output).rindex("stopped") > read_output(output).find("generate")


def test_the_display_of_a_continued_run_begins_at_its_step_and_shows_what_a_signal_asks_for() -> None:
    output = terminal()
    with Console("rich", 20, "quickstart", first_step=12, output=output) as console:
        console.acknowledge("Ctrl-C: this step is finished and saved")
        shown = "\n".join(render_display(console))
    assert "step 12/20" in shown and "step 0/20" not in shown
    assert "Ctrl-C: this step is finished and saved" in shown and "Ctrl-C" not in "".join(render_display(console))


def test_a_long_line_is_cut_between_words_and_a_path_stays_whole() -> None:
    output, path = terminal(), "/".join(["directory"] * 14)
    with Console("rich", 20, "quickstart", output=output) as console:
        console.note(f"first:\n  | {'many words ' * 12}{path}")
    lines = [line.rstrip() for line in read_output(output).splitlines()]
    assert lines[:2] == ["first:", f"  | {'many words ' * 9}many"] and f"  {path}" in lines


def test_a_log_gets_what_a_signal_asks_for_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with Console("plain", 20, "quickstart") as console:
        console.acknowledge("asked to save")
    assert capfd.readouterr().out == "asked to save\n"


def test_a_notebook_whose_output_is_no_file_survives_a_signal() -> None:
    output = log_file()
    with Console("plain", 20, "quickstart", output=output) as console:
        console.acknowledge("asked to save")
        console.note("saved")
    assert read_output(output) == "saved\n"


def test_off_prints_nothing() -> None:
    output = log_file()
    with Console("off", 2, "grpo", output=output) as console:
        console.note("note")
        console.phase("generate")
        console.step(1, METRICS)
        console.summary("Result", [("a", "b")], ("", "c"), ["d"])
    assert read_output(output) == ""


def test_auto_is_plain_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert Console("auto", 1, "grpo").mode == "plain"


def test_an_unknown_mode_is_refused() -> None:
    with expect_error(
        ConfigError, field="logging.console", value="'fancy'", remedy=("auto", "rich", "plain", "json", "off")
    ):
        Console("fancy", 1, "grpo")


@pytest.mark.parametrize(
    "values, width, bars",
    [
        ([], 8, ""),
        ([1.0, 2.0], 8, "▁█"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8, "▁▂▃▄▅▆▇█"),
        ([5.0, 5.0, 5.0], 8, "▅▅▅"),
        ([0.0, 0.0, 1.0, 1.0], 2, "▁█"),
        ([0.0, math.nan, 1.0], 8, "▁ █"),
        ([math.nan], 8, " "),
    ],
)
def test_sparkline(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars
