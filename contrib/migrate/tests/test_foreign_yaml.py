"""YAML files of verl with invalid references or values."""

from __future__ import annotations

from datetime import date

import pytest

from rlhf_mcore_contrib.migrate.sources import read_tree
from tests.unit.hostile.refusals import refusal


def test_values_that_verl_does_not_have() -> None:
    for data in [{None: 1}, {"train_files": date(2001, 1, 1)}, {"x": {"a"}}]:
        assert "verl itself cannot read" in refusal(read_tree, {"data": data})


def test_the_environment_is_not_written_into_a_migrated_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    found = read_tree({"data": {"root": "${oc.env:SECRET}", "path": "${data.root}/x", "beside": "${.root}"}})
    assert found == {"data.root": "${oc.env:SECRET}", "data.path": "${data.root}/x", "data.beside": "${.root}"}
