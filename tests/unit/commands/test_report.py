"""Test the report: the files that it reads, the findings of its rules, and that no text of a run is executed."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rlhf_mcore.commands.report.command import main
from rlhf_mcore.commands.report.page import content, page, verdicts
from rlhf_mcore.commands.report.run_data import different_keys, find_runs, read_run, same_but_for_seeds
from rlhf_mcore.commands.report.server import ReportServer
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import DESCRIPTIONS
from rlhf_mcore.metrics.rules import RULES, Series

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 {{ @@DATA@@"


def lines(path: Path, *records: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def rollout(step: int, prompt: int, sample: int, **more: Any) -> dict[str, Any]:
    record = {"step": step, "prompt_id": f"train#{prompt}", "sample": sample, "prompt": f"p{prompt}", "response": "r"}
    return {**record, "ground_truth": "1", "score": float(sample), "num_tokens": 3, **more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run of three steps with two prompts of two samples.

    The second step is repeated, and the run was killed while writing a line.
    """
    directory = tmp_path / "outputs" / "p" / "e"
    records = [
        {"step": 0, "evaluate/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "actor/approx_kl": 0.01},
        {"step": 2, "reward/mean": 9.0},
        {"step": 2, "reward/mean": 0.6, "actor/approx_kl": None},
        {"step": 3, "reward/mean": 0.7, "actor/approx_kl": 0.4, "evaluate/accuracy": 0.5},
        {"step": 3, "final/step": 2, "final/accuracy": 0.75},
    ]
    lines(directory / "metrics.jsonl", *records)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    for step in (1, 2, 3):
        found = [rollout(step, prompt, sample, response=HOSTILE) for prompt in (7, 8) for sample in (0, 1)]
        lines(directory / "rollouts" / f"step-{step:06d}.jsonl", *found)
    (directory / "config.yaml").write_text("seed: 1\nactor:\n  optimizer: {lr: 0.1}\n  layers: [1, 2]\n")
    lines(directory / "checkpoint-2" / "manifest.json", {"libraries": {"torch": "2.13"}})
    return directory


def test_tokens_go_to_their_samples_and_what_is_none_is_left_out(run: Path) -> None:
    whole = {"tokens": ["a", "b"], "advantages": [0.5, -1], "logprob_differences": [0, None]}
    lines(
        run / "rollouts" / "tokens-000003.jsonl",
        {"prompt_id": "train#8", "sample": 1, **whole},
        {"prompt_id": "train#7", "sample": 1, **whole, "advantages": [0.5]},
        {"prompt_id": "train#9", "sample": 0, **whole},
    )
    read = read_run(run, 100)
    found = [sample for group in read.groups for sample in group["samples"] if "tokens" in sample]
    assert read.num_rollouts == 12 and len(found) == 1
    assert {name: found[0][name] for name in whole} == whole and found[0]["sample"] == 1


def test_episodes_go_to_their_samples(run: Path) -> None:
    whole = {"nodes": [{"said": HOSTILE}], "seconds": 1.0}
    lines(
        run / "rollouts" / "episodes-000003.jsonl",
        {"prompt_id": "train#8", "sample": 1, **whole},
        {"prompt_id": "train#8", "sample": 0, "nodes": 7},
        {"prompt_id": "train#9", "sample": 0, **whole},
    )
    read = read_run(run, 100)
    found = [sample for group in read.groups for sample in group["samples"] if "episode" in sample]
    assert read.num_rollouts == 12 and [sample["episode"]["nodes"] for sample in found] == [whole["nodes"]]


def test_what_is_read_of_a_run(run: Path) -> None:
    read = read_run(run, max_rollouts=100)
    assert read.metrics == {
        "step": [0, 1, 2, 3],
        "evaluate/accuracy": [0.25, None, None, 0.5],
        "reward/mean": [None, 0.5, 0.6, 0.7],
        "actor/approx_kl": [None, 0.01, None, 0.4],
        "final/step": [None, None, None, 2],
        "final/accuracy": [None, None, None, 0.75],
    }
    assert [(group["step"], group["prompt_id"], len(group["samples"])) for group in read.groups] == [
        (step, f"train#{prompt}", 2) for step in (1, 2, 3) for prompt in (7, 8)
    ]
    assert read.groups[0]["samples"][1] == {"sample": 1, "response": HOSTILE, "score": 1.0, "num_tokens": 3}
    assert read.config == {"seed": 1, "actor.optimizer.lr": 0.1, "actor.layers": "[1, 2]"}
    assert (read.name, read.num_rollouts, read.software, read.checkpoints) == ("e", 12, {"torch": "2.13"}, [2])


def test_of_too_many_rollouts_the_first_and_the_newest_steps_are_kept(run: Path) -> None:
    read = read_run(run, max_rollouts=8)
    assert {group["step"] for group in read.groups} == {1, 3} and read.num_rollouts == 12
    assert read_run(run, max_rollouts=0).groups == [] and read_run(run, max_rollouts=0).num_rollouts == 12


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", "no json\n", "metrics.jsonl, line 1: cannot be read"),
        ("metrics.jsonl", '{"reward/mean": 1}\n', "step"),
        ("metrics.jsonl", '{"step": 1}\nno json\n{"step": 3, "rew', "metrics.jsonl, line 2: cannot be read"),
        ("rollouts/step-000001.jsonl", "[]\n", "step-000001.jsonl, line 1: is not a JSON object"),
        ("config.yaml", "a: [", "config.yaml: not valid YAML"),
        ("checkpoint-2/manifest.json", "{}", "libraries"),
    ],
)
def test_a_file_that_no_run_writes_is_named(run: Path, name: str, content: str, message: str) -> None:
    (run / name).write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_run(run, 100)


def test_a_directory_above_is_told_which_one_was_meant(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.parent), str(run)]) == 2
    assert f"did you mean {run}?" in capsys.readouterr().err
    assert main([str(run), "--out", str(run)]) == 2 and "is not a regular file" in capsys.readouterr().err
    assert (
        main([str(run), "--out", "nowhere/r.html"]) == 2
        and "nowhere is not a writable directory" in capsys.readouterr().err
    )
    assert main([str(run), "--rollouts", "-1"]) == 2 and "--rollouts -1 is out of range" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart_by_their_paths(run: Path) -> None:
    other = read_run(run, 0)
    same = replace(other, path="elsewhere/e")
    assert [shown["name"] for shown in content([other, same])["runs"]] == [str(run), "elsewhere/e"]
    assert content([other])["runs"][0]["name"] == "e"


def test_configurations_are_compared_key_by_key() -> None:
    assert different_keys([{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3, "d": None}]) == ["b"]


def test_rules_judge_what_is_recent_against_what_was_early() -> None:
    assert (Series([1.0] * 5 + [3.0] * 5).early, Series(range(400)).recent) == (1.0, 389.5)
    falling = [2.0 * 0.9**step for step in range(40)]
    states = {
        verdict.metric: verdict.state
        for verdict in verdicts(
            {
                "actor/entropy": falling,  # from about 1.72 to 0.039, so 2 % remain
                "actor/approx_kl": [0.001, 0.06],
                "actor/grad_norm": [1.0, 1.0, 25.0],
                "reward/share_same": [0.1, None, 0.2],
                "reward/errors": [0.0, 0.0],
                "reward/parse_failures": [None, 4.0, 10.0],  # among 8 and 16 responses
                "progress/samples": [None, 8.0, 24.0],
            }
        )
    }
    assert states.pop("actor/entropy") == "bad" and states.pop("actor/approx_kl") == "watch"
    assert states.pop("actor/grad_norm") == "watch" and states.pop("reward/share_same") == "good"
    assert (
        states.pop("reward/errors") == "good"
        and states.pop("reward/parse_failures") == "watch"
        and set(states.values()) == {"unknown"}
    )
    [worst, *_] = verdicts(
        {"reward/parse_failures": [4.0, 14.0], "progress/samples": [8.0, 24.0], "actor/grad_norm": [1.0]}
    )
    assert (worst.metric, worst.state, worst.value) == ("reward/parse_failures", "bad", "87.5 %")


def test_what_is_not_finite_at_the_end_is_not_judged_by_what_it_was(tmp_path: Path) -> None:
    records = [{"step": step, "actor/approx_kl": None if step >= 16 else 0.01} for step in range(20)]
    records[3] |= {"loss/total": None}  # finite again
    records[4] |= {"loss/total": 1.0}
    lines(tmp_path / "metrics.jsonl", *records)
    read = read_run(tmp_path, 0)
    assert read.not_finite == {"actor/approx_kl": 16}
    [worst, *others] = verdicts(read.metrics, read.not_finite)
    assert (worst.state, worst.value) == ("bad", "NaN from step 16: actor/approx_kl")
    assert {verdict.state for verdict in others if verdict.metric == "actor/approx_kl"} == {"unknown"}


def test_runs_that_differ_in_their_seeds_alone_belong_together() -> None:
    config = {"experiment": "a", "seed": 1, "data.seed": 1, "actor.optimizer.lr": 0.1}
    other_seed = config | {"experiment": "b", "seed": 2, "data.seed": 7}
    other_lr = config | {"actor.optimizer.lr": 0.2}
    assert same_but_for_seeds([config, other_lr, other_seed, {}, {}]) == [[0, 2]]


def test_all_runs_of_a_folder_are_found_and_written_into_one_file(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = run.parents[1]
    lines(outputs / "q" / "f" / "metrics.jsonl", {"step": 1})
    assert find_runs(outputs) == [run, outputs / "q" / "f"]
    assert main([str(outputs), "--out", str(outputs / "all.html")]) == 0
    assert [shown["name"] for shown in json.loads(data_of(outputs / "all.html"))["runs"]] == ["e", "f"]
    assert main([str(outputs), "--port", "70000"]) == 2 and "--port 70000 is out of range" in capsys.readouterr().err


def test_a_live_index_has_a_page_for_each_run_and_leaves_out_what_cannot_be_read(run: Path) -> None:
    outputs = run.parents[1]
    (outputs / "q" / "bad").mkdir(parents=True)
    (outputs / "q" / "bad" / "metrics.jsonl").write_text("no json\n{}\n")
    with ReportServer([], 100, 0, folder=outputs) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            found = {}
            for path in ("/data.json", "/run/p/e/data.json", "/run/p/", "/run/../x/", "/e/data.json"):
                connection = HTTPConnection("127.0.0.1", server.server_port)
                connection.request("GET", path)
                answer = connection.getresponse()
                found[path] = answer.status, answer.read()
            assert [status for status, _ in found.values()] == [200, 200, 404, 404, 404]
            index, alone = (json.loads(found[path][1]) for path in ("/data.json", "/run/p/e/data.json"))
            assert index["links"] == ["/run/p/e/"] and index["runs"][0]["groups"] == []
            assert alone["links"] is None and len(alone["runs"][0]["groups"]) == 6
        finally:
            server.shutdown()
            thread.join()


def data_of(path: Path) -> str:
    [data, *_] = re.findall(r"<script(?: [^>]*)?>(.*?)</script>", path.read_text(), re.DOTALL)
    return str(data)


def test_remedies_name_keys_that_exist() -> None:
    for rule in RULES:
        for name in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", rule.remedy + " " + rule.meaning):
            assert any(key == name or key.startswith(f"{name}.") for key in DESCRIPTIONS), name


def test_text_of_a_run_is_data_and_no_other_script_may_run(run: Path) -> None:
    html = page([read_run(run, 100)])
    scripts = re.findall(r"<script(?: [^>]*)?>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 3  # the data, the chart library and the page's own script
    assert json.loads(scripts[0])["runs"][0]["groups"][0]["samples"][0]["response"] == HOSTILE
    [allowed] = re.findall(r"script-src ([^;]*);", html)
    assert allowed.split() == [f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts[1:]]
    assert "default-src 'none'" in html and "connect-src 'none'" in html and not re.findall(r'(?:src|href)="', html)
    assert "<title>e · rlhf_mcore</title>" in html


def test_a_report_is_one_file_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--rollouts", "8"]) == 0
    printed = capsys.readouterr().out
    assert f"{run}/report.html" in printed and "the page contains about 8 of 12 rollouts" in printed
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_watching_serves_newer_data_to_this_machine_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ReportServer([run], 100, 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            connection = HTTPConnection("127.0.0.1", server.server_port)

            def get(path: str, **headers: str) -> tuple[int, str, bytes]:
                connection.request("GET", path, headers={name.replace("_", "-"): v for name, v in headers.items()})
                answer = connection.getresponse()
                return answer.status, answer.getheader("ETag", ""), answer.read()

            status, tag, body = get("/")
            assert status == 200 and b"connect-src 'self'" in body
            assert get("/data.json", If_None_Match=tag)[0] == 304
            lines(run / "metrics.jsonl", {"step": 1, "reward/mean": 0.125})
            status, newer, body = get("/data.json", If_None_Match=tag)
            assert status == 200 and newer != tag and json.loads(body)["runs"][0]["metrics"]["reward/mean"] == [0.125]
            (run / "metrics.jsonl").write_text("broken\n")
            assert get("/data.json")[0] == 503 and get("/etc/passwd")[0] == 404
            assert get("/", Host="evil.example")[0] == 403
            for error, is_shown in ((BrokenPipeError(), False), (ValueError("ours"), True)):
                try:
                    raise error
                except (OSError, ValueError):
                    server.handle_error(None, ("127.0.0.1", 1))
                assert bool(capsys.readouterr().err) is is_shown
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(ConfigError, match="not the directory of a run"):
        ReportServer([run / "nowhere"], 100, 0)
