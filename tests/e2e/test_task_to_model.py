"""Run the commands of docs/get-started/train-your-model.md in order, on a small model and small data, with a stand-in
for the hub.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import urllib.request
from pathlib import Path

import pyarrow.parquet as parquet

from tests.commands import ROOT, run_command, start_command
from tests.hub import stand_in
from tests.tiny_training import make_quickstart

PAGE = (ROOT / "docs" / "get-started" / "train-your-model.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
SMALL = """
rollout: {engine: hf, sampling: {n: 2, max_new_tokens: 8}}
trainer: {num_steps: 2, prompts_per_step: 4, minibatch_size: 2}
evaluate: {every: 0, max_prompts: 4}
data: {max_prompt_tokens: 128}
logging: {console: plain, trackers: []}
"""


def in_form_of_gsm8k(source: Path) -> bytes:
    rows = parquet.read_table(source).to_pylist()
    sums = [
        {"question": row["prompt"][-1]["content"], "answer": f"It is #### {row['reward_model']['ground_truth']}"}
        for row in rows
    ]
    return "".join(json.dumps(row) + "\n" for row in sums).encode()


def test_commands_of_the_page(tmp_path: Path) -> None:
    make_quickstart(tmp_path, num_eval=16)
    programs = Path(sys.executable).parent
    with stand_in() as hub:
        model = tmp_path / "quickstart" / "model"
        hub.files["models/Qwen/Qwen3-1.7B"] = {path.name: path.read_bytes() for path in model.iterdir()}
        hub.files["datasets/openai/gsm8k"] = {
            "main/train.jsonl": in_form_of_gsm8k(tmp_path / "quickstart" / "train.parquet")
        }
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_for_this_test",
        }
        [config] = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
        (tmp_path / "page.yaml").write_text(config)
        (tmp_path / "gsm8k.yaml").write_text(f"base: page.yaml\n{SMALL}")

        def run(part: str) -> str:
            """Run the page's only command that contains ``part``, and return its output."""
            [command] = [command for command in COMMANDS if part in command]
            words = shlex.split(command)
            if words[0] == "rlhf-mcore":
                words = [sys.executable, "-m", "rlhf_mcore.cli.main", *words[1:]]
            done = run_command(words, tmp_path, environment)
            assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            return done.stdout

        run("hf download Qwen/")
        run("hf download openai/")
        run("prepare-data")
        assert {"train.parquet", "eval.parquet"} <= {path.name for path in (tmp_path / "data" / "gsm8k").iterdir()}
        assert "truth right" in run("reward-test")
        assert "H100" in run("plan")
        assert "step 2/2" in run("rlhf-mcore train")
        run_directory = tmp_path / "outputs" / "gsm8k" / "qwen3-1.7b"
        assert f"vllm serve {run_directory.relative_to(tmp_path)}/latest/actor" in COMMANDS
        assert (run_directory / "latest" / "actor" / "model.safetensors").is_file()

        [watch] = [shlex.split(command) for command in COMMANDS if "watch" in command]
        with start_command(
            [sys.executable, "-m", "rlhf_mcore.cli.main", *watch[1:]], tmp_path, environment
        ) as watching:
            watching.wait_for(lambda: re.search(r"http://\S+", watching.output()))
            [address] = re.findall(r"http://[^\s/]+", watching.output())[:1]
            with urllib.request.urlopen(address, timeout=30) as page:
                assert "qwen3-1.7b" in page.read().decode()
            watching.process.send_signal(signal.SIGINT)
            watching.end(30)

        compared = run("evaluate")
        assert "models/Qwen3-1.7B" in compared and "difference" in compared
        run("rlhf-mcore push")
        assert "model.safetensors" in hub.files["models/my-org/qwen3-1.7b-gsm8k"]
    named = {command.split()[1] for command in COMMANDS if command.startswith("rlhf-mcore")}
    assert named == {"doctor", "prepare-data", "reward-test", "plan", "train", "watch", "evaluate", "push"}
