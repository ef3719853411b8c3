"""Follow docs/get-started/quickstart.md: quickstart, report, own reward, Ctrl-C, resume, evaluation, transformers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.commands import ROOT, environment, run_command, start_command
from tests.tiny_training import make_quickstart

PAGE = (ROOT / "docs" / "get-started" / "quickstart.md").read_text(encoding="utf-8")
TINY = [
    "actor.layout.tp=1",
    "trainer.world_size=1",
    "trainer.num_steps=1",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.engine=hf",
    "rollout.sampling.n=2",
    "rollout.sampling.max_new_tokens=8",
    "reward.workers=1",
]


def find_command(part: str) -> list[str]:
    """Return the words of the page's only command that contains ``part``."""
    lines = re.findall(r"^(?:\./launch|\.venv/bin)/.*$", PAGE, re.MULTILINE)
    [line] = [line for line in lines if part in f"{line}\n"]
    return shlex.split(line, comments=True)


def clone(folder: Path) -> Path:
    """Copy the repository's files. The environment of these tests replaces the one that setup.sh installs."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "launch" / "setup.sh").write_text("#!/bin/sh\n")
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for program, call in (("python", ""), ("rlhf-mcore", "-m rlhf_mcore.cli.main ")):
        (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable} {call}"$@"\n')
        (programs / program).chmod(0o755)
    make_quickstart(folder)
    return folder


def test_the_first_hour(tmp_path: Path) -> None:
    folder = clone(tmp_path)
    own = {**environment(folder), "PYTHONPATH": str(folder)}

    def run(part: str, *more: str) -> str:
        done = run_command([*find_command(part), *more], folder, own)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert "reusing quickstart/" in (shown := run("./launch/quickstart.sh", *TINY)) and "trained model" in shown
    assert "report.html" in run("rlhf-mcore report outputs/quickstart/grpo\n")
    assert (folder / "outputs" / "quickstart" / "grpo" / "report.html").stat().st_size > 50_000
    changed = [
        *find_command("examples/own_reward.py:grade"),
        *TINY,
        "trainer.num_steps=12",
        "rollout.sampling.max_new_tokens=4",
    ]
    mine = folder / "outputs" / "quickstart" / "mine"
    with start_command(changed, folder, own) as interrupted:  # and continued by the command in the message
        interrupted.wait_for(lambda: "step  1/12" in interrupted.output())
        interrupted.process.send_signal(signal.SIGINT)
        printed = interrupted.end()
    assert interrupted.process.returncode == 75, printed[-3000:]
    [again] = re.findall(r"^to continue: (.*)$", printed, re.MULTILINE)
    resumed = run_command(shlex.split(again), folder, own)
    [last] = re.findall(
        r"^the run continues after step (\d+) of 12, from outputs/quickstart/mine/checkpoint-", resumed.stdout
    )
    assert resumed.returncode == 0 and f"checkpoint-{last}" in printed, resumed.stderr[-3000:]
    steps = [json.loads(line)["step"] for line in (mine / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(13)) and resumed.stdout.count("step  1/12") == 0
    rollouts = (mine / "rollouts" / "step-000012.jsonl").read_text().splitlines()
    assert {"form", "close"} <= json.loads(rollouts[0])["parts"].keys()
    run("evaluate.compare=quickstart/model", *TINY)
    [results] = (folder / "outputs" / "quickstart" / "grpo").rglob("results.json")
    assert json.loads(results.read_text())["results"]["all"]["num_prompts"] == 4
    [code] = re.findall(r"```python\n(from transformers.*?)```", PAGE, re.DOTALL)
    answered = run_command([sys.executable, "-c", code], folder, own)
    assert answered.returncode == 0 and answered.stdout.startswith("<|user|>60+36=<|end|><|assistant|>"), (
        answered.stderr
    )


def test_from_fine_tuning_to_ppo(tmp_path: Path) -> None:
    folder = clone(tmp_path)
    own = {**environment(folder), "PYTHONPATH": str(folder)}
    small = [setting for setting in TINY if "minibatch" not in setting and "prompts_per_step" not in setting]
    arguments = [*small, "trainer.prompts_per_step=16", "critic.layout.pp=1", "logging.console=plain"]
    done = run_command(["./examples/sft_rm_ppo.sh", *arguments], folder, own, seconds=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (folder / "sft_rm_ppo.html").stat().st_size > 50_000
    config = json.loads((folder / "outputs/quickstart/ppo/latest/critic/config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    [row] = (folder / "outputs/quickstart/ppo/rollouts/step-000001.jsonl").read_text().splitlines()[:1]
    assert list(json.loads(row)["parts"]) == ["reward_model"]
