"""Keys that are gone: accepted for one release, with a line that names what to do, and silent where nothing changes."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore.config.differences import compare_configs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.removed import REMOVED
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.show import to_yaml
from rlhf_mcore.config.validate import validate
from tests.messages import refused


def test_a_removed_key_is_accepted_with_a_warning(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.write("old.yaml", "base: run.yaml\nreward:\n  alarm: {deviations: 3, steps: 20}\n")
    cfg = load_config("old.yaml", ["alarms.timeout_s=5"])
    assert cfg == load_config("run.yaml")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: old.yaml:3: reward.alarm.deviations=3 ") and "alarms.defaults=false" in first
    assert second.startswith("warning: override 'alarms.timeout_s=5': alarms.timeout_s=5 ") and "30.0" in second


def test_what_holds_anyway_is_no_warning(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    load_config("run.yaml", [f"{key}={was.value}" for key, was in REMOVED.items()])
    assert capsys.readouterr().err == ""


def test_no_key_is_there_and_gone() -> None:
    assert not REMOVED.keys() & KEYS.keys()


def test_a_removed_key_in_python(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = load_config("run.yaml")
    cfg.actor.optimizer.loss_scale.hysteresis = 4  # type: ignore[attr-defined]
    assert "loss_scale.hysteresis=4" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="unknown key"):
        cfg.steps = 3  # type: ignore[attr-defined]
    with refused(ConfigError, field="loss_scale.initial", value="'x'", remedy="float"):
        cfg.actor.optimizer.loss_scale.initial = "x"  # type: ignore[assignment]


def test_a_checkpoint_of_the_release_before_is_no_other_run(workspace: Any) -> None:
    text = to_yaml(load_config("run.yaml"))
    saved = text.replace("alarms:\n", "alarms:\n  timeout_s: 30.0\n")
    assert compare_configs(saved, text) == ([], [])
    _, changed = compare_configs(text.replace("alarms:\n", "alarms:\n  timeout_s: 5.0\n"), text)
    assert [line.split()[0] for line in changed] == ["alarms.timeout_s"]


@pytest.mark.parametrize("former", ["sample", "full"])
def test_a_former_choice_is_replaced_with_a_warning(
    workspace: Any, former: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = load_config("run.yaml", [f"bridge.verify={former}"])
    validate(cfg, check_files=False)
    assert resolve(cfg).bridge.verify == "digest"
    assert capsys.readouterr().err.startswith(f"warning: bridge.verify={former} is gone; digest is used")
    with refused(ConfigError, field="bridge.verify='sampled'", remedy="off, digest"):
        validate(load_config("run.yaml", ["bridge.verify=sampled"]), check_files=False)
