"""Try rewards on their own ground truths, before a run and by ``rlhf-mcore reward-test``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli.main import main
from rlhf_mcore.commands.reward_test import as_text
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config, DataConfig, FunctionConfig, RewardConfig, RuleConfig
from rlhf_mcore.own_processes import has_ended
from rlhf_mcore.rewards import pool, start_trial
from rlhf_mcore.rewards.start_trial import check_reward
from rlhf_mcore.rewards.trial import TrialReport, read_sample, try_reward
from rlhf_mcore.sandbox.usage import descendants
from tests.commands import describe_processes, wait_for
from tests.messages import expect_error

NUMBERS = ["42", "7", "1,234", "-3", "0.5", "18", "19", "20"]
LATEX = [
    r"\frac{1}{2}",
    r"\left( 3, 4 \right)",
    r"\text{Monday}",
    "x^2+1",
    r"2\sqrt{3}",
    r"48^\circ",
    "1, 2",
    r"[0,\infty)",
]


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., DataConfig]:
    def write(truths: list[Any], source: str = "sums", **extra: Any) -> DataConfig:
        file = tmp_path / "rows.jsonl"
        rows = [{"prompt": "Q", "answer": t, "data_source": source, "extra_info": extra} for t in truths]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataConfig(train=[str(file)])

    return write


def run_trial(cfg: RewardConfig, data: DataConfig) -> TrialReport:
    rows, sources = read_sample(data, "data.train", 50)
    return try_reward(cfg, rows, "data.train", sources.total())


def rules(*names: str) -> RewardConfig:
    return RewardConfig(rules=[RuleConfig(name=name) for name in names], workers=1)


@pytest.mark.parametrize(
    ("names", "truths"),
    [
        (["final_number"], NUMBERS),
        (["boxed"], LATEX),
        (["answer_line"], LATEX),
        (["boxed", "format"], LATEX),
        (["exact_match"], NUMBERS),
        (["multiple_choice"], ["A", "B", "(C) Paris"]),
        (["final_number"], ["Six and one are seven.\n#### 7", "So \\boxed{8}"]),
    ],
)
def test_a_reward_that_fits_the_data_is_sound(names: list[str], truths: list[str], data: Any) -> None:
    report = run_trial(rules(*names), data(truths))
    assert report.is_sound and len(report.tested_rows) == len(truths)
    assert all(row.truth is not None and row.truth.parts[names[0]] == 1.0 for row in report.rows)
    assert all(row.empty is not None and row.empty.parts[names[0]] == 0.0 for row in report.rows)
    assert all(row.other is not None and row.other.parts[names[0]] == 0.0 for row in report.rows)


def test_a_rule_that_cannot_read_the_truths_is_named(data: Any) -> None:
    report = run_trial(rules("final_number"), data([*NUMBERS, "Monday", "x + 1"]))
    assert [row.prompt.ground_truth for row in report.wrong_truths] == ["Monday", "x + 1"]
    assert not report.is_sound and not report.reads_nothing
    text = as_text(report)
    assert ["sums", "10", "8", "of", "10", "0", "0", "0"] in [line.split() for line in text.splitlines()]
    assert "rows.jsonl, line 9: ground truth 'Monday'" in text


@pytest.mark.parametrize(
    ("body", "wrong", "empty", "others"),
    [
        ("return float(solution_str.endswith('#### ' + ground_truth))", 0, 0, 0),
        ("return 1.0", 3, 3, 0),  # no answer scores more than an empty one
        ("return float(solution_str != '')", 0, 0, 3),
        ("return 0.0", 3, 3, 0),
        ("return float(ground_truth == '1' and ground_truth in solution_str)", 2, 0, 0),
        ("raise ValueError('no')", 3, 0, 0),
    ],
)
def test_a_function_is_measured_by_its_own_best_score(
    body: str, wrong: int, empty: int, others: int, data: Any, tmp_path: Path
) -> None:
    (tmp_path / "grade.py").write_text(f"def grade(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    report = run_trial(RewardConfig(function=f"{tmp_path}/grade.py:grade", workers=1), data(["1", "2", "3"]))
    assert (len(report.wrong_truths), len(report.paid_empty), len(report.paid_others)) == (wrong, empty, others)
    text, top = as_text(report), "right means the highest score of any ground truth: "
    assert (top + ("0" if "0.0" in body or "raise" in body else "1") in text) is not report.is_sound
    if "raise" in body:  # reported once
        line = as_text(report).splitlines()[-1]
        assert line.startswith(
            f"  3 rows, the first is {tmp_path}/rows.jsonl, line 1: ground truth '1', response '1': 0"
        )
        assert "rows.jsonl, line 1', sample 0, raised ValueError: no (grade.py" in line


def test_rows_are_spread_over_the_data(data: Any) -> None:
    rows, sources = read_sample(data([str(n) for n in range(101)]), "data.train", 3)
    assert [row.prompt.ground_truth for row in rows] == ["0", "50", "100"]
    assert sources == {"sums": 101}


def test_the_start_of_a_run_refuses_a_rule_that_reads_nothing(data: Any, tmp_path: Path) -> None:
    cfg = Config(data=data(["Monday", "x + 1", r"2\sqrt{3}", "[0,1)"] * 2), reward=rules("final_number"))
    with pytest.raises(
        ConfigError, match=r"reward\.rules=\[final_number\] gives none of 8 ground truths.*math reads most"
    ):
        check_reward(cfg.reward, cfg.data)
    cfg.reward = rules("math")
    assert check_reward(cfg.reward, cfg.data) is None
    cfg.reward = RewardConfig(sources={})
    with pytest.raises(ConfigError, match=r"'sums' \(8 rows\)"):
        check_reward(cfg.reward, cfg.data)
    (tmp_path / "grade.py").write_text("def grade(*a):\n    return 0.0\n")
    cfg.reward = RewardConfig(function=f"{tmp_path}/grade.py:grade", workers=1)
    assert "grade.py:grade gives none of 8 ground truths" in (check_reward(cfg.reward, cfg.data) or "")
    (tmp_path / "strict.py").write_text("def grade(source, text, truth, info):\n    return float(text == truth)\n")
    cfg.reward = RewardConfig(function=f"{tmp_path}/strict.py:grade", workers=1)
    assert check_reward(cfg.reward, cfg.data) is None  # a bare answer suffices
    (tmp_path / "broken.py").write_text("def grade(*a):\n    return missing\n")
    cfg.reward = RewardConfig(function=f"{tmp_path}/broken.py:grade", workers=1)
    with pytest.raises(ConfigError, match=r"raised NameError: name 'missing' is not defined.*All 8 tested rows"):
        check_reward(cfg.reward, cfg.data)
    cfg.reward.on_error = "zero"
    assert "gives none of 8 ground truths" in (check_reward(cfg.reward, cfg.data) or "")
    (tmp_path / "leaves.py").write_text("import os\ndef grade(*a):\n    os._exit(0)\n")
    cfg.reward = RewardConfig(function=f"{tmp_path}/leaves.py:grade", workers=1)
    with expect_error(ConfigError, value=(10, "exit code 0")):
        check_reward(cfg.reward, cfg.data)
    cfg.reward = rules("format")
    assert check_reward(cfg.reward, cfg.data) is None  # there is nothing to compare


def test_the_command_prints_a_table_and_its_exit_code_tells(data: Any, tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "run.yaml"
    files = json.dumps(data([*NUMBERS, "Monday"]).train)
    config.write_text(
        f"data: {{train: {files}}}\nevaluate: {{every: 0}}\nreward: {{workers: 1}}\n"  # no model is needed
    )
    assert main(["reward-test", str(config)]) == 2
    shown = capsys.readouterr()
    assert "8 of 9" in shown.out and "'Monday'" in shown.out
    assert "reward.rules=[final_number] does not agree with the data" in shown.err
    assert main(["reward-test", str(config), "reward.rules=[{name: boxed}]", "--limit", "50"]) == 0
    assert "data.train: 9 of 9 rows" in capsys.readouterr().out
    assert main(["reward-test", str(config), "reward.rules=[{name: maths}]"]) == 2
    assert "did you mean 'math'?" in capsys.readouterr().err


def test_prompts_that_hold_the_answer_are_warned_of(tmp_path: Path) -> None:
    question = [{"role": "user", "content": "6+1="}]
    chats = [question, [*question, {"role": "assistant", "content": "7"}]]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"prompt": chat, "answer": "7"}) + "\n" for chat in chats))
    warning = f"1 of 2 tested prompts of data.train end with the assistant's answer ({file}, line 2)"
    cfg = Config(data=DataConfig(train=[str(file)]), reward=rules("final_number"))
    assert (check_reward(cfg.reward, cfg.data) or "").startswith(warning)
    assert f"warning: {warning}" in as_text(run_trial(cfg.reward, cfg.data))
    file.write_text(json.dumps({"prompt": question, "answer": "7"}) + "\n")
    assert check_reward(cfg.reward, cfg.data) is None


def test_ten_deadlines_in_a_row_end_the_command(data: Any, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import time\ndef grade(*a):\n    time.sleep(1000)\n")
    own = RewardConfig(function=f"{tmp_path}/hangs.py:grade", workers=4, timeout_s=0.2, on_error="zero")
    with expect_error(ConfigError, value=(10, "0.2 s"), remedy="reward.timeout_s"):
        check_reward(own, data(NUMBERS))


def require_no_processes_but(before: set[int]) -> None:
    def find_remaining() -> list[int]:  # a dead process may wait for this process, which another test made its parent
        return [pid for pid in descendants(os.getpid()) if pid not in before and not has_ended(pid)]

    wait_for(lambda: not find_remaining(), 30, lambda: describe_processes(find_remaining()))


@pytest.mark.parametrize(
    ("workers", "trial_s", "rule_names"),
    [(4, 60.0, ()), (1, 2.5, ("final_number",))],
    ids=["ten deadlines in a row", "no answer within the trial"],
)
@pytest.mark.timeout(60)
def test_a_function_that_hangs_on_every_row_ends_the_command(
    workers: int,
    trial_s: float,
    rule_names: tuple[str, ...],
    data: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(start_trial, "CALL_AT_START_S", 0.2)
    monkeypatch.setattr(start_trial, "TRIAL_S", trial_s)
    (tmp_path / "hangs.py").write_text("import time\ndef grade(*a):\n    time.sleep(1000)\n")
    spec, said = f"{tmp_path}/hangs.py:grade", list[str]()
    own = (
        {"rules": rules(*rule_names).rules, "functions": [FunctionConfig(path=spec)]}
        if rule_names
        else {"function": spec}
    )
    cfg = Config(data=data(NUMBERS), reward=RewardConfig(workers=workers, timeout_s=1.0, **own))
    before = set(descendants(os.getpid()))
    with expect_error(ConfigError, field=spec, value="1 s", remedy="raise reward.timeout_s"):
        check_reward(cfg.reward, cfg.data, say=said.append)
    assert "waiting for one response, for at most reward.timeout_s=1 s" in said[-1]
    require_no_processes_but(before)


@pytest.mark.timeout(60)
def test_a_function_that_needs_longer_than_the_trial_is_warned_of(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_trial, "CALL_AT_START_S", 0.2)
    (tmp_path / "slow.py").write_text("import time\ndef grade(*a):\n    time.sleep(0.8)\n    return 1.0\n")
    own = RewardConfig(function=f"{tmp_path}/slow.py:grade", workers=4, timeout_s=30.0)
    said = list[str]()
    assert "could not be tried on data.train" in (check_reward(own, data(NUMBERS), say=said.append) or "")
    assert "waiting for one response, for at most reward.timeout_s=30 s" in said[-1]


@pytest.mark.timeout(60)
def test_a_file_that_loads_for_ever_ends_the_command(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_trial, "TRIAL_S", 1.0)
    monkeypatch.setattr(pool, "START_TIMEOUT_S", 2.0)
    (tmp_path / "loads.py").write_text("import time\ntime.sleep(1000)\ndef grade(*a):\n    return 1.0\n")
    own = RewardConfig(function=f"{tmp_path}/loads.py:grade", workers=1)
    with expect_error(ConfigError, field="loads.py:grade", value="2 s", remedy="correct the file"):
        check_reward(own, data(NUMBERS))


@pytest.mark.parametrize(
    ("reward", "is_slow"),
    [
        ("import time\ndef grade(*a):\n    time.sleep(0.5)\n    return 1.0\n", True),  # each call is fast enough
        ("def grade(source, text, truth, info):\n    return float(truth in text)\n", False),
    ],
    ids=["slow", "quick"],
)
@pytest.mark.timeout(60)
def test_the_trial_tells_of_itself_and_ends(
    reward: str, is_slow: bool, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine may take seconds to start the worker of a fast reward.
    monkeypatch.setattr(start_trial, "SILENT_S", 1.5 if is_slow else 100.0)
    monkeypatch.setattr(start_trial, "TRIAL_S", 5.0 if is_slow else 200.0)
    (tmp_path / "slow.py").write_text(reward)
    cfg = Config(data=data(NUMBERS), reward=RewardConfig(function=f"{tmp_path}/slow.py:grade", workers=1))
    said, before = list[str](), set(descendants(os.getpid()))
    warning = check_reward(cfg.reward, cfg.data, say=said.append)
    assert [line.partition(" of data.train")[0] for line in said[:1]] == [
        f"testing reward.function={tmp_path}/slow.py:grade on 8 rows"
    ] * is_slow
    assert ("did not finish 8 rows of data.train within 5 s" in (warning or "")) is is_slow
    require_no_processes_but(before)


@pytest.mark.parametrize("beside", [[], [RuleConfig(name="final_number")]])
def test_the_trial_starts_one_interpreter_for_a_worker(data: Any, tmp_path: Path, beside: list[RuleConfig]) -> None:
    spec = f"{tmp_path}/counted.py:grade"
    (tmp_path / "counted.py").write_text(
        f"with open({str(tmp_path / 'starts')!r}, 'a') as file:\n    file.write('start\\n')\n"
        "def grade(source, text, truth, info):\n    return float(text == truth)\n"
    )
    own = {"rules": beside, "functions": [FunctionConfig(path=spec)]} if beside else {"function": spec}
    assert check_reward(RewardConfig(workers=1, **own), data(NUMBERS)) is None
    assert (tmp_path / "starts").read_text() == "start\n"


def test_ctrl_c_ends_the_trial(data: Any, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef grade(*a):\n    time.sleep(1000)\n")
    cfg = Config(data=data(NUMBERS), reward=RewardConfig(function=f"{tmp_path}/slow.py:grade", workers=1))
    before = set(descendants(os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        check_reward(cfg.reward, cfg.data, say=lambda _: signal.raise_signal(signal.SIGINT))
    require_no_processes_but(before)
