"""Count the CUDA operations of an update on tensors without data. The host must not wait more often than the counts below."""

from __future__ import annotations

import json
import sys
from operator import sub
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fake_cuda import guard
from tests.commands import environment, run_command

pytestmark = pytest.mark.skipif(bool(guard.missing()), reason=guard.missing())

# Host syncs and copies between the first forward and the last backward pass of an update: two layers, two microbatches.
BOUNDS = {
    "dense, padded": (0, 1),
    "dense, packed, top_p": (0, 1),
    "critic": (0, 1),
    "tensor parallel 2, adapters": (0, 1),
    "pipeline 2, last stage": (0, 1),
    "gated delta nets, context parallel 2": (0, 1),
    "experts": (0, 1),
    "experts parallel 2": (4, 17),  # sizes of the exchange in each layer and microbatch
}
# Outside the passes: for metrics and for the gradient norm.
BOUND_OF_REST = 2


def _run(directory: Path, *arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    ended = run_command(command, directory, environment(directory), 500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def test_an_update_waits_for_the_device_no_oftener_than_is_known(tmp_path: Path) -> None:
    *lines, last = _run(tmp_path, "benchmarks.device_counts", "--quick").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]
    counted = {name: tuple(int(number) for number in passes.split(", ")[:2]) for name, passes, _ in cells}
    assert counted.keys() == BOUNDS.keys()
    assert max(int(rest.split(", ")[0]) for _, _, rest in cells) <= BOUND_OF_REST
    assert {name: counts for name, counts in counted.items() if max(map(sub, counts, BOUNDS[name])) > 0} == {}
    assert last == f"device_counts host_syncs {sum(syncs for syncs, _ in counted.values())} goal 4"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = _run(tmp_path_factory.mktemp("device"), "tests.processes.mcore.device_program")
    answers: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answers


def test_operations_on_both_devices_are_refused(answers: dict[str, Any]) -> None:
    assert "at least two devices, cuda:0 and cpu" in answers["refused"]


# Host syncs, copies to the device, copies to the host, launches.
COUNTED = {
    "copied from pageable memory": [1, 1, 0, 0],
    "copied from pinned memory": [0, 1, 0, 0],
    "copied and waited for": [1, 1, 0, 0],
    "computed": [0, 0, 0, 1],  # two views and one difference
    "read": [1, 0, 1, 0],
    "backward": [0, 0, 0, 5],  # sum and product; gradients of one, of the product, and of the contiguous sum
    "of a size that the device knows": [1, 0, 0, 0],
    "asked": [1, 0, 0, 2],
}


def test_every_operation_is_counted(answers: dict[str, Any]) -> None:
    assert {what: answers[what] for what in COUNTED} == COUNTED


def test_whole_numbers_that_the_host_has_sent_come_back(answers: dict[str, Any]) -> None:
    assert answers["sizes"] == [24, 40]
    assert answers["on the host"] == [[24, 40], "Tensor"]
