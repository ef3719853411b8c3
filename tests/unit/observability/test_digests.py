from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore.observability.files import digest_of_file, digest_of_json, sketch_of_file

SIZE = 4_000_000


def test_the_order_of_keys_does_not_matter() -> None:
    assert (
        digest_of_json({"a": 1, "b": [2]}) == digest_of_json({"b": [2], "a": 1}) != digest_of_json({"a": 1, "b": [3]})
    )


def test_a_file_is_known_by_every_byte(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"a" * SIZE)
    before = digest_of_file(file)
    file.write_bytes(b"a" * (SIZE - 1) + b"b")
    assert digest_of_file(file) != before


@pytest.mark.parametrize("changed", [range(0, SIZE, 5000), range(1), range(SIZE - 3000, SIZE)])
def test_a_sketch_sees_a_change_all_over_and_at_both_ends(tmp_path: Path, changed: range) -> None:
    file, content = tmp_path / "x", bytearray(SIZE)
    file.write_bytes(content)
    before = sketch_of_file(file)
    for place in changed:
        content[place] = 1
    file.write_bytes(content)
    assert sketch_of_file(file) != before
    file.write_bytes(bytes(SIZE))
    assert sketch_of_file(file) == before


def test_a_sketch_of_small_and_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"1")
    assert sketch_of_file(tmp_path / "a") != sketch_of_file(tmp_path / "b")
