"""Tasks for containers: rows, directories of Harbor and Terminal-Bench, Dockerfiles without Docker, and rejected tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow import parquet

from rlhf_mcore.commands.prepare_data import command as prepare_data
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.task import Task, TaskTests, task_of
from rlhf_mcore_contrib.containers.dockerfiles import without_docker
from rlhf_mcore_contrib.containers.folders import instruction_of, read_folder
from rlhf_mcore_contrib.containers.recipe import software_task
from rlhf_mcore_contrib.containers.wire import task_from_json, task_to_json

HARBOR = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 120.0
env = { MODE = "strict" }
[agent]
timeout_sec = 120.0
[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 2048
"""
TERMINAL = """
instruction: |-
  Write hello.txt.
difficulty: easy
parser_name: pytest
max_agent_timeout_sec: 360.0
max_test_timeout_sec: 60.0
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def harbor(tmp_path: Path) -> Path:
    return write(
        tmp_path / "harbor",
        task_DOT_toml=HARBOR,
        instruction_DOT_md="Make the tests pass.\n",
        environment__Dockerfile="FROM python:3.11-slim\nWORKDIR /app\nCOPY code/ .\n",
        environment__code__calc_DOT_py="x = 1\n",
        tests__test_DOT_sh="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
        tests__sub__data_DOT_txt="7",
        solution__solve_DOT_sh="secret",
    )


@pytest.fixture
def terminal(tmp_path: Path) -> Path:
    return write(
        tmp_path / "terminal",
        task_DOT_yaml=TERMINAL,
        Dockerfile="FROM ubuntu:24.04\n",
        run_tests="",
        tests__test_outputs_DOT_py="def test(): pass\n",
        solution_DOT_sh="secret",
        docker_compose="",
    )


def test_a_directory_of_harbor(harbor: Path) -> None:
    task = read_folder(str(harbor))
    assert task.context == {
        "Dockerfile": b"FROM python:3.11-slim\nWORKDIR /app\nCOPY code/ .\n",
        "code/calc.py": b"x = 1\n",
    }
    assert task.tests == TaskTests(
        "bash /tests/test.sh",
        {"/tests/test.sh": b"#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n", "/tests/sub/data.txt": b"7"},
        {"MODE": "strict"},
        120.0,
        needs_file=True,
    )
    assert instruction_of(harbor) == "Make the tests pass."
    assert "secret" not in repr(task)


def test_a_directory_of_terminal_bench(terminal: Path) -> None:
    (terminal / "run_tests").rename(terminal / "run-tests.sh")
    (terminal / "run-tests.sh").write_text("pytest $TEST_DIR/test_outputs.py")
    (terminal / "docker_compose").rename(terminal / "docker-compose.yaml")
    (terminal / "docker-compose.yaml").write_text("services: {client: {build: {dockerfile: Dockerfile}}}")
    task = read_folder(str(terminal))
    assert task.context == {"Dockerfile": b"FROM ubuntu:24.04\n"} and instruction_of(terminal) == "Write hello.txt."
    assert task.tests is not None and task.tests.timeout_s == 60.0 and task.tests.env == {"TEST_DIR": "/tests"}
    assert task.tests.command == "bash /tests/run-tests.sh" and not task.tests.needs_file
    assert sorted(task.tests.files) == ["/tests/run-tests.sh", "/tests/test_outputs.py"]
    (terminal / "docker-compose.yaml").write_text("services: {client: {}, database: {}}")
    with pytest.raises(ConfigError, match="tasks with several containers are not supported"):
        read_folder(str(terminal))


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("[agent]", "[agent]\nuser = 'me'", "tasks with other users"),
        ("strict", "${SECRET}", "MODE is a variable of the host, which containers do not see"),
        ("version =", "version", "cannot be read"),
    ],
)
def test_what_a_directory_asks_for_and_there_is_not(harbor: Path, before: str, after: str, problem: str) -> None:
    (harbor / "task.toml").write_text(HARBOR.replace(before, after))
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        read_folder(str(harbor))


def test_directories_that_are_no_tasks(harbor: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a task directory"):
        read_folder(str(tmp_path))
    (harbor / "steps").mkdir()
    with pytest.raises(ConfigError, match="tasks with several steps are not supported"):
        read_folder(str(harbor))
    (harbor / "steps").rmdir()
    (harbor / "environment" / "Dockerfile").unlink()
    with pytest.raises(ConfigError, match="it has neither an image nor a Dockerfile"):
        read_folder(str(harbor))


def test_a_dockerfile_without_docker() -> None:
    text = (
        "# syntax=docker\nFROM python:3.11\nENV A=1 B='two words'\nWORKDIR /app\nCOPY calc.py data/ ./\n"
        'RUN echo one && \\\n    echo two\nWORKDIR sub\nADD calc.py other.py\nCMD ["python"]\n'
    )
    context = {"Dockerfile": text.encode(), "calc.py": b"c", "data/x": b"x", "data/deep/y": b"y"}
    task = without_docker(Task(context=context, files={"last": b"l"}, setup=("mine",)))
    assert task.files == {
        "/app/calc.py": b"c",
        "/app/x": b"x",
        "/app/deep/y": b"y",
        "/app/sub/other.py": b"c",
        "last": b"l",
    }
    assert (task.workdir, task.env, task.context) == ("/app/sub", {"A": "1", "B": "two words"}, {})
    assert task.setup == (
        "mkdir -p /app",
        "cd /app && echo one &&      echo two",
        "mkdir -p /app/sub",
        "mine",
    )
    for line in ("USER me", "COPY --from=x a b", "COPY missing ."):
        with pytest.raises(ConfigError):
            without_docker(Task(context={"Dockerfile": f"FROM x\n{line}\n".encode()}))
    with pytest.raises(ConfigError, match="several stages"):
        without_docker(Task(context={"Dockerfile": b"FROM x\nFROM y\n"}))


def test_a_row_names_a_directory_and_its_other_fields_win(harbor: Path) -> None:
    changed = task_of({"container": {"folder": str(harbor), "setup": ["more"], "workdir": None}})
    assert changed.setup == ("more",) and changed.context == read_folder(str(harbor)).context
    with pytest.raises(ConfigError, match="is not a task directory"):
        task_of({"container": {"folder": "no-such-folder"}})


def test_a_task_goes_to_a_service_without_its_tests() -> None:
    task = Task("img", {"Dockerfile": b"FROM x"}, "/w", {"A": "b"}, {"a": b"text"}, ("one",))
    sent = json.loads(json.dumps(task_to_json(replace(task, tests=TaskTests("x")))))
    assert task_from_json(sent) == task


def test_software_rows() -> None:
    row = {
        "image_name": "swe/x:1",
        "problem_statement": "It fails.",
        "test_patch": "diff",
        "FAIL_TO_PASS": '["t.py::a b"]',
        "PASS_TO_PASS": ["t.py::c"],
        "workdir": "/testbed",
    }
    assert software_task(row) == {
        "image": "swe/x:1",
        "workdir": "/testbed",
        "tests": {
            "command": "git apply /tests/tests.patch && python -m pytest -q 't.py::a b' t.py::c",
            "files": {"/tests/tests.patch": "diff"},
        },
    }
    assert software_task({"image": "x", "setup": "make", "tests": ["a", "b"]}) == {
        "image": "x",
        "setup": "make",
        "tests": {"command": "a && b", "files": None},
    }
    assert software_task({"image": "x"}) is None


def test_prepare_data_makes_rows_of_tasks(harbor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_data.main([str(tmp_path), "--out", str(tmp_path / "out"), "--eval-share", "0"]) == 0
    [row] = parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["prompt"] == [{"role": "user", "content": "Make the tests pass."}] and row["data_source"] == "tasks"
    assert row["extra_info"]["task"] == "harbor" and task_of(row["extra_info"]) == read_folder(str(harbor))
    rows = tmp_path / "rows.jsonl"
    one = {"instance_id": "a-1", "image": "x", "problem_statement": "It fails.", "test_command": "make test"}
    rows.write_text(json.dumps(one) + "\n")
    assert prepare_data.main([str(rows), "--out", str(tmp_path / "more"), "--eval-share", "0"]) == 0
    [row] = parquet.read_table(tmp_path / "more" / "train.parquet").to_pylist()
    assert task_of(row["extra_info"]) == Task("x", tests=TaskTests("make test")) and row["extra_info"]["task"] == "a-1"
    rows.write_text(json.dumps({"test_patch": "x", "problem_statement": "y"}) + "\n")
    assert prepare_data.main([str(rows), "--out", str(tmp_path / "bad")]) == 2
    assert "it has no tests: tests, test_command" in capsys.readouterr().err
