from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.commands.evaluate.results import EvaluationDirectory, PartFile, Sample
from rlhf_mcore.config.errors import ConfigError
from tests.messages import expect_error

SETTINGS = {"data": ["a"], "sampling": {"n": 2}}


def records(index: int) -> list[Sample]:
    return [{"index": index, "sample": k, "score": index + k / 10} for k in range(2)]


def reopen(path: Path) -> list[tuple[int, int]]:
    directory = EvaluationDirectory(path, SETTINGS)
    try:
        return [(sample["index"], sample["sample"]) for sample in directory.samples()]
    finally:
        directory.close()


@pytest.fixture
def half_done(tmp_path: Path) -> Path:
    """Two engines have kept prompts 0, 2 and 1."""
    EvaluationDirectory(tmp_path, SETTINGS).close()
    for engine, batches in ((0, [[0, 2]]), (1, [[1]])):
        part = PartFile(tmp_path, engine, 2)
        for batch in batches:
            part.append([sample for index in batch for sample in records(index)])
        part.close()
    return tmp_path


def test_what_was_kept_is_found_again_in_order(half_done: Path) -> None:
    assert reopen(half_done) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_short_is_removed(half_done: Path, cut: int) -> None:
    part = half_done / "parts" / "engine-00000-of-00002.jsonl"
    part.write_bytes(part.read_bytes()[:-cut])
    assert reopen(half_done) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    PartFile(half_done, 0, 2).append(records(2))
    assert reopen(half_done) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_another_number_of_engines_goes_on_too(half_done: Path) -> None:
    PartFile(half_done, 0, 1).append(records(3))
    assert reopen(half_done)[-1] == (3, 1)


def test_finished_it_has_samples_and_results_and_no_parts(half_done: Path) -> None:
    directory = EvaluationDirectory(half_done, SETTINGS)
    directory.finish(directory.samples(), {"results": {"all": 1.5}})
    directory.close()
    samples = [json.loads(line) for line in (half_done / "samples.jsonl").read_text().splitlines()]
    assert samples == [record for index in range(3) for record in records(index)]
    assert json.loads((half_done / "results.json").read_text()) == {"results": {"all": 1.5}}
    assert not (half_done / "parts").exists()
    assert reopen(half_done) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_killed_between_the_two_files_of_the_end_nothing_counts_twice(half_done: Path) -> None:
    directory = EvaluationDirectory(half_done, SETTINGS)
    (half_done / "samples.jsonl").write_bytes(
        b"".join(json.dumps(sample).encode() + b"\n" for sample in directory.samples())
    )
    directory.close()
    assert len(reopen(half_done)) == 6


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"data": ["b"], "sampling": {"n": 2}}, "another data"),
        ({"data": ["a"], "sampling": {"n": 3}}, "another sampling"),
        ({"data": ["b"]}, "another data and another sampling"),
    ],
)
def test_another_evaluation_may_not_go_on_here(half_done: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}; choose another evaluate.output_dir"):
        EvaluationDirectory(half_done, settings)
    assert len(reopen(half_done)) == 6, "one that was refused holds no lock"


def test_two_jobs_may_not_share_it(tmp_path: Path) -> None:
    holder = EvaluationDirectory(tmp_path, SETTINGS)
    with expect_error(ConfigError, field="evaluate.output_dir", remedy=("wait", "change")):
        EvaluationDirectory(tmp_path, SETTINGS)
    holder.close()
    EvaluationDirectory(tmp_path, SETTINGS).close()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with expect_error(ConfigError, field="evaluate.output_dir", value="Not a directory", remedy="set"):
        EvaluationDirectory(tmp_path / "file" / "inside", SETTINGS)


def test_a_broken_line_is_named(half_done: Path) -> None:
    part = half_done / "parts" / "engine-00001-of-00002.jsonl"
    part.write_text('{"samples": [}\n')
    with expect_error(
        ConfigError, field="engine-00001-of-00002.jsonl", value=1, remedy=("remove", "evaluate.output_dir")
    ):
        reopen(half_done)
