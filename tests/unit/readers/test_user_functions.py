"""Functions of a user's own files: recognised, checked without being run, loaded."""

from __future__ import annotations

import sys
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.user_functions import function_problems, is_file_spec, load_function
from tests.messages import expect_error


def test_what_names_a_file() -> None:
    assert [is_file_spec(text) for text in ("a/b.py:f", "b.py", "grpo", "")] == [True, True, False, False]


def test_checking_does_not_run_the_file(workspace: Any) -> None:
    workspace.write("mine.py", "import os\nraise SystemExit\ndef f(): ...\ng = f\nclass H: ...\n")
    for name in ("f", "g", "H", "os"):
        assert list(function_problems(f"mine.py:{name}", "some.key")) == []
    (problem,) = function_problems("mine.py:x", "some.key")
    assert problem == "some.key=mine.py:x: mine.py does not define x; it defines: H, f, g"


def test_forms_that_are_no_file_and_name() -> None:
    for spec in ["mine.py", "mine:f", "mine.txt:f", "mine.py:", "mine.py:a-b", ":f"]:
        (problem,) = function_problems(spec, "some.key")
        assert problem == f"some.key={spec} is not of the form path/to/file.py:name"


def test_loading_shadows_nothing_and_names_the_key(workspace: Any) -> None:
    workspace.write(
        "json.py",
        "from dataclasses import dataclass\n\n@dataclass\nclass A:\n    x: 'int' = 1\n\ndef f(): return A().x\n",
    )
    before = sys.modules.get("json")
    assert load_function("json.py:f", "some.key")() == 1
    assert sys.modules.get("json") is before
    workspace.write("broken.py", "1 / 0\n")
    loaded = set(sys.modules)
    with expect_error(ConfigError, field="some.key", value=("'broken.py:f'", "ZeroDivisionError"), remedy="correct"):
        load_function("broken.py:f", "some.key")
    assert set(sys.modules) == loaded
