"""A whole run whose responses come from vLLM's own server, which was there before and stays when the run has ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from rlhf_mcore.parallel.addresses import LOOPBACK, free_port
from tests.commands import ROOT, python_path, run_command
from tests.tiny_training import make_quickstart

OPTIONS = (
    *("--enable-scale-out", "--enforce-eager", "--logprobs-mode", "processed_logprobs", "--dtype", "float32"),
    *("--max-model-len", "96", "--max-num-seqs", "16", "--block-size", "32", "--generation-config", "vllm"),
)


@dataclass(frozen=True)
class Server:
    url: str
    directory: Path

    def ask(self, path: str) -> str:
        with urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    make_quickstart(directory, num_eval=4)
    port = free_port(LOOPBACK)
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", *OPTIONS]
    command += ["--model", str(directory / "quickstart" / "model"), "--host", LOOPBACK, "--port", str(port)]
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=directory)
    served = Server(f"http://{LOOPBACK}:{port}", directory)
    try:
        deadline = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (directory / "server.log").read_text()[
                -3000:
            ]
            try:
                served.ask("/health")
                break
            except (URLError, OSError):
                time.sleep(0.5)
        yield served
    finally:
        process.terminate()
        process.wait(60)


def test_a_run_samples_from_a_server_of_vllm(server: Server) -> None:
    """Two ranks share the model. The canary compares the server's logprobs with theirs after every replacement."""
    settings = [
        *("rollout.engine=server", "bridge.method=gather", f"rollout.server.urls=[{server.url}]"),
        *("rollout.server.weights_dir=weights", "trainer.num_steps=2", "trainer.prompts_per_step=4"),
        *("trainer.minibatch_size=2", "rollout.sampling.n=4", "rollout.sampling.temperature=0.8", "evaluate.every=0"),
    ]
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, "experiment=served", *settings]
    done = run_command(command, server.directory, {**os.environ, "PYTHONPATH": python_path()})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = server.directory / "outputs" / "quickstart" / "served"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "actor/grad_norm" in row]
    assert [row["step"] for row in learned] == [1, 2]
    assert all(row["rollout/logprob_diff_max"] < 1e-4 for row in learned)
    held = json.loads(server.ask("/weight_info"))["weight_version"]
    assert held.startswith("rlhf_mcore-") and held.endswith("-2")
    assert list((server.directory / "weights").iterdir()) == []


def test_a_server_that_was_started_otherwise_is_a_mistake_of_the_user(server: Server) -> None:
    settings = [
        "rollout.engine=server",
        "bridge.method=gather",
        f"rollout.server.urls=[{server.url}]",
        "model.dtype=bf16",
    ]
    settings += [
        "rollout.server.weights_dir=weights",
        "trainer.num_steps=1",
        "trainer.world_size=1",
        "actor.layout.tp=1",
    ]
    config = str(ROOT / "configs" / "quickstart" / "grpo.yaml")
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", config, "experiment=other", *settings]
    done = run_command(command, server.directory, {**os.environ, "PYTHONPATH": python_path()})
    assert done.returncode == 2
    assert (
        "has dtype=torch.float32, this run needs torch.bfloat16; start the server with --dtype bfloat16" in done.stderr
    )
