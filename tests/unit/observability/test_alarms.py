"""Test alarms: when a rule raises one, how often, and the action that follows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rlhf_mcore.checkpoint.triggers import SignalRequests
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.rules.run import alarm_problems
from rlhf_mcore.config.schema import AlarmRuleConfig, AlarmsConfig, Config
from rlhf_mcore.observability.alarms import AlarmBell, Alarms
from rlhf_mcore.observability.throughput import Timers
from rlhf_mcore.own_processes import has_ended
from rlhf_mcore.trainer.loop import TrainingLoop
from rlhf_mcore.trainer.record import RunRecord
from tests.commands import wait_for
from tests.messages import expect_error
from tests.unit.parallel.world import world

__all__ = ["world"]
NAN = float("nan")
pytestmark = pytest.mark.usefixtures("world")  # warnings of other ranks are gathered


def find_alarms(values: list[dict[str, float]], cfg: AlarmsConfig | None = None) -> list[tuple[int, str]]:
    """Return (step, name) of each alarm. Steps count from 1."""
    alarms = Alarms(cfg or AlarmsConfig())
    return [(alarm.step, alarm.name) for step, metrics in enumerate(values, 1) for alarm in alarms.check(step, metrics)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # The mean of the last tenth is at first the last value. The third step in a row is above 10.
        ([{"kl/mean": value} for value in (0.1, 11, 0.2, 11, 12, 13, 14)], [(6, "KL to the reference")]),
        # A tenth of 20 to 29 steps is two steps. Both are below 5 % of 2.0 at step 22, and for the third time at step 24.
        ([{"actor/entropy": 2.0}] * 20 + [{"actor/entropy": 0.05}] * 12, [(24, "remaining entropy")]),
        ([{"reward/share_zero": 1.0}] * 12, [(10, "zero rewards")]),
        ([{"reward/share_zero": 0.99}] * 30, []),
        ([{"actor/grad_norm": 1.0}] * 25 + [{"actor/grad_norm": 300.0}], [(26, "gradient spikes")]),
        ([{"rollout/logprob_diff_mean": 0.2}] * 4, [(3, "engine against trainer")]),
        # 1 of 16 responses twice in a row, then 8 of 16. progress/samples counts all steps.
        (
            [{"reward/errors": e, "progress/samples": 16.0 * n} for n, e in enumerate((0, 1, 0, 8, 8), 1)],
            [(5, "reward errors")],
        ),
        ([{"loss/total": 1.0}, {"loss/total": NAN, "kl/mean": NAN}, {"loss/total": NAN}], [(2, "not finite")]),
        # Half precision sometimes skips an update with a non-finite gradient. Three steps in a row raise an alarm.
        ([{"actor/skipped_updates": 1.0, "actor/grad_norm": NAN}] * 4, [(3, "skipped updates")]),
        # Silent during the alarm and for ten steps after it.
        ([{"loss/total": NAN}, *[{"loss/total": 1.0}] * 9, {"loss/total": NAN}], [(1, "not finite")]),
        ([{"loss/total": NAN}, *[{"loss/total": 1.0}] * 10, {"loss/total": NAN}], [(1, "not finite"), (12, "not finite")]),
        # Ten steps in a row. Trouble at step 6 is silent and restarts the count.
        ([{"loss/total": NAN if step in (1, 6, 13) else 1.0} for step in range(1, 14)], [(1, "not finite")]),
    ],
)  # fmt: skip
def test_the_default_rules(steps: list[dict[str, float]], expected: list[tuple[int, str]]) -> None:
    assert find_alarms(steps) == expected


def test_a_rule_of_ones_own_replaces_the_default_one_of_its_metric() -> None:
    own = AlarmsConfig(
        rules=[AlarmRuleConfig(metric="kl/mean", above=0.5, steps=2), AlarmRuleConfig(metric="reward/mean", below=0.0)]
    )
    steps = [{"kl/mean": 20.0, "reward/mean": 0.0}, {"kl/mean": 20.0, "reward/mean": -0.5}, {"kl/mean": 20.0}]
    assert find_alarms(steps, own) == [(2, "kl/mean"), (2, "reward/mean")]
    own.defaults = False
    assert find_alarms([{"loss/total": NAN, "reward/share_zero": 1.0}] * 12, own) == []


def bell(cfg: AlarmsConfig, notes: list[str]) -> tuple[AlarmBell, SignalRequests]:
    requests = SignalRequests()
    return AlarmBell(cfg, "p/e", notes.append, requests.request_save, requests.request_stop), requests


def test_an_alarm_is_one_line_with_the_remedy_and_asks_for_what_its_rule_names() -> None:
    notes: list[str] = []
    rules = [
        AlarmRuleConfig(metric="reward/mean", below=0.1, actions=["save"]),
        AlarmRuleConfig(metric="kl/mean", above=1, actions=["stop"]),
    ]
    rung, requests = bell(AlarmsConfig(rules=rules), notes)
    rung.recall({"reward/mean": 0.0})  # before a restart, so already reported
    rung.check(2, {"reward/mean": 0.0, "rollout/logprob_diff_mean": 0.3})
    assert notes == [] and not requests.take_save()
    for step in range(3, 15):
        rung.check(step, {"reward/mean": 0.5, "rollout/logprob_diff_mean": 0.3})
    assert notes == [
        "step 4: alarm: engine against trainer (rollout/logprob_diff_mean) at 0.3, bad from 0.1: compare dtypes and kernels of "
        "both (rlhf-mcore doctor); with asynchronous engines the policy's own steps add to it: lower trainer.max_staleness or the "
        "learning rate; use algorithm.rollout_correction"
    ]
    rung.check(15, {"reward/mean": 0.0})
    assert notes[1:] == ["step 15: alarm: reward/mean is 0, below 0.1 (alarms.rules)"]
    assert requests.take_save() and not requests.stop_requested and rung.stopped_by == ""
    rung.check(16, {"kl/mean": 1.5})
    assert requests.stop_requested and rung.stopped_by == notes[-1]
    assert notes[-1] == "step 16: alarm: kl/mean is 1.5, above 1 (alarms.rules)"
    rung.close()


class Parts:
    """All parts of a training loop with given metrics. It saves and stops on request."""

    def __init__(self, requests: SignalRequests, values: list[float]) -> None:
        self.requests, self.values, self.saved = requests, values, list[int]()

    def next_batch(self, step: int) -> tuple[Any, Mapping[str, float]]:
        return None, {"reward/mean": self.values[step - 1]}

    def learn(self, step: int, batch: Any) -> tuple[list[Any], dict[str, float]]:
        return [], {}

    def count(self, batch: Any) -> dict[str, float]:
        return {}

    def publish(self, version: int) -> Mapping[str, float]:
        return {}

    def withdraw(self) -> None: ...

    def is_due(self, step: int, num_steps: int) -> bool:
        return False

    def begin(self) -> None: ...

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        if self.requests.take_save() or self.requests.stop_requested:
            self.saved.append(step)
        return self.requests.stop_requested

    def end(self) -> None: ...


def test_in_the_loop_the_step_of_the_alarm_is_saved_and_is_the_last() -> None:
    notes: list[str] = []
    rules = [
        AlarmRuleConfig(metric="reward/mean", above=1, actions=["save"]),
        AlarmRuleConfig(metric="reward/mean", below=0, steps=2, actions=["stop"]),
    ]
    rung, requests = bell(AlarmsConfig(rules=rules), notes)
    parts: Any = Parts(requests, [0.5, 2.0, 0.5, -1.0, -1.0, 0.5])
    trainer = TrainingLoop(parts, parts, parts, parts, parts, RunRecord(Timers(), 0, bell=rung), counters=parts)
    assert not trainer.run(6) and parts.saved == [2, 5] and len(notes) == 2


@pytest.fixture
def posts() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200 if self.path == "/secret-1" else 500)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/secret", received
        server.shutdown()


def test_a_webhook_and_a_command_get_the_alarm_and_their_failures_are_one_line(posts: Any, tmp_path: Path) -> None:
    url, received = posts
    code = f"import sys; open({str(tmp_path / 'alarm.json')!r}, 'w').write(sys.stdin.read())"
    notes: list[str] = []
    actions = ["webhook", "command"]
    works = AlarmsConfig(actions=actions, webhook=f"{url}-1", command=[sys.executable, "-c", code])
    rung, _ = bell(works, notes)
    rung.check(7, {"loss/total": NAN})
    rung.close()
    sent = json.loads(received[0])
    assert sent == json.loads((tmp_path / "alarm.json").read_text())
    assert (sent["run"], sent["step"], sent["metric"], sent["value"], sent["text"]) == (
        "p/e",
        7,
        "loss/total",
        None,
        notes[0],
    )
    fails = AlarmsConfig(actions=actions, webhook=f"{url}-2", command=[sys.executable, "-c", "raise SystemExit(3)"])
    rung, _ = bell(fails, notes)
    rung.check(1, {"loss/total": NAN})
    rung.close()
    problems = sorted(note for note in notes if note.startswith("warning"))
    assert [note.partition(" failed")[0] for note in problems] == ["warning: alarms.command", "warning: alarms.webhook"]
    assert "HTTP Error 500" in problems[1] and not any("secret" in note for note in notes)


def test_a_command_that_hangs_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    script = "sleep 60 & echo $! > pids; wait"
    monkeypatch.chdir(tmp_path)
    for seconds, close_s in ((0.2, 10.0), (60.0, 0.2)):  # past its time, and at the end of the run
        monkeypatch.setattr("rlhf_mcore.observability.alarms.CLOSE_S", close_s)
        monkeypatch.setattr("rlhf_mcore.observability.alarms.TIMEOUT_S", seconds)
        Path("pids").unlink(missing_ok=True)
        cfg = AlarmsConfig(actions=["command"], command=["sh", "-c", script])
        rung, _ = bell(cfg, notes)
        rung.check(1, {"loss/total": NAN})
        wait_for(lambda: Path("pids").exists() and Path("pids").read_text().endswith("\n"), 10)
        rung.close()
        wait_for(lambda: has_ended(int(Path("pids").read_text())), 10)
    assert "TimeoutExpired" in notes[1]


def test_a_restart_knows_of_what_was_not_finite() -> None:
    notes: list[str] = []
    rung, _ = bell(AlarmsConfig(), notes)
    record = RunRecord(Timers(), 0, bell=rung)
    record.recall([{"step": 1, "loss/total": None}])
    record.step(2, {"loss/total": NAN})
    assert notes == []


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://", "is not a URL"),
        ("http://[::1/secret", "is not a URL"),
        ("https://host:secret/x", "is not a URL"),
        ("https://me:secret@host/x", "contains a login"),
        ("https://host/a secret", "contains a space"),
        ("https://host/sécret", "contains a space or a character outside ASCII"),
        ("https://chat.example.org:8443/v1?key=secret&x=%20", None),
    ],
)
def test_an_address_that_cannot_be_posted_to_is_refused_and_not_shown(url: str, problem: str | None) -> None:
    found = list(alarm_problems(AlarmsConfig(webhook=url)))
    assert (problem is None and found == []) or (problem is not None and f"alarms.webhook {problem}" in found[0])
    assert not any("secret" in line for line in found)


def test_mistakes_are_named_with_what_was_meant() -> None:
    wrong = AlarmsConfig(
        webhook="ftp://x",
        rules=[
            AlarmRuleConfig(metric="kl/men", above=1.0, actions=["command"]),
            AlarmRuleConfig(metric="reward/mean"),
        ],
    )
    assert list(alarm_problems(wrong)) == [
        "alarms.rules[0].metric='kl/men' is not a metric; did you mean kl/mean?",
        "alarms.rules[1].above and below are null; give reward/mean a bound",
        "alarms.webhook is not a URL; write it as https://host:port/path, or as ${oc.env:NAME} (the value is not shown)",
        "alarms.command=[] is empty, but an alarm uses the action command; set it to a program and its arguments",
    ]
    with expect_error(ConfigError, field="alarms.actions[0]", value="'wern'", remedy="'warn'"):
        Config(alarms={"actions": ["wern"]})
