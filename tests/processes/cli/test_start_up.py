"""Start commands like a shell. Check their output, and that they do not import slow modules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.default
ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
MODEL = CONFIGS / "models" / "Qwen2.5-7B"
RUN = f"base: {CONFIGS / 'base.yaml'}\nmodel: {{path: {MODEL}}}\ndata: {{train: [absent.parquet]}}\n"


def test_nothing_heavy_is_imported_to_read_a_configuration() -> None:
    modules = sorted(path.stem for path in (ROOT / "rlhf_mcore" / "config").glob("*.py") if path.stem != "__init__")
    assert "validate" in modules
    imports = "".join(f"import rlhf_mcore.config.{name}\n" for name in modules)
    imports += "import rlhf_mcore.cli.main, rlhf_mcore.cli.train, rlhf_mcore.cli.agent, rlhf_mcore.cli.supervisor\n"
    heavy = "[m for m in ('torch', 'transformers', 'vllm', 'megatron', 'numpy', 'pyarrow', 'ray') if m in sys.modules]"
    code = f"import sys\n{imports}print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_rollout_is_cheap() -> None:
    code = "import sys, rlhf_mcore.rollout; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_verifying_a_checkpoint_imports_nothing_heavy() -> None:
    code = "import rlhf_mcore.commands.verify_checkpoint, sys\n"
    code += "print([m for m in ('torch', 'megatron', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_quick_doctor_prints_json_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rlhf_mcore.commands.doctor.command import main\n"
        f"code = main(['--quick', '--json', '--run-dir', {str(tmp_path)!r}])\n"
        "heavy = [m for m in ('torch', 'transformers', 'vllm', 'megatron', 'numpy') if m in sys.modules]\n"
        "print(heavy, code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    report = json.loads(done.stdout)
    assert done.stderr.splitlines()[-1] == f"[] {int(report['worst'] == 'error')}"
    assert {
        "python",
        "torch",
        "megatron-core",
        "gpu",
        "threads",
        "shared memory",
        "open files",
        "disk speed",
        "clock",
    } <= {finding["check"] for finding in report["findings"]}


def test_a_plan_needs_neither_weights_nor_prompts_nor_torch(workspace: Any) -> None:
    run_yaml = str(workspace.write("plan.yaml", RUN))
    code = (
        "import sys\nfrom rlhf_mcore.commands.plan.command import main\n"
        f"code = main([{run_yaml!r}, '--world-size', '8', '--json', 'actor.layout.tp=2', 'rollout.layout.tp=2'])\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'megatron') if m in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1] == "[] 0"
    report = json.loads(done.stdout)
    assert report["fits"] is True and report["world_size"] == 8
    assert report["roles"][0]["parameters"] == 7_615_616_512
    assert (
        0 < report["sync"]["received"] <= 2 * report["roles"][0]["parameters"]
    )  # an estimate: at most the whole model in bf16


def test_a_world_that_the_layout_does_not_divide(workspace: Any) -> None:
    arguments = ["train", "run.yaml", "actor.layout.tp=2", "trainer.world_size=3"]
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: trainer.world_size=3 is not divisible by actor.layout.tp*pp*cp=2*1*1=2; "
        "use a multiple of 2 processes or change actor.layout\n"
    )
