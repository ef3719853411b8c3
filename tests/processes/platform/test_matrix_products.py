"""MKL's mode is chosen before its first product, in every way in which a process becomes a rank or an engine on a CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, finished

BRANCH_OFF, AUTO, COMPATIBLE = 1, 2, 3  # mkl_types.h
MODE = """
import ctypes, os, torch
mkl = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
"""
PRINTED = 'print("mode", mkl.mkl_serv_cbwr_get(-1))\n'
RANK = """
from datetime import timedelta
from rlhf_mcore.cli import rank
from rlhf_mcore.config.schema import Config
with rank.in_world(Config(deterministic=True), timedelta(seconds=60)):
    torch.ones(2, 2) @ torch.ones(2, 2)
"""
PRELOADED = f"""
import sys
from rlhf_mcore.cli import forked_ranks
assert forked_ranks.preload("rlhf_mcore.cli.train", [{str(ROOT / "configs/quickstart/grpo.yaml")!r}])
"""
# What a training computes, of operands at each place of a float in the alignment that kernels look at (64 bytes).
AT_EVERY_OFFSET = """
import torch
import torch.nn.functional as F

def at(tensor, offset):
    place = torch.empty(tensor.numel() + 64)[offset : offset + tensor.numel()].view(tensor.shape)
    return place.copy_(tensor)

def results(x, weight, gradient, offset):
    x, weight, gradient = at(x, offset), at(weight, 5 * offset % 17), at(gradient, 3 * offset % 17)
    heads = x.view(1, x.shape[0], 2, -1).transpose(1, 2)
    return (x @ weight.T, gradient.T @ x, gradient @ weight, F.rms_norm(x, x.shape[1:]), torch.logsumexp(gradient, -1), x.norm(),
        F.silu(x), F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))

torch.manual_seed(0)
for rows, inner, outer in [(1, 32, 97), (7, 64, 96), (37, 34, 65), (64, 256, 1000)]:
    operands = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(rows, outer)
    first = results(*operands, 0)
    for offset in range(1, 17):
        for place, (one, other) in enumerate(zip(first, results(*operands, offset), strict=True)):
            assert torch.equal(one, other), (rows, inner, outer, offset, place)
print("equal")
"""
# In a fork for each mode and each processor's kernels: both are read at a process's first product, and torch is imported once.
IN_FORKS = f"""
import ctypes, os, sys, torch, torch.nn.functional
{MODE.strip()}
for choice in sys.argv[1:]:
    if not (child := os.fork()):
        os.environ["MKL_CBWR"], kernels = choice.split(",")
        if kernels:
            os.environ["ATEN_CPU_CAPABILITY"] = kernels
        print(choice)
        exec({AT_EVERY_OFFSET!r})
        print(mkl.mkl_serv_cbwr_get(-1), torch.backends.cpu.get_cpu_capability(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, choice
"""
# The body of a Ray actor, in this process: nobody else is in its engine, whose model is not there.
ENGINE = """
from rlhf_mcore.parallel.addresses import listener
from rlhf_mcore.rollout.remote.host import EngineHost, EngineOrder, Meeting
host = EngineHost()
host._listening = listener("127.0.0.1")
try:
    host._build(EngineOrder(None, None, None), Meeting("127.0.0.1", host._listening.getsockname()[1], 0, 1), 1)
except AttributeError:
    torch.ones(2, 2) @ torch.ones(2, 2)
"""


def run(code: str, directory: Path, *arguments: str, **variables: str) -> tuple[list[str], str]:
    """What a fresh process prints. Its environment has no MKL_CBWR but the one given."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
    world["MASTER_PORT"] = "29731"
    ended = finished(
        [sys.executable, "-W", "ignore", "-c", code, *arguments], directory, {**environment, **world, **variables}, 500
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split(), ended.stderr


@pytest.fixture(scope="module", autouse=True)
def has_mkl() -> None:
    import torch

    if not torch.backends.mkl.is_available():
        pytest.skip("this torch multiplies without MKL")


@pytest.mark.parametrize("start", [RANK, PRELOADED + RANK, ENGINE], ids=["own torchrun", "forked rank", "Ray engine"])
def test_products_do_not_depend_on_alignment(tmp_path: Path, start: str) -> None:
    printed, warned = run(MODE + start + PRINTED, tmp_path)
    assert printed == ["mode", str(AUTO)]
    assert "warning" not in warned


def test_results_are_equal_wherever_their_operands_are(tmp_path: Path) -> None:
    """Kernels that look at alignment take other paths for the first elements. The kernels of other processors are among them."""
    modes = {"AUTO": AUTO, "COMPATIBLE": COMPATIBLE}
    choices = [f"{mode},{kernels}" for mode in modes for kernels in ("", "avx2", "default")]
    printed = iter(run(IN_FORKS, tmp_path, *choices, OMP_NUM_THREADS="1")[0])
    for choice, *words in zip(printed, printed, printed, printed, strict=True):
        mode, kernels = choices.pop(0).split(",")
        assert [choice, *words[:2]] == [f"{mode},{kernels}", "equal", str(modes[mode])]
        assert words[2].lower() == kernels or not kernels
    assert not choices


def test_a_mode_that_the_user_has_set_stays(tmp_path: Path) -> None:
    assert run(MODE + RANK + PRINTED, tmp_path, MKL_CBWR="COMPATIBLE")[0] == ["mode", str(COMPATIBLE)]


def test_a_notebook_that_has_multiplied_before_is_told_in_one_line(tmp_path: Path) -> None:
    """Without deterministic=true nothing was promised, and nothing is said."""
    code = MODE + "torch.ones(2, 2) @ torch.ones(2, 2)\n"
    printed, warned = run(code + RANK + PRINTED, tmp_path)
    assert printed == ["mode", str(BRANCH_OFF)]
    (line,) = (line for line in warned.splitlines() if "warning" in line)
    assert line.startswith("warning: deterministic=true: ") and "set MKL_CBWR=AUTO where the process is started" in line
    assert "warning" not in run(code + RANK.replace("deterministic=True", ""), tmp_path)[1]
