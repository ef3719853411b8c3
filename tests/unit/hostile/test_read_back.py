"""Read damaged or replaced files of a run: metrics and evaluations. Includes the latest findings of random inputs."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhf_mcore.bridge.files.hf_files import HFReader, copy_companions
from rlhf_mcore.cli import preflight
from rlhf_mcore.commands.evaluate.results import EvaluationDirectory, PartFile
from rlhf_mcore.commands.prepare_data.prepare import read_source
from rlhf_mcore.data.rendering import _render_one
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.readers.model_files import inspect_model
from rlhf_mcore.readers.user_functions import function_problems
from tests.messages import assert_names
from tests.unit.hostile.refusals import refusal
from tests.unit.hostile.test_config_json import LLAMA, QWEN_MOE

DEEP = "[" * 100_000
NO_RECORDS = {
    "an infinity": '{"step": 1e999}',
    "deep": DEEP,
    "no object": "[1]",
    "a text": '{"step": "x"}',
    "nothing": '{"step": null}',
    "a NUL": '{"step": 1}\0',
    "not finite": '{"step": 1, "loss/total": NaN}',
    "half": '{"step": 1',
    "many digits": '{"step": ' + "9" * 5000 + "}",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(str(tmp_path), "project", "run")


# ------------------------------------------------------------------------------------------------------------- metrics
def test_what_is_no_record_of_a_step_is_dropped_on_a_resume(run: RunDirectory) -> None:
    for kind in NO_RECORDS:
        run.metrics_path.write_text('{"step": 1, "a": 2}\n' + NO_RECORDS[kind] + '\n{"step": 2}\n{"step": 9}\n')
        run.cut_metrics(2)
        assert list(run.records()) == [{"step": 1, "a": 2}, {"step": 2}]


@pytest.mark.parametrize(("make", "message"), [(os.mkfifo, "a FIFO"), (os.mkdir, "a directory")])
def test_metrics_that_are_no_file(run: RunDirectory, make: Callable[[Path], None], message: str) -> None:
    make(run.metrics_path)
    assert message in refusal(run.cut_metrics, 1)
    assert message in refusal(list, run.records())


# --------------------------------------------------------------------------------------------------------- evaluations
def test_samples_that_cannot_be(tmp_path: Path) -> None:
    for number, (line, message) in enumerate(
        [
            (DEEP, "nested deeper than 32"),
            ("[1]", "is not a JSON object"),
            ('{"samples": 1}', "samples=1, not a list of objects"),
            ('{"samples": [1]}', "samples=[1], not a list of objects"),
            ('{"samples": [{"index": [], "sample": 0}]}', "samples[0].index=[], not an integer"),
            ('{"samples": [{"index": 0}]}', "has no samples[0].sample"),
            ('{"samples": [{"index": 0, "sample": NaN}]}', "is nan, not a finite number"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        directory = EvaluationDirectory(here / "e", {"seed": 1})
        part = here / "e" / "parts" / "engine-00000-of-00001.jsonl"
        part.write_text('{"samples": [{"index": 0, "sample": 0}]}\n' + line + "\n")
        text = refusal(directory.samples)
        assert f"{part}, line 2" in text and message in text and "remove the file" in text


def test_settings_of_an_evaluation_that_cannot_be_read(tmp_path: Path) -> None:
    for number, content in enumerate(["[]", "{", DEEP, '{"a": NaN}', "\0"]):
        here = tmp_path / str(number)
        here.mkdir()
        (here / "settings.json").write_text(content)
        assert "settings.json" in refusal(EvaluationDirectory, here, {"seed": 1})


# ------------------------------------------------------------------------------------------------------------- weights
def model(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]], name: str = "model.safetensors") -> str:
    """Write a directory with config.json and weights of zeros."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}, folder / name)
    return str(folder)


ATTENTION = {
    "self_attn.q_proj.weight": [64, 64],
    "self_attn.k_proj.weight": [32, 64],
    "self_attn.v_proj.weight": [32, 64],
    "self_attn.o_proj.weight": [64, 64],
    "input_layernorm.weight": [64],
    "post_attention_layernorm.weight": [64],
}
MLP = {"mlp.gate_proj.weight": [128, 64], "mlp.up_proj.weight": [128, 64], "mlp.down_proj.weight": [64, 128]}
EXPERTS = {
    "self_attn.q_norm.weight": [16],
    "self_attn.k_norm.weight": [16],
    "mlp.gate.weight": [4, 64],
    "mlp.experts.0.gate_proj.weight": [32, 64],
    "mlp.experts.0.up_proj.weight": [32, 64],
    "mlp.experts.0.down_proj.weight": [64, 32],
}


def in_layers(shapes: dict[str, list[int]], num_layers: int = 2) -> dict[str, list[int]]:
    ends = {"model.embed_tokens.weight": [100, 64], "model.norm.weight": [64]}
    return ends | {f"model.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in shapes.items()}


DENSE, SPARSE = in_layers(ATTENTION | MLP), in_layers(ATTENTION | EXPERTS)


def test_weights_that_are_those_of_their_config(tmp_path: Path) -> None:
    assert inspect_model(model(tmp_path / "dense", LLAMA, DENSE), "model.path")[1] == []
    assert inspect_model(model(tmp_path / "sparse", {**QWEN_MOE, "head_dim": 16}, SPARSE), "model.path")[1] == []


def test_weights_of_another_model_are_refused_before_a_process_starts(tmp_path: Path) -> None:
    for number, (change, message) in enumerate(
        [
            ({"vocab_size": 200}, "model.embed_tokens.weight is [100, 64], but config.json requires [200, 64]"),
            (
                {"intermediate_size": 64},
                "model.layers.0.mlp.gate_proj.weight is [128, 64], but config.json requires [64, 64]",
            ),
            ({"num_key_value_heads": 4}, "k_proj.weight is [32, 64], but config.json requires [64, 64]"),
            ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
            ({"num_hidden_layers": 1}, "more layers than config.json's num_hidden_layers=1"),
            ({"hidden_size": 2**17}, "embed_tokens.weight is [100, 64], but config.json requires [100, 131072]"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        found = inspect_model(model(here / "m", {**LLAMA, **change}, DENSE), "model.path")[1]
        assert message in "\n".join(found)


def test_headers_that_cannot_be(tmp_path: Path) -> None:
    for number, data in enumerate([b"1", b"\xff" * 64, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 8) + b"[" * 8]):
        here = tmp_path / str(number)
        here.mkdir()
        folder = Path(model(here / "m", LLAMA, DENSE))
        (folder / "model.safetensors").write_bytes(data)
        (problem,) = inspect_model(str(folder), "model.path")[1]
        assert f"{folder}/model.safetensors" in problem and "download or export the model again" in problem


def test_a_file_that_was_cut_is_found_by_its_header(tmp_path: Path) -> None:
    """The damaged file is the only one, or the second of two, whose shapes are not compared. A longer file is rejected too."""
    for number, change in [(1, -100), (2, -100), (1, 1)]:
        here = tmp_path / f"{number} {change}"
        here.mkdir()
        shapes = {**DENSE, "model.layers.1.mlp.up_proj.weight": [128, 64]}
        folder = Path(model(here / "m", LLAMA, DENSE))
        names = list(shapes)
        parts = [names] if number == 1 else [names[:-1], names[-1:]]
        files = [f"model-{place}.safetensors" for place in range(2)] if number == 2 else ["model.safetensors"]
        (folder / "model.safetensors").unlink()
        for file, part in zip(files, parts, strict=True):
            save_file({name: torch.zeros(shapes[name]) for name in part}, folder / file)
        if number == 2:
            places = {name: file for file, part in zip(files, parts, strict=True) for name in part}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        assert inspect_model(str(folder), "model.path")[1] == []
        last = folder / files[-1]
        size = last.stat().st_size
        os.truncate(last, size + change)
        (problem,) = inspect_model(str(folder), "model.path")[1]
        assert_names(problem, field=str(last), value="not fully covered", remedy="download or export the model again")


def test_names_of_a_file_with_many_tensors_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking safetensors for all names at every tensor took minutes for 30,000 tensors."""
    calls = []

    class Handle:
        def keys(self) -> list[str]:
            calls.append(1)
            return list(DENSE)

        def get_slice(self, name: str) -> Any:
            return type("Slice", (), {"get_shape": lambda self: DENSE[name]})()

    model(tmp_path / "m", LLAMA, DENSE)
    monkeypatch.setattr("rlhf_mcore.bridge.files.hf_files.safe_open", lambda *_, **__: Handle())
    reader = HFReader(tmp_path / "m")
    assert {name: list(reader.shape(name)) for name in reader.names} == DENSE
    assert len(calls) == 1


def test_what_travels_with_the_weights_is_bounded(tmp_path: Path) -> None:
    folder = Path(model(tmp_path / "m", LLAMA, DENSE))
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "out").mkdir()
    text = refusal(copy_companions, [folder], tmp_path / "out", torch.float32)
    assert "1,099,511,627,776 bytes" in text


# ---------------------------------------------------------------------------------------------------------------- code
def test_a_file_of_code_that_no_parser_should_get(tmp_path: Path) -> None:
    for number, (code, message) in enumerate(
        [
            ("x = " + "(" * 5000 + ")" * 5000, "not valid Python"),
            ("x = 1\n" * 200_000, "1,200,000 bytes"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        (here / "f.py").write_text(code)
        assert message in "\n".join(function_problems(f"{here}/f.py:score", "reward.function"))


def test_a_fifo_is_no_code(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.py")
    assert "a FIFO" in "\n".join(function_problems(f"{tmp_path}/f.py:score", "reward.function"))


def test_a_fifo_among_the_files_of_a_data_set(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    assert "a FIFO" in refusal(list, read_source(str(tmp_path)))


# ---------------------------------------------------------------------------------------------------------------- rest
def test_more_processes_than_a_machine_can_start() -> None:
    preflight.check_world(1)
    text = refusal(preflight.check_world, 100_000)
    assert "trainer.world_size=100000" in text and "lower it" in text


def test_a_template_that_makes_what_is_no_text() -> None:
    for text in ["a\0", "\ud800"]:
        assert "NUL or a lone surrogate" in _render_one(lambda _, text=text: text, [])["error"]


# ------------------------------------------------------------------------------------------------ parts of an evaluation
def test_parts_that_lead_elsewhere_are_refused_and_cut_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept.jsonl").write_text("no newline at the end")
    parts = tmp_path / "evaluation" / "parts"
    parts.mkdir(parents=True)
    (parts / "a.jsonl").symlink_to(victim / "kept.jsonl")
    assert "is a link" in refusal(EvaluationDirectory, tmp_path / "evaluation", {})
    (parts / "a.jsonl").unlink()
    (parts / "engine-00000-of-00001.jsonl").symlink_to(victim / "new.jsonl")
    assert "is a link" in refusal(PartFile, tmp_path / "evaluation", 0, 1)
    (parts / "engine-00000-of-00001.jsonl").unlink()
    parts.rmdir()
    parts.symlink_to(victim)
    assert "is a link" in refusal(EvaluationDirectory, tmp_path / "evaluation", {})
    assert [(path.name, path.read_text()) for path in victim.iterdir()] == [("kept.jsonl", "no newline at the end")]


def test_a_part_without_lines_is_refused_before_it_is_read_through(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "a.jsonl").touch()
    os.truncate(parts / "a.jsonl", 2**40)
    assert "a.jsonl: its last line has more than 16,777,216 bytes" in refusal(EvaluationDirectory, tmp_path, {})


def test_what_a_crash_cut_short_is_removed(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    whole = b'{"samples": []}\n' * 2
    for number, rest in enumerate((b"", b'{"samp', b"x" * 200_000)):
        (parts / f"{number}.jsonl").write_bytes(whole + rest)
    (parts / "3.jsonl").write_bytes(b"x")
    EvaluationDirectory(tmp_path, {}).close()
    assert [path.read_bytes() for path in sorted(parts.iterdir())] == [whole, whole, whole, b""]
