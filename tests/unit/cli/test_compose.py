"""What is found out before a model is built, when there is no launcher to look for it. Trainings are in tests/e2e."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.cli import compose
from rlhf_mcore.config.derive import resolve
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config, RewardConfig
from rlhf_mcore.observability.timers import Timers
from rlhf_mcore.platform import current_platform
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.resume import Start
from tests.unit.parallel.world import world

__all__ = ["world"]


@pytest.mark.usefixtures("world")
def test_a_bad_reward_function_is_found_before_data_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*given: Any, **more: Any) -> Any:
        raise AssertionError("a model was built, or data read")

    for name in ("build_roles", "load_tokenizer", "load_prompts"):
        monkeypatch.setattr(compose, name, built)
    (tmp_path / "mine.py").write_text("def grade(text):\n    return 1.0\n")
    cfg = resolve(Config(reward=RewardConfig(function=f"{tmp_path / 'mine.py'}:grade")))
    with pytest.raises(ConfigError, match=r"reward\.function is .*mine\.py:grade.* its parameters are \(text\)"):
        compose._build(cfg, current_platform(), RunRecord(Timers(), 0), Start(), None)  # type: ignore[arg-type]
