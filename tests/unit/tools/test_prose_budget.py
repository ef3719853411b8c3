"""The count of prose faults, its budget, and the hook for commit messages."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tools import prose_budget
from tools.prose_budget import BUDGET, ROOT, faults, find_faults, texts_of


def test_prose_faults_stay_within_the_budget() -> None:
    counts = Counter(text.surface for text, _ in find_faults())
    over = {name: (counts[name], most) for name, most in json.loads(BUDGET.read_text()).items() if counts[name] > most}
    assert over == {}, "see .venv/bin/python tools/prose_budget.py --list SURFACE; CONTRIBUTING.md has the rules"


@pytest.mark.parametrize(
    ("surface", "text", "found"),
    [
        ("page", "None where it is not installed.", ["where instead of if"]),
        ("page", "None if it is not installed.", []),
        ("docstring", "A message of what has changed.", ["what as a noun"]),
        ("docstring", "What a rank sends.", ["what as a noun", "pronoun first"]),
        ("comment", "copied every so many steps", ["so many"]),
        ("message", "it is drawn by nobody", ["draw", "negated noun"]),
        ("page", "`those of` in code is not prose.", []),
        ("page", "word " * 36, ["long sentence"]),
        ("name", "merged", ["participle as a name"]),
        ("name", "merge_weights", []),
    ],
)
def test_faults_are_found_by_surface(surface: str, text: str, found: list[str]) -> None:
    assert sorted(faults(surface, text)) == sorted(found)


def test_prose_of_a_module_and_a_page_is_read() -> None:
    module = '"""Docstring."""\nraise ValueError(f"a long message of {x}")  # comment\ndef name(): pass\n'
    assert [(text.surface, text.line) for text in texts_of("a.py", module)] == [
        ("docstring", 1),
        ("name", 3),
        ("message", 2),
        ("comment", 2),
    ]
    page = "# Title\n\nA paragraph\nof two lines.\n\n```python\ncode\n```\n\n| a | b |\n|---|---|\n- item\n"
    assert [text.line for text in texts_of("a.md", page)] == [3, 10, 12]


def test_lower_only_lowers_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "budget.json").write_text('{"docstring": 5, "page": 0}')
    text = next(texts_of("a.md", "None where it is not installed."))
    monkeypatch.setattr(prose_budget, "BUDGET", tmp_path / "budget.json")
    monkeypatch.setattr(prose_budget, "find_faults", lambda: [(text, "where instead of if")])
    monkeypatch.setattr("sys.argv", ["prose_budget", "--lower"])
    assert prose_budget.main() == 1
    assert json.loads((tmp_path / "budget.json").read_text()) == {"docstring": 0, "page": 0}


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("Subject\n\nBody\n# a comment of git\n", 0),
        (f"{'x' * 73}\n", 1),
        ("Subject\nBody\n", 1),
        (f"Merge {'x' * 80}\n", 0),
    ],
)
def test_commit_hook_checks_subject_and_blank_line(tmp_path: Path, message: str, code: int) -> None:
    (tmp_path / "message").write_text(message)
    done = subprocess.run([ROOT / "launch" / "commit-msg", tmp_path / "message"], capture_output=True, text=True)
    assert (done.returncode, bool(done.stderr)) == (code, bool(code))
