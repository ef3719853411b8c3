"""Test the command convert: rejected input, output, files, and our own checkpoints as a source."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rlhf_mcore.bridge.files.formats import convert as core
from rlhf_mcore.checkpoint import manifest
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.cli import main as main_module
from rlhf_mcore.commands.convert import conversion
from rlhf_mcore.commands.convert.command import main
from rlhf_mcore_contrib.deltas.write import encode
from tests.distributed.models import make
from tests.unit.checkpoint.saving import complete

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "model"
    make("qwen3_tied", directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a committed checkpoint of an actor with the parts that convert reads."""
    directory = tmp_path / "checkpoint-5"
    make("qwen3_tied", directory / "actor", seed=1)
    (directory / "actor" / "training").mkdir()
    (directory / "actor" / "training" / "state.safetensors").write_bytes(b"moments")
    (directory / "actor" / "training" / "index.json").write_text('{"files": ["state.safetensors"]}')
    return seal(directory)


def seal(directory: Path, info: manifest.CheckpointInfo | None = None) -> Path:
    (directory / "manifest.json").unlink(missing_ok=True)
    complete(directory)
    files = [path for path in directory.rglob("*") if path.is_file()]
    manifest.write_manifest(
        directory, manifest.hash_files(directory, files), info or manifest.CheckpointInfo(5), Disk()
    )
    return directory


def test_it_is_a_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main_module.main(["convert", "--help"])
    assert ended.value.code == 0 and "--from {checkpoint,hf,megatron,fsdp}" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------ our own
def test_checkpoint_to_hf_is_bitwise_and_leaves_training_state_behind(checkpoint: Path, tmp_path: Path) -> None:
    assert main(["--from", "checkpoint", "--to", "hf", str(checkpoint), str(tmp_path / "hf"), "--verify"]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint / "actor", tmp_path / "hf"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


def test_of_a_run_directory_the_newest_checkpoint_is_converted(
    checkpoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "checkpoint-12").mkdir()  # without manifest, so not committed
    assert main(["--from", "checkpoint", "--to", "hf", str(tmp_path), str(tmp_path / "hf")]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint / "actor", tmp_path / "hf"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert "a run directory; converting checkpoint-5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "manifest.json").unlink(), "no manifest.json, so no committed checkpoint is here"),
        (
            lambda p: (p / "actor" / "training" / "state.safetensors").unlink(),
            "actor/training/state.safetensors: missing",
        ),
        (lambda p: os.truncate(p / "actor" / "model.safetensors", 1000), "actor/model.safetensors: truncated"),
    ],
)
def test_a_checkpoint_is_checked_against_its_manifest(
    checkpoint: Path, capsys: Capture, damage: object, message: str
) -> None:
    assert callable(damage)
    damage(checkpoint)
    assert main(["--from", "checkpoint", "--to", "hf", str(checkpoint), str(checkpoint.parent / "hf")]) == 2
    assert message in capsys.readouterr().err and not (checkpoint.parent / "hf").exists()


def test_fault_11_a_flipped_bit_is_seen_by_its_hash(checkpoint: Path, capsys: Capture) -> None:
    path = checkpoint / "actor" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert main(["--from", "checkpoint", "--to", "hf", str(checkpoint), str(checkpoint.parent / "hf")]) == 2
    assert "actor/model.safetensors: damaged: its content differs" in capsys.readouterr().err


def test_a_role_that_the_checkpoint_does_not_hold(checkpoint: Path, capsys: Capture) -> None:
    assert (
        main(["--from", "checkpoint", "--to", "hf", "--role", "critic", str(checkpoint), str(checkpoint.parent / "hf")])
        == 2
    )
    assert "--role=critic" in capsys.readouterr().err


def test_the_mean_of_checkpoints(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "checkpoint-9"
    make("qwen3_tied", other / "actor", seed=2)
    seal(other)
    args = ["--from", "checkpoint", "--to", "hf", str(checkpoint), str(tmp_path / "hf"), "--average", str(other)]
    assert main(args) == 0
    first, second, mean = (
        load_file(p / "model.safetensors") for p in (checkpoint / "actor", other / "actor", tmp_path / "hf")
    )
    assert all(torch.equal(mean[name], (first[name] + second[name]) / 2) for name in first)
    make("llama", tmp_path / "llama")
    args = [
        "--from",
        "hf",
        "--to",
        "hf",
        str(checkpoint / "actor"),
        str(tmp_path / "x"),
        "--average",
        str(tmp_path / "llama"),
    ]
    assert main(args) == 2
    assert "average checkpoints of one model" in capsys.readouterr().err


def test_a_delta_is_made_whole_and_its_base_must_be_what_it_was(
    checkpoint: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint contains differences from a base. A killed conversion leaves files, which the next conversion removes."""
    newer = tmp_path / "checkpoint-6"
    make("qwen3_tied", newer / "actor", seed=1)
    tensors = load_file(newer / "actor" / "model.safetensors")
    tensors["model.norm.weight"] += 1e-3
    save_file(tensors, newer / "actor" / "model.safetensors")
    files = [path for path in newer.rglob("*") if path.is_file()]
    base = manifest.Base("checkpoint-5", manifest.read_manifest(checkpoint).digest)
    encode(newer, files, checkpoint)
    seal(newer, manifest.CheckpointInfo(6, manifest.DELTA, base))
    assert not (newer / "actor" / "model.safetensors").exists()
    arguments = ["--from", "checkpoint", "--to", "megatron", str(newer), str(tmp_path / "m"), "--verify"]
    with monkeypatch.context() as killed:  # without a cleanup, as after SIGKILL
        killed.setattr(core.shutil, "rmtree", lambda *_, **__: None)
        killed.setattr(conversion, "write_megatron", lambda *_: sys.exit(137))
        with pytest.raises(SystemExit):
            main(arguments)
    assert [*(tmp_path / ".m.source").iterdir()] and (tmp_path / ".m.partial").is_dir()
    with core.transient_directory(tmp_path / "m", "source"):  # locked by a living process
        assert main(arguments) == 2
    assert "m is being written by another conversion" in capsys.readouterr().err
    assert main(arguments) == 0
    assert main(["--from", "megatron", "--to", "hf", str(tmp_path / "m"), str(tmp_path / "hf")]) == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-5", "checkpoint-6", "m", "hf"}
    os.truncate(checkpoint / "actor" / "model.safetensors", 100)
    assert main(["--from", "checkpoint", "--to", "hf", str(newer), str(tmp_path / "x")]) == 2
    assert "../checkpoint-5/actor/model.safetensors: truncated" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["TokenClassification", "SequenceClassification"])
def test_a_critic_keeps_its_head(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    actor = AutoConfig.from_pretrained(checkpoint / "actor")
    actor.num_labels = 1
    critic = getattr(transformers, f"AutoModelFor{kind}").from_config(actor)
    critic.save_pretrained(checkpoint / "critic")
    seal(checkpoint)
    options = ["--from", "checkpoint", "--role", "critic", "--verify"]
    assert main([*options, "--to", "megatron", str(checkpoint), str(tmp_path / "m")]) == 0
    assert main([*options, "--to", "hf", str(checkpoint), str(tmp_path / "direct")]) == 0
    assert main(["--from", "megatron", "--to", "hf", str(tmp_path / "m"), str(tmp_path / "back")]) == 0
    expected = load_file(checkpoint / "critic" / "model.safetensors")
    assert "score.weight" in expected
    for directory in ("direct", "back"):
        found = load_file(tmp_path / directory / "model.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# ------------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["SRC"], "DST is missing"),
        (["SRC", "DST", "--shard-size", "4 apples"], "--shard-size=4 apples is not a size"),
        (["SRC", "DST", "--shard-size", "0"], "--shard-size=0 is not a size"),
        (["SRC/config.json", "DST", "--hf-config", "SRC"], "is not a directory"),
        (["SRC/nowhere", "DST"], "nowhere is not a directory (looked from "),
        (["SRC", "SRC"], "already exists; give another DST or --overwrite"),
    ],
)
def test_mistakes(model: Path, tmp_path: Path, capsys: Capture, arguments: list[str], message: str) -> None:
    places = [argument.replace("SRC", str(model)).replace("DST", str(tmp_path / "out")) for argument in arguments]
    assert main(["--from", "hf", "--to", "hf", *places]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_destination_that_is_there_is_refused_before_the_source_is_read(tmp_path: Path, capsys: Capture) -> None:
    assert main(["--from", "hf", "--to", "hf", str(tmp_path / "missing"), str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} already exists; give another DST or --overwrite\n"


def test_sizes_of_files_are_kept(model: Path, tmp_path: Path) -> None:
    assert main(["--from", "hf", "--to", "hf", "--shard-size", "0.1MB", str(model), str(tmp_path / "out")]) == 0
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5 and all(file.stat().st_size < 102_000 for file in files)


def test_dry_run_prints_the_map_and_writes_nothing(model: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["--from", "hf", "--to", "megatron", "--dry-run", str(model)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "embedding.word_embeddings.weight [97, 64] fp32 <- model.embed_tokens.weight (model.safetensors)"
    # 4 query heads, one key head and one value head of width 32.
    assert (
        "decoder.layers.self_attention.linear_qkv.weight[2] [192, 64] fp32 <- "
        "model.layers.2.self_attn.q_proj.weight (model.safetensors), "
        "model.layers.2.self_attn.k_proj.weight (model.safetensors), "
        "model.layers.2.self_attn.v_proj.weight (model.safetensors)"
    ) in lines
    assert lines[-1] == "46 tensors, 162688 parameters, 650752 bytes"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_the_bar_counts_every_byte_once_to_its_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    counted: dict[str, list[int]] = {}

    @contextmanager
    def bar(console: object, what: str, total: int) -> Iterator[Callable[[int], None]]:
        counted[what] = [total, 0]

        def advance(num_bytes: int) -> None:
            counted[what][1] += num_bytes

        yield advance

    monkeypatch.setattr(conversion, "progress_bar", bar)
    assert main(["--from", "hf", "--to", target, str(model), str(tmp_path / "out"), "--verify"]) == 0
    assert counted == {"converting": [650752, 650752], "verifying": [650752, 650752]}


def test_a_terminal_sees_bytes_and_the_time_that_is_left() -> None:
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    with conversion.progress_bar(console, "converting", 2_000_000) as advance:
        advance(1_000_000)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "converting" in shown and "1.0/2.0 MB" in shown and ":" in shown


def test_overwrite_replaces_the_whole_directory(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model-00001-of-00009.safetensors").write_text("old")
    assert main(["--from", "hf", "--to", "hf", "--overwrite", str(model), str(tmp_path / "out")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert not (tmp_path / "out" / "model-00001-of-00009.safetensors").exists()


def test_only_a_directory_is_replaced(model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "out").write_text("mine")
    assert main(["--from", "hf", "--to", "hf", "--overwrite", str(model), str(tmp_path / "out")]) == 2
    assert "out is not a directory; give another DST" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out").read_text() == "mine"


# ------------------------------------------------------------------------------------------------------------ interruption
@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError(28, "No space left on device"), signal.SIGTERM])
@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_an_interrupted_conversion_leaves_nothing_and_keeps_what_was_there(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    end: BaseException | signal.Signals,
    capsys: Capture,
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("")
    rows = core.Reading.rows

    def stop(self: core.Reading, name: str, first: int, count: int) -> torch.Tensor:
        if name == "model.layers.2.mlp.down_proj.weight":
            if isinstance(end, BaseException):
                raise end
            os.kill(os.getpid(), end)
        return rows(self, name, first, count)

    monkeypatch.setattr(core.Reading, "rows", stop)
    arguments = ["--from", "hf", "--to", target, "--overwrite", str(model), str(tmp_path / "out")]
    if isinstance(end, OSError):
        assert main(arguments) == 1
        told = (
            rf"error: \[Errno 28\] No space left on device: {tmp_path}/out needs [\d,]+ bytes, [\d,]+ bytes are free\n"
        )
        assert re.search(told, capsys.readouterr().err)
    else:
        with pytest.raises(SystemExit if isinstance(end, signal.Signals) else KeyboardInterrupt) as raised:
            main(arguments)
        assert getattr(raised.value, "code", 143) == 143
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]


def test_verify_sees_a_byte_that_the_disk_changed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write = conversion.write_hf

    def write_badly(reading: core.Reading, directory: Path, shard_bytes: int) -> None:
        write(reading, directory, shard_bytes)
        path = directory / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 64
        path.write_bytes(data)

    monkeypatch.setattr(conversion, "write_hf", write_badly)
    arguments = ["--from", "hf", "--to", "hf", str(model), str(tmp_path / "out")]
    assert main([*arguments, "--verify"]) == 2
    assert "1 tensors differ from the written values" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0


def test_two_conversions_do_not_write_one_directory(model: Path, tmp_path: Path, capsys: Capture) -> None:
    with core.whole_directory(tmp_path / "out", overwrite=False) as temporary:
        (temporary / "mine").write_text("")
        assert main(["--from", "hf", "--to", "hf", str(model), str(tmp_path / "out")]) == 2
        assert "is being written by another conversion" in capsys.readouterr().err
        assert (temporary / "mine").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_what_a_killed_conversion_left_is_swept_away(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial" / "release").mkdir(parents=True)
    (tmp_path / ".out.partial" / "junk").write_text("")
    assert main(["--from", "hf", "--to", "hf", str(model), str(tmp_path / "out")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "junk").exists()


def test_a_directory_that_cannot_be_made(model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--from", "hf", "--to", "hf", str(model), str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_what_megatrons_arguments_cannot_tell_is_noted(tmp_path: Path, capsys: Capture) -> None:
    queries = "norms of queries and keys of all heads together"
    outputs, gelu, scaled = (
        "norms of the outputs of attention and MLP",
        "activation 'gelu_pytorch_tanh'",
        "scaled embeddings",
    )
    noted: dict[str, list[str]] = {
        "qwen2_yarn": ["rope type 'yarn'"],
        "llama_rope3": [],
        "olmo2": [outputs, queries],
        "gemma3_text": ["rope type 'linear'", gelu, outputs, scaled],
    }
    for name, parts in noted.items():
        make(name, tmp_path / name)
        assert main(["--from", "hf", "--to", "megatron", str(tmp_path / name), str(tmp_path / f"{name}_m")]) == 0
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        assert [line.split(" have no name for ")[1].split(";")[0] for line in told] == parts


def test_common_state_names_the_model_for_megatron(model: Path, tmp_path: Path) -> None:
    assert main(["--from", "hf", "--to", "megatron", str(model), str(tmp_path / "out")]) == 0
    common = torch.load(tmp_path / "out" / "release" / "common.pt", weights_only=False)
    args = vars(common["args"])
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert json.loads((tmp_path / "out" / "release" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert common["checkpoint_version"] == 3.0
    expected = dict(
        num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=1, kv_channels=32,
        padded_vocab_size=128, qk_layernorm=True, add_qkv_bias=False, swiglu=True, normalization="RMSNorm",
        untie_embeddings_and_output_weights=False, norm_epsilon=1e-6, rotary_base=10000, params_dtype=torch.float32,
        num_experts=None, position_embedding_type="rope",
    )  # fmt: skip
    assert {key: args[key] for key in expected} == expected
