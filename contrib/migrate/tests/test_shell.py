from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.sandbox.run import Level, Limits, Sandbox
from rlhf_mcore_contrib.migrate import shell
from rlhf_mcore_contrib.migrate.shell import named_unknowns, read_script


@pytest.fixture(scope="module")
def one_sandbox() -> Iterator[Sandbox]:
    """Share one sandbox among harmless scripts. Its runs are isolated from each other (tests/processes/sandbox/test_walls.py)."""
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture
def in_one_sandbox(one_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "Sandbox", lambda level: nullcontext(one_sandbox))


LAUNCH = "\npython -m verl.trainer.main_ppo a=$X\n"


def script_words(script: str) -> list[str]:
    """Return the words of the commands ``run`` and ``python``."""
    launches = [words for words in read_script(script).commands if words[0] in ("run", "python")]
    return [named_unknowns(word) for words in launches for word in words]


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
        (": ${A:=5}\nrun $A ${A:+set} ${B:+set}", ["run", "5", "set"]),
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
            ["run", "a=1"],
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
@pytest.mark.usefixtures("in_one_sandbox")
def test_words(script: str, words: list[str]) -> None:
    assert script_words(script) == words


@pytest.mark.parametrize(
    ("script", "words"),
    [
        # a log in a missing directory does not hide a command
        ("run a=1 > $LOGS/x.log 2>&1", ["run", "a=1"]),
        ('run "a > b" c=$C &>> /var/log/x/y.log &', ["run", "a > b", "c=${oc.env:C,C_is_not_set}"]),
        ("for i in 1 2; do run $i; done > $LOGS/x", ["run", "1", "run", "2"]),
        # an unset variable is a mark for one command, and empty in tests
        ("A=$B/c\n[[ -z $B ]] && run $A ${B:-d}", ["run", "${oc.env:B,B_is_not_set}/c", "d"]),
        ('A=$B\nif [ -z "$A" ]; then run $A; fi', ["run", "${oc.env:B,B_is_not_set}"]),
        ("export P=$P:/x\nrun $P", ["run", "${oc.env:P,P_is_not_set}:/x"]),
        (
            "N=$1\nrun $N $((N * 2)) $((M + 1))",
            ["run", "argument_1_is_not_known", "N_2_is_not_known", "M_1_is_not_known"],
        ),
        ("run ${A##*/} ${A%/} ${A:?set it}", ["run", *3 * ["${oc.env:A,A_is_not_set}"]]),
        ("run $(nvidia-smi | wc -l) $(echo a b | tr ' ' _)", ["run", "nvidia_smi_is_not_known", "a_b"]),
        # the directory of the script is the start directory
        ('D=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)\nrun $D/x', ["run", "./x"]),
        # a script that finds something missing continues; a script that exits with 0 ends
        ("[ $# -lt 2 ] && exit 1\nrun a", ["run", "a"]),
        ("set -eu\ngrep x y\nfalse\nrun $A", ["run", "${oc.env:A,A_is_not_set}"]),
        ("run a\nexit 0\nrun b", ["run", "a"]),
        ("nohup /opt/x/python -m verl.trainer.main_ppo a=1 &\nrun b", ["run", "b"]),
        ("MODEL=<YOUR_MODEL>\nrun $MODEL", ["run", "<YOUR_MODEL>"]),
    ],
)
@pytest.mark.usefixtures("in_one_sandbox")
def test_what_only_the_machine_of_the_user_knows(script: str, words: list[str]) -> None:
    assert script_words(script) == words


def test_a_script_that_a_script_writes() -> None:
    script = "cat > $D/job.sh <<EOF\npython -m verl.trainer.main_ppo a=$A b=\\$B\nEOF\nsbatch $D/job.sh"
    unset = "${oc.env:%s,%s_is_not_set}"
    assert script_words(script)[-2:] == [f"a={unset % ('A', 'A')}", f"b={unset % ('B', 'B')}"]


def test_a_program_with_a_directory_is_read() -> None:
    ways = ["/usr/bin/python3", "$VENV/bin/python", "exec python", "nohup timeout 3 python", "env A=1 python"]
    for way in ways:
        (words,) = [words for words in read_script(f"{way} -m verl.trainer.main_ppo a=1").commands if "a=1" in words]
        assert words[-3:] == ["-m", "verl.trainer.main_ppo", "a=1"]


def test_what_was_decided_is_reported() -> None:
    script = """A=1
if [ "$A" = 2 ]; then
  run a=3
fi
source env.sh
run $(date +%s)
"""
    assert sorted(read_script(script).notes) == [
        'line 3: not taken, because bash ran with no variable set (if [ "$A" = 2 ]; then): run a=3',
        "line 5: source env.sh: the other file is not read; put what it sets into the script",
        "line 6: the output of `date +%s` is not known, because no command is run",
    ]


def test_a_mistake_of_the_script_is_named_with_its_line() -> None:
    script = read_script("run a=1\nrun 'b\n")
    assert [words for words in script.commands if words[0] == "run"] == [["run", "a=1"]]
    assert len(script.notes) == 1 and "line 2" in script.notes[0]


def test_a_loop_that_waits_ends() -> None:
    assert script_words("while true; do sleep 1; done\nuntil ray status; do sleep 5; done\nrun a=1") == ["run", "a=1"]


# ---------------------------------------------------------------------------------------------------- hostile scripts
@pytest.fixture(params=["namespaces", "filters"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts with the requested isolation and a short time limit."""
    level = shell.machine_level()
    if not level.reaches(request.param) or (request.param == "filters" and os.geteuid() == 0):
        pytest.skip(f"this machine does not give {request.param}")
    monkeypatch.setattr(shell, "machine_level", lambda: Level(request.param, ()))
    limits = Limits(cpu_s=1, wall_s=4, memory_bytes=2**28, scratch_bytes=2**22, output_bytes=2**20, processes=32)
    monkeypatch.setattr(shell, "LIMITS", limits)


@pytest.mark.parametrize(
    "hostile",
    [
        "rm -rf {0}",
        "/bin/rm -rf {0}; /usr/bin/rm -rf {0}; command -p rm -rf {0}",
        "trap - DEBUG; unset -f rm; export PATH=/bin:/usr/bin; rm -rf {0}",
        "(exec /bin/rm -rf {0})",
        "echo dead > {0}/canary; echo x > {0}/new; : >> {0}/canary; mv {0}/canary x; ln -sf /dev/null {0}/canary",
        "{1} -c 'import os; os.unlink(\"{0}/canary\")'; sed -i s/alive/dead/ {0}/canary",
        "awk 'BEGIN {{ system(\"rm -rf {0}\") }}' x; find {0} -delete; /usr/bin/find {0} -delete",
        "(/usr/bin/setsid /bin/bash -c 'sleep 1; /bin/sleep 1; rm -rf {0}' &)",
        "kill -9 -1; kill -9 {2}; kill -9 1",
        "echo x > /dev/tcp/127.0.0.1/{3}; exec 5<>/dev/tcp/127.0.0.1/{3}",
    ],
)
@pytest.mark.usefixtures("isolation")
def test_a_script_cannot_touch_what_is_not_its_own(hostile: str, tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("alive")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        script = hostile.format(tmp_path, "/usr/bin/python3", os.getpid(), server.getsockname()[1])
        try:
            words = read_script(f"X=1\n{script}{LAUNCH}").commands
        except ConfigError:  # the script has killed its reader, before or after the first word was read
            words = []
        with pytest.raises(BlockingIOError):
            server.accept()
    assert ["python", "-m", "verl.trainer.main_ppo", "a=1"] in words or "kill" in hostile
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"canary": "alive"}


@pytest.mark.usefixtures("isolation")
def test_a_script_cannot_read_what_it_might_print(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sesame")
    script = f"run a=$(cat {tmp_path}/secret) b=$(< {tmp_path}/secret) c=$(< /proc/{os.getpid()}/environ)"
    assert script_words(script) == ["run", "a=", "b=", "c="]


@pytest.mark.parametrize(
    "hostile",
    [
        ":(){ :|:& };:",
        "trap - DEBUG; set +x; trap '' TERM INT HUP; while :; do :; done",
        "trap - DEBUG; set +x; while :; do printf '%01000000d' 0 >&98; done",
        "A=xxxxxxxxxxxxxxxx; while :; do A=$A$A$A$A; done",
        "f() { f; }; f",
    ],
)
@pytest.mark.usefixtures("isolation")
def test_a_script_is_stopped_and_what_it_started_before_is_read(hostile: str) -> None:
    assert ["run", "a=1"] in read_script(f"X=1\nrun a=$X\n{hostile}{LAUNCH}").commands


# ------------------------------------------------------------------------------------------ machines without isolation
def test_without_isolation_a_script_with_variables_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shell, "machine_level", lambda: Level("rlimits", ("rlimits",), ("filters: no Landlock",)))
    with pytest.raises(
        ConfigError, match=r"rlimits; filters: no Landlock.*Landlock.*bash -x SCRIPT.*--cfg job --resolve"
    ):
        read_script(f"touch {tmp_path}/x\nrun $A")
    assert list(tmp_path.iterdir()) == []


def test_without_isolation_a_script_without_variables_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "machine_level", lambda: Level("none", ()))
    assert read_script("# x\nrun a=1 \\\n  'b c'  # d\n+ run e") == shell.Script(
        [[], ["run", "a=1", "b c"], ["+", "run", "e"]]
    )
    with pytest.raises(ConfigError, match="No closing quotation"):
        read_script("run 'a")
