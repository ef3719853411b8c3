"""Test certificates: verdicts and pages, the tested layouts, and names of libraries read from sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.families import FAMILIES
from tools.certify import families, layouts, names, row
from tools.certify.__main__ import PARTS, Part, as_page, is_whole, main, run_part

GOOD: dict[str, Any] = {
    "layout": "tp2",
    "dtype": "fp32",
    "engine": "vllm",
    "trainer": 2e-7,
    "rollout": 3e-7,
    "agreement": 4e-7,
    "noise": 0.0,
    "gradient": 5e-7,
    "sync": "equal",
    "sleep": "",
    "saved": "equal",
}
LIBRARY = """
class Engine:
    def __init__(self, limit): self.batch_queue = limit
    def step(self): ...
def make(): ...
if make is None: from elsewhere import fused
"""
OURS = """
from alib.engine import Engine, make, fused, vanished
from unittest import mock
import logging

class Own(Engine):
    def step(self):
        return super().step() + super().advance()

def use(engine):
    logging.getLogger().setLevel(1)
    Engine(limit=1)
    Engine(bound=1)
    make.cache
    mock.patch.object(Engine, "forward", None)
    engine.own = 1
    return engine.own + engine.batch_queue + engine.wait_queue
"""


def test_every_family_has_a_tiny_model() -> None:
    assert set(families.TINY) == {name for name, family in FAMILIES.items() if family.vision is None}
    assert {*families.QUICK, *families.IN_BF16} <= set(FAMILIES)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, ()),
        ({"trainer": 1.1e-5}, ("trainer", "1.1e-05", "1.0e-05")),
        ({"rollout": float("nan")}, ("engine", "nan")),
        ({"dtype": "bf16", "noise": 0.01, "trainer": 0.02, "rollout": 0.019, "gradient": 0.09}, ()),
        ({"dtype": "bf16", "noise": 0.01, "rollout": 0.021}, ("engine", "2.1e-02", "2.0e-02")),
        ({"gradient": 0.5}, ("gradient", "5.0e-01")),
        ({"sync": "rank 1: a tensor differs"}, ("sync", "rank 1")),
        ({"sleep": "differs after level 2"}, ("sleep", "level 2")),
        ({"saved": "model.norm.weight differs"}, ("saved", "model.norm.weight")),
        ({"problem": "its ranks ended with code 1"}, ("code 1",)),
    ],
)
def test_rows_are_judged(change: dict[str, Any], named: tuple[str, ...]) -> None:
    problems = list(layouts.judge(GOOD | change))
    assert len(problems) == bool(named)
    assert all(word in problems[0] for word in named)


def test_the_page_has_all_rows_and_tells_what_is_wrong() -> None:
    document: dict[str, Any] = {
        "machine": {"torch": "2.13.0"},
        "families": {
            "llama": [GOOD, GOOD | {"layout": "cp2", "saved": "lm_head.weight differs"}],
            "olmo2": [{"layout": "all", "problem": "x"}],
        },
        "parts": {"resume": [row("its weights", "equal", "equal", True)]},
    }
    page = as_page(document)
    rows = [line for line in page.splitlines() if line.startswith(("| llama", "| olmo2"))]
    assert (
        rows[0]
        == "| llama | tp2 | fp32 | vllm | 2.0e-07 | 3.0e-07 | 4.0e-07 | 1.0e-05 | 5.0e-07 | equal |  | equal | ok |"
    )
    assert "WRONG: cp2: saved: lm_head.weight differs" in rows[1] and "WRONG: x" in rows[2]
    assert {line.count("|") for line in rows} == {14}
    assert "| resume | its weights | equal | equal | ok |" in page
    assert not is_whole(document)
    document["families"] = {"llama": [GOOD]}
    assert is_whole(document)
    document["parts"] = {"resume": [row("its weights", "differ", "equal", False)]}
    assert not is_whole(document)


@pytest.mark.parametrize(
    ("family", "ranks", "expected"),
    [
        ("llama", 2, ["tp1", "tp2", "tp2_sp", "pp2", "pp2_vpp2", "cp2"]),
        ("qwen3_moe", 2, ["tp1", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "ep2", "tp2_sp_ep2_etp1"]),
        ("llama", 1, ["tp1"]),
    ],
)
def test_layouts_are_those_that_a_run_may_have(family: str, ranks: int, expected: list[str], tmp_path: Path) -> None:
    found, note = layouts.find_layouts(families.make_run(family, tmp_path, on_cuda=False), ranks)
    assert (list(found), note) == (expected, "")


def test_without_vllm_the_reference_engine_is_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_mcore.cli.preflight.find_spec", lambda name: None if name == "vllm" else name)
    found, note = layouts.find_layouts(families.make_run("llama", tmp_path, on_cuda=True), 1)
    assert found["tp1"][0] == "rollout.engine=hf" and "needs vllm, which is not installed" in note


def test_parts_that_fail_or_take_too_long_hide_no_other(tmp_path: Path) -> None:
    late = Part("mfu", "tools.certify.throughput", "mfu", limit_s=0)
    unknown = Part("absent", "tools.certify.throughput", "absent", limit_s=60)
    assert run_part(late, "cpu", tmp_path, 1)[0][1::2] == ["stopped after 0 s: see mfu.log", "WRONG"]
    assert "failed with 1" in run_part(unknown, "cpu", tmp_path, 1)[0][1]


def test_parts_are_there() -> None:
    assert all(callable(part.load()) for part in PARTS)


def test_an_error_of_a_command_line_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["--device", "cuda"], "torch finds no CUDA device"),
        (["--only", "x"], "invalid choice"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "alib").mkdir()
    (tmp_path / "alib" / "__init__.py").touch()
    (tmp_path / "alib" / "engine.py").write_text(LIBRARY)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "module.py").write_text(OURS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "ours"
    for name in ("alib", "alib.engine"):
        sys.modules.pop(name, None)


def test_names_that_a_library_has_no_more_are_found(library: Path) -> None:
    """Includes imports, attributes, patches, keywords and methods of a base.

    Names behind a condition of another version count as present.
    """
    found = {use.name: use.problem for use in names.check_all(library, ("alib",))}
    assert found == {
        "alib.engine.Engine": "",
        "alib.engine.make": "",
        "alib.engine.fused": "",
        "alib.engine.vanished": "not there",
        "alib.engine.Engine.step": "",
        "alib.engine.Engine.advance": "not there",
        "alib.engine.Engine.forward": "not there",
        "alib.engine.Engine(limit=)": "",
        "alib.engine.Engine(bound=)": "no such parameter",
        "alib.engine.make.cache": "not there",
        "alib: .batch_queue": "",
        "alib: .wait_queue": "no source has this word",
    }
    assert names.check_all(library, ("a_library_that_is_not_installed",)) == []
