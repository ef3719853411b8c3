"""The command ``simulate``: its tables, its files, and mistakes, which give one message and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore_contrib.simulate import command as simulate

ROOT = Path(__file__).resolve().parents[3]
RUN = f"""
base: {ROOT / "configs" / "base.yaml"}
model: {{path: {ROOT / "configs" / "models" / "Qwen2.5-0.5B-Instruct"}}}
data: {{train: [absent.parquet]}}
rollout: {{sampling: {{n: 4, max_new_tokens: 512}}}}
trainer: {{prompts_per_step: 8}}
"""
LENGTHS = ("--lengths", "lognormal(4.5,1,512)", "--steps", "6")


@pytest.fixture
def run_yaml(workspace: Any) -> str:
    return str(workspace.write("simulated.yaml", RUN))


def test_schedules_are_compared_without_torch(run_yaml: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rlhf_mcore_contrib.simulate.command import main\n"
        f"code = main([{run_yaml!r}, '--devices', '4', '--json', 'out.json', *{LENGTHS!r}])\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'megatron', 'matplotlib') if m in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "[] 0"
    for part in ("synchronous, colocated *", "one step off", "staleness 2, partial rollouts", "estimates for H100"):
        assert part in done.stdout
    report = json.loads((tmp_path / "out.json").read_text())
    found = {row["name"]: row for row in report["schedules"]}
    assert list(found) == [
        "synchronous, colocated",
        "synchronous, disaggregated",
        "one step off",
        "staleness 1, partial rollouts",
        "staleness 2, partial rollouts",
        "staleness 4, partial rollouts",
    ]
    assert found["synchronous, colocated"]["speedup"] == 1.0 and found["synchronous, colocated"]["configured"] is True
    assert [split["rollout"] for split in found["one step off"]["splits"]] == [1, 2, 3]
    for row in report["schedules"]:
        assert row["samples_per_s"] == pytest.approx(8 * 4 / row["step_s"])
        assert row["tokens_per_s"] == pytest.approx(row["samples_per_s"] * row["length_mean"])
        assert row["tokens_per_s"] == max(split["tokens_per_s"] for split in row["splits"])
        assert sum(row["staleness"].values()) == 6 * 8 * 4 and row["staleness_max"] <= row["max_staleness"]


APART = ("rollout.placement=disaggregated", "rollout.num_engines=3", "trainer.max_staleness=3", "trainer.world_size=1")


def test_the_configured_schedule_is_shown_on_its_own_devices(run_yaml: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert simulate.main([run_yaml, "--json", str(out), *LENGTHS, *APART]) == 0
    (own,) = (row for row in json.loads(out.read_text())["schedules"] if row["configured"])
    assert own["name"] == "staleness 3, partial rollouts"
    assert (own["rollout"], own["training"]) == (3, 1)
    assert [(split["rollout"], split["training"]) for split in own["splits"]] == [(1, 3), (2, 2), (3, 1)]


def test_a_picture_is_drawn(run_yaml: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert simulate.main([run_yaml, "--devices", "3", "--png", str(tmp_path / "out.png"), *LENGTHS]) == 0
    content = (tmp_path / "out.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000


def test_a_picture_asks_for_matplotlib(
    run_yaml: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert simulate.main([run_yaml, "--png", str(tmp_path / "out.png"), *LENGTHS]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


def test_schedules_that_no_split_allows_are_named(run_yaml: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([run_yaml, "--devices", "1", *LENGTHS]) == 0
    out = capsys.readouterr().out
    assert "synchronous, colocated *" in out
    assert "not shown" in out and "one step off" in out


def test_measured_times_of_a_run_are_used_with_its_lengths(
    run_yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slot decodes a token in 0.1 s at any length, and training takes 2 s. On one device, 2 x 10 tokens take 2 + 2 s."""
    run = tmp_path / "measured"
    (run / "rollouts").mkdir(parents=True)
    settings = "model: {path: model}\nrollout: {max_num_seqs: 1, sampling: {n: 2}}\ntrainer: {prompts_per_step: 1, world_size: 1}\n"
    (run / "config.yaml").write_text(settings)
    timing = {"timing/generate_s": 2.0, "timing/update_s": 2.0, "timing/sync_s": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step} | timing) + "\n" for step in (1, 2, 3)))
    for step in (1, 2, 3):
        (run / "rollouts" / f"step-{step:06d}.jsonl").write_text('{"num_tokens": 10}\n' * 2)
    out, one = tmp_path / "out.json", ["rollout.max_num_seqs=1", "rollout.sampling.n=2", "trainer.prompts_per_step=1"]
    assert simulate.main([run_yaml, "--run", str(run), "--devices", "2", "--json", str(out), *one]) == 0
    text = capsys.readouterr().out
    assert f"measured in {run}" in text and "10.0 tokens on average" in text
    found = {row["name"]: row for row in json.loads(out.read_text())["schedules"]}
    assert found["synchronous, disaggregated"]["step_s"] == pytest.approx(4.5)
    assert found["one step off"]["step_s"] == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--lengths is missing"),
        (("--lengths", "absent.txt"), "absent.txt: no such file"),
        (("--lengths", "geometric(50,4096)"), "rollout.sampling.max_new_tokens=512"),
        ((*LENGTHS, "--devices", "0"), "--devices 0 is out of range"),
        ((*LENGTHS, "--steps", "0"), "--steps 0 is out of range"),
        ((*LENGTHS, "--seed", "-1"), "--seed -1 is out of range"),
        ((*LENGTHS, "--staleness", "1,x"), "--staleness 1,x is not a list"),
        ((*LENGTHS, "--staleness", "0"), "--staleness 0 is not a list"),
        ((*LENGTHS, "--set", "speed=1"), "--set speed: unknown name"),
        ((*LENGTHS, "--run", "absent"), "--run absent: no such directory"),
        (("--run", "absent"), "--run absent: no such directory"),
        ((*LENGTHS, "--run", "absent", "--set", "mean_length=1"), "remove one of them"),
        ((*LENGTHS, "--json", "absent/out.json"), "--json absent/out.json: absent is not a writable directory"),
        ((*LENGTHS, "--devices", "2", "actor.layout.pp=4"), "raise --devices"),
        ((*LENGTHS, "rollout.gpu_memory_utilization=0.01"), "leaves no cache for a sequence"),
        ((*LENGTHS, "algorithm=sft"), "algorithm.kind=sft generates nothing"),
        ((*LENGTHS, "rollout.max_num_seq=3"), "rollout.max_num_seq"),
    ],
)
def test_mistakes_have_one_message_and_code_2(
    run_yaml: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate.main([run_yaml, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("error:") == 1
    assert captured.out == ""
