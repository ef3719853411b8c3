"""Check that an engine rank under Ray sees its devices after its order arrives. No code may ask CUDA before."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.commands import ROOT, run_command

UNPICKLED = """
import torch

def asked(*_, **__):
    raise AssertionError("CUDA was asked, which reads CUDA_VISIBLE_DEVICES once")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "set_device"):
    setattr(torch.cuda, name, asked)
import rlhf_mcore.bridge.run.remote
import rlhf_mcore.environments.build
import rlhf_mcore.rollout.remote.host
print("not asked")
"""


def test_what_an_order_names_is_imported_without_a_device(tmp_path: Path) -> None:
    ended = run_command([sys.executable, "-c", UNPICKLED], tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)}, 120)
    assert (ended.returncode, ended.stdout) == (0, "not asked\n"), ended.stderr
