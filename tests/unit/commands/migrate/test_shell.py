from __future__ import annotations

import pytest

from rlhf_mcore.commands.migrate.shell import read_script
from rlhf_mcore.commands.migrate.shell_words import named_unknowns
from rlhf_mcore.config.errors import ConfigError


def script_words(script: str) -> list[str]:
    return [named_unknowns(word) for word in read_script(script).words]


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
        ("OMP=1 run a=1", ["run", "a=1"]),
        ("run a='one\ntwo' b=1", ["run", "a=one\ntwo", "b=1"]),
        # defaults
        ("run ${A:-${B:-3}} ${C-x}", ["run", "3", "x"]),
        ("run ${A:-${B}}", ["run", "${oc.env:B,B_is_not_set}"]),
        (": ${A:=5}\nrun $A ${A:+set} ${B:+set}", [":", "5", "run", "5", "set"]),
        ("run ${1:-first} ${2}", ["run", "first", "argument_2_is_not_known"]),
        # quoting and splitting
        ('A="1 2"\nrun $A "$A" \'$A\' "\\$A"', ["run", "1", "2", "1 2", "$A", "$A"]),
        ('A="x  y"\nrun pre$A.post', ["run", "prex", "y.post"]),
        ('A=(1 "2 3")\nrun "${A[@]}" "${A[*]}" ${#A[@]} ${A[1]}', ["run", "1", "2 3", "1 2 3", "2", "2", "3"]),
        ("declare -A M=([a]=1 [b]=2)\nrun ${M[b]}", ["run", "2"]),
        ("run $'a\\tb' a\\ b", ["run", "a\tb", "a b"]),
        ('A="1 2" B=3\nC="$A $B  ${B}\n $((B + 1)) $(echo 5)"\nrun "$C"', ["run", "1 2 3  3\n 4 5"]),
        # pieces of values
        (
            "A=a/b/c.tar.gz\nrun ${A##*/} ${A%%.*} ${A%.*} ${A#*/} ${A/b/x} ${A:0:3} ${A^^}",
            ["run", "c.tar.gz", "a/b/c", "a/b/c.tar", "b/c.tar.gz", "a/x/c.tar.gz", "a/b", "A/B/C.TAR.GZ"],
        ),
        ("A=3\nrun $((A * 2 + 1)) $((7 / 2)) $((A > 2 ? 10 : 20)) $((2 ** 10))", ["run", "7", "3", "10", "1024"]),
        ("run $((1 + $(nproc)))", ["run", "1_nproc_is_not_known"]),
        ("run $(basename /a/b.sh .sh) $(dirname a/b) $(echo x y) $(pwd)", ["run", "b", "a", "x", "y", "."]),
        # branches, loops, functions
        ('if [ -z "$X" ]; then A=1; else A=2; fi\nrun $A', ["run", "1"]),
        (
            'A=2\nif [[ $A == 1 ]]; then B=1; elif [[ "$A" -ge 2 && -n $A ]]; then B=2; else B=3; fi\nrun $B',
            ["run", "2"],
        ),
        ('[ "$1" = debug ] && A=1 || A=2\nrun $A', ["run", "2"]),
        ("A=big\ncase $A in small|tiny) B=1;; b*) B=2;; *) B=3;; esac\nrun $B", ["run", "2"]),
        ("for i in 1 2; do run $i; done", ["run", "1", "run", "2"]),
        ("for ((i = 0; i < 2; i++)); do run $i; done", ["run", "0", "run", "1"]),
        ("while [[ $# -gt 0 ]]; do case $1 in -n) N=$2; shift 2;; esac; done\nrun ${N:-4}", ["run", "4"]),
        ("f() {\n  local x=$1\n  shift\n  run $x $@\n}\nf a b c", ["run", "a", "b", "c"]),
        (
            "set -x; set -euo pipefail\nrun a=1 2>&1 | tee log",
            ["set", "-x", "set", "-euo", "pipefail", "run", "a=1", "tee", "log"],
        ),
        # scripts in words
        (
            "read -r -d '' C <<EOF\n-m openrlhf.cli.train_sft \\\n  --a $HOME\nEOF\nrun $C",
            ["run", "-m", "openrlhf.cli.train_sft", "--a", "${oc.env:HOME}"],
        ),
        ("C=$(cat <<'EOF'\na=1 $B\nEOF\n)\nrun $C", ["run", "a=1", "$B"]),
        (
            "srun --x bash -c 'A=1; python -m verl.trainer.main_ppo a=$A'",
            ["python", "-m", "verl.trainer.main_ppo", "a=1"],
        ),
        ("bash <<EOF\npython -m verl.trainer.main_ppo a=1\nEOF", ["python", "-m", "verl.trainer.main_ppo", "a=1"]),
        ('C="python -m verl.trainer.main_ppo a=1"\neval "$C"', ["python", "-m", "verl.trainer.main_ppo", "a=1"]),
    ],
)
def test_words(script: str, words: list[str]) -> None:
    assert script_words(script) == words


def test_nothing_is_run(tmp_path: object) -> None:
    assert script_words(f"touch {tmp_path}/x\nA=$(touch {tmp_path}/y)\n`touch {tmp_path}/z`")
    assert list(tmp_path.iterdir()) == []  # type: ignore[attr-defined]


def test_a_quotation_that_never_ends() -> None:
    assert "a=1" in script_words("run a=1 'b")


def test_what_was_decided_is_reported() -> None:
    script = """A=1
if [ "$A" = 2 ]; then
  run a=3
fi
source env.sh
run $(date +%s)
"""
    assert read_script(script).notes == [
        'line 3: not taken, as a shell with nothing set decides ([ "$A" = 2 ] ;): run a=3',
        "line 5: source env.sh: the other file is not read; put what it sets into the script",
        "line 6: the output of $(date +%s) is not known: nothing is run",
    ]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("A=xxxxxxxxxxxxxxxx\n" + "A=$A$A$A$A\n" * 20, "more than 65536 characters"),
        ("f() { f; }\nf", "calls itself"),
        ("for i in 1 2 3 4 5 6 7 8 9; do " * 6 + "A=1" + "; done" * 6, "steps"),
        ("for i in 1 2 3 4 5 6 7 8 9; do " * 4 + "run" + "; done" * 4, "commands"),
        ("run " + "${A:-" * 5000 + "}" * 5000, "nested too deeply"),
        ("#" * (1 << 20) + "#", "1048576 characters"),
    ],
)
def test_scripts_that_never_end_are_refused(script: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_script(script)


def test_a_loop_that_waits_ends() -> None:
    assert script_words("while true; do sleep 1; done\nrun a=1")[-2:] == ["run", "a=1"]
