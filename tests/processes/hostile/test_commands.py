"""The commands themselves, on inputs of every kind in one process whose memory is bounded, and on bad outputs: one message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.hostile.test_config_json import LLAMA, write
from tests.unit.hostile.test_formats import zip_shard

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "tests" / "data" / "checkpoint_v1"
EXTRA_BYTES = 2**30  # beyond what the imports take
RUN_ALL = f"""
import contextlib, importlib, io, json, resource, sys
import torch  # first: to name a dtype pickle asks every module before torch for it, and aliases in transformers import torchvision
torch.save({{"x": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}}, sys.argv[1])
from rlhf_mcore.cli.main import module_of
from rlhf_mcore.commands.convert import command as convert
from rlhf_mcore.commands.convert import conversion
from rlhf_mcore.commands.plan import command as plan
from rlhf_mcore.commands import verify_checkpoint
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {EXTRA_BYTES}, used + {EXTRA_BYTES}))
results = []
for command, *arguments in json.load(sys.stdin):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
        code = importlib.import_module(module_of(command)).main(arguments)
    results.append((code, errors.getvalue()))
print(json.dumps(results))
"""


def test_commands_end_with_one_message_and_little_memory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "chain.yaml").write_text("base: chain.yaml\n")
    huge = write(tmp_path / "huge", {**LLAMA, "num_hidden_layers": 10**9})
    nested = write(tmp_path / "nested", "[" * 200_000)
    memo = write(tmp_path / "memo", LLAMA)
    (memo / ".metadata").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f.")
    shards = write(tmp_path / "shards", LLAMA)
    (shards / "model_world_size_999999999_rank_0.pt").touch()
    quantised = write(tmp_path / "quantised", LLAMA)
    liar = write(tmp_path / "liar", LLAMA)
    zip_shard(liar / "model_world_size_1_rank_0.pt", b"\x80\x02X\xff\xff\xff\x7fx.")
    index = write(tmp_path / "index", LLAMA)
    (index / "model.safetensors.index.json").symlink_to("/dev/zero")
    manifest = tmp_path / "checkpoint-1"
    manifest.mkdir()
    os.mkfifo(manifest / "manifest.json")
    base, out = str(ROOT / "configs" / "base.yaml"), str(tmp_path / "out")
    cases = [
        (["plan", str(tmp_path / "fifo.yaml")], "a FIFO, not a regular file"),
        (["plan", "/dev/zero"], "a device, not a regular file"),
        (["plan", str(tmp_path / "chain.yaml")], "form a cycle"),
        (["plan", base, f"model.path={huge}", "data.train=[a.jsonl]"], "num_hidden_layers=1000000000"),
        (["plan", base, f"model.path={nested}", "data.train=[a.jsonl]"], "nested deeper than 32"),
        (["convert", "--from", "hf", "--to", "hf", str(huge), out], "num_hidden_layers=1000000000"),
        (["convert", "--from", "hf", "--to", "hf", str(index), out], "a device, not a regular file"),
        (["convert", "--from", "megatron", "--to", "hf", str(memo), out], "not the index of a checkpoint"),
        (["convert", "--from", "fsdp", "--to", "hf", str(shards), out], "999999998 files are missing"),
        (["convert", "--from", "fsdp", "--to", "hf", str(quantised), out], "x: a quantised tensor"),
        (["convert", "--from", "fsdp", "--to", "hf", str(liar), out], "refused"),
        (["convert", "--from", "checkpoint", "--to", "hf", str(manifest), out], "manifest.json"),
        (["verify-checkpoint", str(manifest)], "manifest.json"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(quantised / "model_world_size_1_rank_0.pt")],
        input=json.dumps([arguments for arguments, _ in cases]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for (arguments, message), (code, text) in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert message in text, (arguments, text[:500])
        assert "Traceback" not in text
        assert code == 2, (arguments, text[:500])
    assert not (tmp_path / "out").exists()


def test_a_rank_says_what_is_wrong_with_its_number() -> None:
    environment = {**os.environ, "RANK": "x"}
    command = [sys.executable, "-m", "rlhf_mcore.cli.train", "run.yaml"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=SAMPLE, timeout=120, check=False
    )
    assert done.returncode == 2 and "RANK='x' is not a whole number" in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


def test_an_output_that_is_full_or_closed_ends_without_a_traceback() -> None:
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "config", "explain", "seed"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=SAMPLE, timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=SAMPLE, timeout=120, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
