"""Test the end of a run: its summary and its messages."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich.console
import torch
import torch.distributed as dist

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.compose import OpenRun, explain_out_of_memory
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.observability.throughput import Timers
from rlhf_mcore.residency.ledger import OutOfDeviceMemory
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.trainer.record import RunRecord
from tests.late_device import LateCuda, LatePlatform


def test_a_number_that_was_not_finite_before_is_left_out_of_the_table(tmp_path: Path) -> None:
    """A resumed run reads null for it, and has finished training by then."""
    output = rich.console.Console(file=io.StringIO(), width=100)
    record = RunRecord(Timers(), 0)
    record.console, record.directory = (
        Console("plain", 2, "p / e", output=output),
        RunDirectory.create(str(tmp_path), "p", "e"),
    )
    before = {"step": 0, "evaluate/reward": None, "evaluate/accuracy": 0.25}
    record.recall([before, {"step": 2, "reward/mean": 0.5, "evaluate/reward": 0.5, "evaluate/accuracy": 0.75}])
    OpenRun(Config(), record, None, 3).finish()
    record.directory.close()
    printed = output.file.getvalue()  # type: ignore[attr-defined]
    assert "held-out accuracy" in printed and "+0.500" in printed and "held-out reward" not in printed


@pytest.mark.parametrize(
    ("shares", "teacher", "is_hinted"),
    [((1.0, 1.0), None, True), ((1.0, 0.75), None, False), ((1.0, 1.0), "models/teacher", False)],
)
def test_a_run_whose_rewards_were_all_zero_says_what_to_do(
    tmp_path: Path, shares: tuple[float, ...], teacher: str | None, is_hinted: bool
) -> None:
    """A run with a teacher gets no advice. Distillation learns although all its rewards are 0."""
    output = rich.console.Console(file=io.StringIO(), width=300)
    record = RunRecord(Timers(), 0)
    record.console = Console("plain", 2, "p / e", output=output)
    record.directory = RunDirectory.create(str(tmp_path), "p", "e")
    record.recall(
        [{"step": step, "reward/mean": 0.0, "reward/share_zero": share} for step, share in enumerate(shares, 1)]
    )
    cfg = Config()
    cfg.teacher.path = teacher
    OpenRun(cfg, record, None, 3).finish()
    record.directory.close()
    printed = output.file.getvalue()  # type: ignore[attr-defined]
    assert (
        "every reward was 0, so nothing was learned" in printed and "rlhf-mcore reward-test" in printed
    ) is is_hinted


def test_a_device_out_of_memory_is_compared_with_the_plan(
    monkeypatch: pytest.MonkeyPatch, late_cuda: LateCuda, tmp_path: Path
) -> None:
    """16.5 of 24 GiB are in use, and torch has reserved 10 of them. AdamW needs 8 bytes for each of 494 million weights: 3.7 GiB."""
    configs = Path(__file__).resolve().parents[3] / "configs"
    own = [f"model.path={configs}/models/Qwen2.5-0.5B-Instruct", "data.train=x.jsonl", "algorithm.kl.coef=0"]
    cfg = resolve(load_config(configs / "base.yaml", own))
    late_cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=24 * 2**30)
    late_cuda.mem_get_info = lambda: (15 * 2**29, 24 * 2**30)
    late_cuda.memory_reserved = lambda: 10 * 2**30
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    sharing = DeviceSharing(LatePlatform())
    record = RunRecord(Timers(), 0, memory=sharing)
    with (
        pytest.raises(OutOfDeviceMemory) as caught,
        explain_out_of_memory(cfg, record, sharing),
        record.phase("update"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    told = terminal.cause(caught.value)
    assert "out of memory in phase update: CUDA out of memory. Tried to allocate 2.00 GiB." in told
    assert "outside torch (CUDA, NCCL, other processes): 6.5 GiB" in told
    rows = {line[:13].rstrip(): line for line in told.splitlines()}
    assert "22.6" in rows["actor update"], "94 % of the device"
    assert "moments 3.7" in told and "generate" in rows and "docs/operations/troubleshooting.md" in told
