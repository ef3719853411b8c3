from __future__ import annotations

import pytest

from rlhf_mcore.config.migration.shell import script_words


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run a=1 b='2 3'", ["run", "a=1", "b=2 3"]),
        ("run \\\n  a=1 \\\n  b=2", ["run", "a=1", "b=2"]),
        ("# run x\nrun a=1  # not this", ["run", "a=1"]),
        ("run a=1 \\\n  # b=2 \\\n  c=3", ["run", "a=1", "c=3"]),
        ("N=4\nrun a=$N b=${N}", ["run", "a=4", "b=4"]),
        ("export N=4\nrun a=${N:-7} b=${M:-7}", ["run", "a=4", "b=7"]),
        ("D=/data\nF=\"['$D/a', '$D/b']\"\nrun f=\"$F\"", ["run", "f=['/data/a', '/data/b']"]),
        ("run f=$HOME/x", ["run", "f=${oc.env:HOME}/x"]),
        ("ARGS=(\n  --a 1\n  # --b 2\n  --c\n)\nrun ${ARGS[@]} $@", ["run", "--a", "1", "--c"]),
        ("A=(x)\nA+=(y z)\nrun ${A[@]}", ["run", "x", "y", "z"]),
        ("OMP=1 run a=1", ["OMP=1", "run", "a=1"]),
        ("run a='one\ntwo' b=1", ["run", "a=one\ntwo", "b=1"]),
    ],
)
def test_words(script: str, words: list[str]) -> None:
    assert script_words(script) == words


def test_nothing_is_run(tmp_path: object) -> None:
    assert script_words(f"touch {tmp_path}/x\nA=$(touch {tmp_path}/y)\n`touch {tmp_path}/z`")
    assert list(tmp_path.iterdir()) == []  # type: ignore[attr-defined]


def test_a_quotation_that_never_ends() -> None:
    assert "a=1" in script_words("run a=1 'b")
