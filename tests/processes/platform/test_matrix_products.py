"""Check that MKL's mode is set before its first product, for every way to start a rank or an engine on a CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, run_command

BRANCH_OFF, AUTO, COMPATIBLE = 1, 2, 3  # mkl_types.h
MULTIPLY = "torch.ones(2, 2) @ torch.ones(2, 2)\n"
RANK = f"""
with rank.join_world(Config(deterministic=True), timedelta(seconds=60)):
    {MULTIPLY}"""
PRELOADED = f"assert forked_ranks.preload('rlhf_mcore.cli.train', [{str(ROOT / 'configs/quickstart/grpo.yaml')!r}])\n"
# The body of a Ray actor in this process. The engine has no other ranks and no model.
ENGINE = f"""
host = EngineHost()
host._listening = listener("127.0.0.1")
try:
    host._build(EngineSpec(None, None, None), RankRendezvous((Location("127.0.0.1", host._listening.getsockname()[1]),), 0), 1)
except AttributeError:
    {MULTIPLY}"""
# Compute operations of a training with operands at every float offset within the alignment that kernels check (64 bytes).
AT_EVERY_OFFSET = """
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
"""
NOTEBOOK = MULTIPLY + RANK
# name -> code of a process, its environment variables
PROCESSES: dict[str, tuple[str, dict[str, str]]] = {
    "own torchrun": (RANK, {}),
    "forked rank": (PRELOADED + RANK, {}),
    "Ray engine": (ENGINE, {}),
    "the user's mode": (RANK, {"MKL_CBWR": "COMPATIBLE"}),
    "notebook": (NOTEBOOK, {}),
    "notebook, not deterministic": (NOTEBOOK.replace("deterministic=True", ""), {}),
}
# Includes kernels of other processors. Kernels that check alignment take other paths for the first elements.
MODES = {"AUTO": AUTO, "COMPATIBLE": COMPATIBLE}
for mode in MODES:
    for kernels in ("", "avx2", "default"):
        variables = {"MKL_CBWR": mode} | ({"ATEN_CPU_CAPABILITY": kernels} if kernels else {})
        PROCESSES[f"offsets {mode} {kernels}"] = AT_EVERY_OFFSET, variables
# Forks one process for each, after all imports. A process chooses mode and kernels at its first product.
IN_FORKS = """
import ctypes, json, os, sys, traceback
from datetime import timedelta
from pathlib import Path
import torch
from rlhf_mcore.cli import forked_ranks, rank
from rlhf_mcore.config.schema import Config
from rlhf_mcore.parallel.addresses import listener
from rlhf_mcore.rollout.remote.host import EngineHost, EngineSpec, Location, RankRendezvous

mkl = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
for number, (code, variables) in enumerate(json.loads(sys.argv[1])):
    if not (child := os.fork()):
        os.environ.update(variables)
        os.dup2(os.open(f"errors-{number}", os.O_WRONLY | os.O_CREAT), 2)
        try:
            exec(code)
            found = [mkl.mkl_serv_cbwr_get(-1), torch.backends.cpu.get_cpu_capability().lower()]
            Path(f"found-{number}").write_text(json.dumps(found))
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Return mode, kernels and error output by process. The environment contains MKL_CBWR only if a process sets it."""
    import torch

    if not torch.backends.mkl.is_available():
        pytest.skip("this torch multiplies without MKL")
    folder = tmp_path_factory.mktemp("forks")
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
    world |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", IN_FORKS, json.dumps([*PROCESSES.values()])]
    ended = run_command(command, folder, {**environment, **world}, 500)
    assert ended.returncode == 0, ended.stderr
    return {name: _read(folder, number) for number, name in enumerate(PROCESSES)}


def _read(folder: Path, number: int) -> tuple[int, str, str]:
    errors, result = (folder / f"errors-{number}").read_text(), folder / f"found-{number}"
    mode, kernels = json.loads(result.read_text()) if result.is_file() else (0, "failed")
    return mode, kernels, errors


@pytest.mark.parametrize("name", ["own torchrun", "forked rank", "Ray engine"])
def test_a_rank_or_engine_chooses_the_mode(results: Any, name: str) -> None:
    mode, _, errors = results[name]
    assert mode == AUTO, errors
    assert "warning" not in errors


def test_results_are_equal_at_every_alignment(results: Any) -> None:
    for name, (mode, kernels, errors) in results.items():
        if name.startswith("offsets "):
            _, wanted, capability = name.split(" ")
            assert mode == MODES[wanted], (name, errors)
            assert capability in ("", kernels), (name, errors)


def test_a_mode_of_the_user_stays(results: Any) -> None:
    mode, _, errors = results["the user's mode"]
    assert mode == COMPATIBLE, errors


def test_a_notebook_that_has_multiplied_is_warned_if_deterministic(results: Any) -> None:
    mode, _, warned = results["notebook"]
    assert mode == BRANCH_OFF
    (line,) = (line for line in warned.splitlines() if "warning" in line)
    assert (
        line.startswith("warning: deterministic=true: ")
        and "set MKL_CBWR=AUTO in the environment of this process" in line
    )
    mode, _, warned = results["notebook, not deterministic"]
    assert (mode, "warning" in warned) == (BRANCH_OFF, False), warned
