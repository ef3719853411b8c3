"""Train GRPO with vLLM on two ranks: kill the run, resume it bit for bit, convert the model, and compare it with transformers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_mcore.checkpoint.layout import scan
from tests.commands import descendants, environment, left_behind, run_command, start_command
from tests.metric_names import assert_registered
from tests.tiny_training import CONFIG, make_quickstart
from tools.chaos import differences

pytestmark = pytest.mark.default
STEPS = 4
MAIN = [sys.executable, "-m", "rlhf_mcore.cli.main"]
REWARD = """
import time
from pathlib import Path

def score(data_source, solution_str, ground_truth, extra_info):
    while Path("hold").exists() and Path("outputs/quickstart/killed/checkpoint-2").exists():  # until the test has killed a rank
        time.sleep(0.05)
    return (sum(map(ord, solution_str)) % 17) / 16  # differs between responses, so that there is a gradient
"""
SETTINGS = [
    "data.train=[long.jsonl]",
    f"trainer.num_steps={STEPS}",
    "trainer.prompts_per_step=4",
    "trainer.minibatch_size=2",
    "rollout.kv_cache_gib=0.02",
    "rollout.sampling.n=4",
    "rollout.sampling.max_new_tokens=12",
    "algorithm.kl.coef=0.01",
    "actor.optimizer.lr=1e-3",
    "bridge.verify=digest",
    "reward.function=reward.py:score",
    "evaluate.every=2",
    "checkpoint.save_steps=1",
    "checkpoint.save_total_limit=null",
    "checkpoint.async_save=true",
    "logging.rollouts_every=1",
    "logging.console=plain",
    "deterministic=true",
]


def train(experiment: str) -> list[str]:
    return [*MAIN, "train", CONFIG, *SETTINGS, f"experiment={experiment}"]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def rank_process(launcher: int, rank: int) -> int:
    """Return the process id of a rank."""
    return next(pid for pid in descendants(launcher) if Path(f"/proc/{pid}/comm").read_text() == f"rank {rank}\n")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write a model, prompts and a reward into a folder. Torch's default port is occupied, because no run may need it.

    Prompts are long enough to be computed once for all responses.
    """
    directory = tmp_path_factory.mktemp("default_run")
    make_quickstart(directory, fit_steps=80)  # with fewer steps it writes special tokens after long prompts
    (directory / "reward.py").write_text(REWARD)
    sums = ["+".join(str(number) for number in range(first, first + 13)) for first in range(10, 26)]
    (directory / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{text}=", "answer": "1"}) + "\n" for text in sums)
    )
    with socket.socket() as taken:
        with suppress(OSError):  # another program occupies it, which is equivalent
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        yield directory


@pytest.fixture(scope="module")
def whole(workspace: Path) -> Path:
    """Return the directory of an undisturbed run."""
    done = run_command(train("whole"), workspace, environment(workspace))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stdout and "Warning" not in done.stdout and f"step {STEPS}/{STEPS}" in done.stdout
    [kernels] = [line for line in done.stdout.splitlines() if line.startswith("kernels: ")]
    assert "AdamW torch, engine attention CPU_ATTN" in kernels
    return workspace / "outputs" / "quickstart" / "whole"


@dataclass(frozen=True)
class Killed:
    """A run whose second rank was killed, and that was started again."""

    directory: Path
    code: int
    printed: str
    saved: list[int]  # steps that the first start has saved
    resumed: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def killed_run(workspace: Path) -> Killed:
    directory, hold = workspace / "outputs" / "quickstart" / "killed", workspace / "hold"
    hold.touch()
    with start_command(train("killed"), workspace, environment(workspace)) as job:
        job.wait_for(lambda: [point.step for point in scan(directory)][-1:] == [2])
        os.kill(rank_process(job.process.pid, 1), signal.SIGKILL)
        printed = job.end()
    hold.unlink()
    saved = [point.step for point in scan(directory)]
    resumed = run_command(train("killed"), workspace, environment(workspace))
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    return Killed(directory, job.process.returncode, printed, saved, resumed)


def test_a_run_learns_from_what_vllm_samples(whole: Path) -> None:
    assert_registered(whole, "loss/kl", "kl/mean", "bridge/received_bytes", "evaluate/accuracy", "timing/<phase>_s")
    steps = read(whole / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    for step in steps[1:]:
        assert step["actor/grad_norm"] > 0 and step["actor/skipped_updates"] == 0
        assert 0 <= step["rollout/logprob_diff_mean"] <= step["rollout/logprob_diff_max"] < 1e-4
        assert step["rollout/preemptions"] == 0
        assert 0.2 < step["trainer/computed_share"] < 0.7  # prompts of 42 tokens, 4 responses of up to 12
        assert step["progress/samples"] == 16 * step["step"]
    assert [step["step"] for step in steps if "evaluate/reward" in step] == [0, 2, 4]
    config = (whole / "config.yaml").read_text()
    assert "prompts_per_step: 4" in config and "engine: vllm" in config and "max_num_seqs: 256" in config
    assert list((whole / "tensorboard").glob("events.*")) and (whole / "latest").readlink() == Path(
        f"checkpoint-{STEPS}"
    )


def test_fault_13_a_killed_rank_ends_the_run_and_is_named(killed_run: Killed) -> None:
    assert killed_run.code == 128 + signal.SIGKILL and killed_run.saved == [1, 2]
    assert "error: rank 1 was ended by SIGKILL" in killed_run.printed and "Traceback" not in killed_run.printed


def test_fault_27_the_same_command_resumes_bit_for_bit(workspace: Path, whole: Path, killed_run: Killed) -> None:
    assert f"the run continues after step 2 of {STEPS}" in killed_run.resumed.stdout
    assert differences(whole, killed_run.directory) == []
    for file in sorted((whole / "rollouts").iterdir()):
        assert (killed_run.directory / "rollouts" / file.name).read_bytes() == file.read_bytes(), file.name
    assert left_behind(workspace) == []


def test_the_converted_model_is_the_policy_that_transformers_sees(workspace: Path, whole: Path) -> None:
    """The run recorded the KL of checkpoint 3's policy from the first model. transformers computes it from the two directories."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = ["--from", "checkpoint", "--to", "hf", "--verify"]
    convert = [*MAIN, "convert", *options, str(whole / "checkpoint-3"), "converted"]
    done = run_command(convert, workspace, environment(workspace))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(workspace / name, dtype=torch.float32).eval()
        for name in ("converted", "quickstart/model")
    )
    tokenizer = AutoTokenizer.from_pretrained(workspace / "converted")
    estimates = []
    for row in read(whole / "rollouts" / "step-000004.jsonl"):
        assert row["policy_version"] == 3
        prompt, response = (tokenizer(row[name], add_special_tokens=False).input_ids for name in ("prompt", "response"))
        response += [tokenizer.eos_token_id] * (row["finish_reason"] == "stop")
        assert len(response) == row["num_tokens"]  # the model writes no special tokens, which its text would not show
        estimates.append(kl_estimates(policy, reference, torch.tensor([prompt + response]), len(response)))
    assert len(estimates) == 16
    found = torch.cat(estimates).mean().item()
    assert found > 1e-4 and found == pytest.approx(read(whole / "metrics.jsonl")[4]["kl/mean"], rel=1e-3)


def kl_estimates(policy: Any, reference: Any, ids: torch.Tensor, length: int) -> torch.Tensor:
    """Return the k3 estimate exp(d) - 1 - d of the last ``length`` tokens; d is the reference's logprob minus the policy's."""
    with torch.no_grad():
        logprobs = [model(ids).logits.double().log_softmax(-1)[:, :-1] for model in (policy, reference)]
    own, other = (found.gather(-1, ids[:, 1:, None])[0, -length:, 0] for found in logprobs)
    return torch.expm1(other - own) - (other - own)
