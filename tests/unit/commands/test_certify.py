"""What a certificate judges and writes, which layouts it tries, and the names of libraries that it reads from sources."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli.main import COMMANDS, module_of
from rlhf_mcore.commands.certify import command, models, names
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.own_processes import has_ended
from tests.commands import wait_for

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
    assert set(models.TINY) == {name for name, family in FAMILIES.items() if family.vision is None}
    assert {*models.QUICK, *models.IN_BF16} <= set(FAMILIES)


def test_a_room_is_a_command() -> None:
    assert module_of("certify") == "rlhf_mcore.commands.certify.command"
    assert module_of("prepare-data") == "rlhf_mcore.commands.prepare_data.command"
    assert "first thing to run on a cluster" in COMMANDS["certify"]


def test_a_training_run_loads_no_room() -> None:
    code = "import sys, rlhf_mcore.cli.train; print([m for m in sys.modules if m.startswith('rlhf_mcore.commands')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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
    problems = list(command.judge(GOOD | change))
    assert len(problems) == bool(named)
    assert all(word in problems[0] for word in named)


def test_a_page_has_a_row_for_each_layout_and_tells_what_is_wrong() -> None:
    document: dict[str, Any] = {
        "machine": {"torch": "2.13.0"},
        "families": {
            "llama": [GOOD, GOOD | {"layout": "cp2", "saved": "lm_head.weight differs"}],
            "olmo2": [{"layout": "all", "problem": "x"}],
        },
        "resume": {"what": "llama", "verdict": "equal after 4 steps"},
        "names": "3 names that we use: all are there",
    }
    page = command.as_page(document)
    rows = [line for line in page.splitlines() if line.startswith(("| llama", "| olmo2"))]
    assert (
        rows[0]
        == "| llama | tp2 | fp32 | vllm | 2.0e-07 | 3.0e-07 | 4.0e-07 | 1.0e-05 | 5.0e-07 | equal |  | equal | ok |"
    )
    assert "WRONG: cp2: saved: lm_head.weight differs" in rows[1] and "WRONG: x" in rows[2]
    assert {row.count("|") for row in rows} == {14}
    assert not command.is_whole(document)
    document["families"] = {"llama": [GOOD]}
    assert command.is_whole(document)
    assert not command.is_whole(document | {"resume": {"what": "llama", "verdict": "differs: the weights"}})


@pytest.mark.parametrize(
    ("family", "ranks", "expected"),
    [
        ("llama", 2, ["tp1", "tp2", "tp2_sp", "pp2", "pp2_vpp2", "cp2"]),
        ("qwen3_moe", 2, ["tp1", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "ep2", "tp2_sp_ep2_etp1"]),
        ("llama", 1, ["tp1"]),
    ],
)
def test_layouts_are_those_that_a_run_may_have(family: str, ranks: int, expected: list[str], tmp_path: Path) -> None:
    layouts, note = command._layouts(models.make_run(family, tmp_path, on_cuda=False), ranks)
    assert (list(layouts), note) == (expected, "")


def test_without_vllm_the_reference_engine_is_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_mcore.cli.preflight.find_spec", lambda name: None if name == "vllm" else name)
    layouts, note = command._layouts(models.make_run("llama", tmp_path, on_cuda=True), 1)
    assert layouts["tp1"][0] == "rollout.engine=hf" and "needs vllm, which is not installed" in note


@pytest.mark.parametrize(("code", "ends"), [(129, True), (130, True), (143, True), (1, False), (137, False)])
def test_a_signal_ends_the_certificate_and_a_failure_is_a_row(
    code: int, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf_mcore.cli.launch.launch", lambda *_, **__: code)
    if ends:
        with pytest.raises(SystemExit, match=str(code)):
            command._measure_family("llama", tmp_path / "llama", 1, False, quick=True)
    else:
        [row] = command._measure_family("llama", tmp_path / "llama", 1, False, quick=True)
        assert f"code {code}" in row["problem"]


TRAINING = f"""
import sys
from pathlib import Path
from rlhf_mcore.cli import exit_codes, launch
from rlhf_mcore.commands.certify import command
launch._GRACE_S = 0.1
code = 'import subprocess as s, time; print(s.Popen(["sleep", "600"], start_new_session=True).pid, flush=True); time.sleep(600)'
with exit_codes.ended_by_signals():
    command._train([{sys.executable!r}, "-c", code], Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_training_that_is_to_be_resumed(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINING, str(tmp_path / "log")]) as certify:
        wait_for(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text().endswith("\n"))
        certify.send_signal(number)
        assert certify.wait(timeout=120) == 128 + number
    assert has_ended(int((tmp_path / "log").read_text()))


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
    """Imports, attributes, patches, keywords and methods of a base; what a condition leaves out here counts as there."""
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
    assert names.as_text(names.check_all(library, ("alib",))).endswith("12 names that we use: 6 are not there")
    assert names.check_all(library, ("a_library_that_is_not_installed",)) == []
