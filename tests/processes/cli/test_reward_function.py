"""A reward function is loaded by a process of its own, before ranks are started."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore.cli import main as main_module


@pytest.mark.parametrize(
    ("command", "source", "message"),
    [
        (
            "train",
            "\n\ndef grade(prompt, answer): return 1.0\n",
            "error: reward.function is 'grade.py:grade', but its parameters are (prompt, answer), line 3 (too many positional "
            "arguments): let it take (data_source, solution_str, ground_truth, extra_info)\n",
        ),
        (
            "evaluate",
            "import torchh\ndef grade(*arguments): return 1.0\n",
            "error: reward.function is 'grade.py:grade', but {root}/grade.py fails to import (ModuleNotFoundError: No module "
            "named 'torchh') (grade.py, line 1): correct the file\n",
        ),
        (
            "train",
            "import os\nos._exit(0)\ndef grade(*arguments): return 1.0\n",
            "error: reward.function=grade.py:grade ended its process with exit code 0 while it was loaded: correct the file\n",
        ),
    ],
)
def test_a_reward_function_is_loaded_before_any_rank_starts(
    workspace: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    source: str,
    message: str,
) -> None:
    launched: list[Any] = []
    for module in ("rlhf_mcore.cli.agent", "rlhf_mcore.commands.evaluate.command"):
        monkeypatch.setattr(f"{module}.launch", lambda *arguments, **options: launched.append(arguments) or 0)
    (workspace.root / "grade.py").write_text(source)
    arguments = [command, "run.yaml", "reward.function=grade.py:grade", "trainer.prompts_per_step=1"]
    arguments += ["data.eval=[train.jsonl]", "evaluate.checkpoint=model"] if command == "evaluate" else []
    assert main_module.main(arguments) == 2
    assert capsys.readouterr().err == message.format(root=workspace.root)
    (workspace.root / "grade.py").write_text("def grade(*arguments): return 1.0")
    assert main_module.main(arguments) == 0
    assert len(launched) == 1
