"""Read the last release's keys as today's keys, with a line that names the new key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.checkpoint.config_changes import compare_configs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.former import BY_KEY, FORMER, is_former_group
from rlhf_mcore.config.keys import KEYS, changed_keys
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.config.validate import validate
from tests.messages import assert_names, expect_error

# Settings of the last release, and the equal settings of today.
TRANSLATED = [
    ({"alarms.timeout_s": 5.0}, {}),
    ({"reward.alarm.deviations": 3, "reward.alarm.steps": 9}, {}),
    ({"bridge.verify": "full"}, {}),  # digest is the default
    ({"bridge.verify": "sample"}, {}),
    ({"rollout.sleep": False}, {"rollout.sleep_level": 0}),
    ({"rollout.sleep": False, "rollout.sleep_level": 1}, {"rollout.sleep_level": 0}),
    ({"reference.offload": True}, {"reference.offload": "always"}),
    ({"teacher.offload": False}, {"teacher.offload": "never"}),
    ({"reference.offload": None}, {}),
    ({"reference.offload": None, "reference.offload_by_layer": True}, {"reference.offload": "by_layer"}),
    ({"reward.model.offload_by_layer": True, "reward.model.offload": True}, {"reward.model.offload": "by_layer"}),
    (
        {"actor.recompute.granularity": "full", "actor.recompute.method": "block"},
        {"actor.recompute.granularity": "block"},
    ),
    ({"critic.recompute.method": "block"}, {}),
    ({"checkpoint.delta": True, "checkpoint.full_every": 4}, {"checkpoint.deltas": 3}),
    ({"checkpoint.delta": True}, {"checkpoint.deltas": 9}),
    ({"evaluate.prompts_per_batch": 2}, {}),
    ({"logging.tensorboard": False}, {"logging.trackers": []}),
    ({"logging.tensorboard": True, "logging.trackers": ["wandb"]}, {"logging.trackers": ["wandb", "tensorboard"]}),
    ({"actor.optimizer.schedule.warmup_updates": 20}, {"actor.optimizer.schedule.warmup": 20.0}),
    ({"critic.optimizer.schedule.warmup_ratio": 0.1}, {"critic.optimizer.schedule.warmup": 0.1}),
    (
        {"actor.optimizer.schedule.warmup_updates": 3, "actor.optimizer.schedule.warmup_ratio": 0.1},
        {"actor.optimizer.schedule.warmup": 0.1},
    ),
    ({"actor.optimizer.loss_scale.initial": 1024.0}, {"actor.megatron.initial_loss_scale": 1024.0}),
    ({"reward.pool": "ray", "reward.ray.address": "10.0.0.1:6379"}, {"reward.pool": "10.0.0.1:6379"}),
    ({"reward.judge.rubric_file": "rubric.txt"}, {"reward.judge.rubric": "rubric.txt"}),
    ({"environment.container.start_timeout_s": 900.0}, {}),
    ({"rollout.prefix_caching": False}, {"rollout.vllm.enable_prefix_caching": False}),
    (
        {"algorithm.kl.controller.name": "adaptive", "algorithm.kl.controller.target": 0.02},
        {"algorithm.kl.controller.target": 0.02},
    ),
    (
        {"checkpoint.metric_for_best_model": "evaluate/loss", "checkpoint.greater_is_better": False},
        {"checkpoint.metric_for_best_model": "-evaluate/loss"},
    ),
    ({"rollout.server.timeout_s": 600.0}, {"rollout.engine_timeout_s": 10.0}),
    ({"data.max_rows": 5000000}, {"data.max_bytes": 20480000000}),
    ({"data.max_rows": 1000, "trainer.max_bad_updates": 2}, {}),
    ({"rollout.engine_restarts": 9, "logging.samples": 0, "rollout.ray.cpus_per_rank": 4}, {}),
    ({"reward.remote.deadline_s": 20.0, "reward.judge.retries": 2}, {}),
]


@pytest.mark.parametrize(("before", "now"), TRANSLATED, ids=str)
def test_former_settings_are_read_as_those_of_today(
    workspace: Any, before: dict[str, Any], now: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write("model_only.yaml", "model: {path: m}\n")
    cfg = load_config("model_only.yaml", [f"{key}={yaml_text(value)}" for key, value in before.items()])
    lines = capsys.readouterr().err.splitlines()
    assert changed_keys(cfg) == {"model.path": "m", **now}
    assert Config({"model.path": "m", **before}) == cfg == Config({"model.path": "m"}).updated(before)
    changed = {key: value for key, value in before.items() if not is_default(key, value)}
    assert len(lines) == len(changed)
    for line, (key, value) in zip(lines, changed.items(), strict=True):
        assert line.startswith("warning: override ")
        assert_names(line, field=key, value=f"{key}={yaml_text(value)}", remedy=tuple(now))


def is_default(key: str, value: Any) -> bool:
    return bool(BY_KEY[key].defaults.get(key) == value) if key in BY_KEY else True


def yaml_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def test_defaults_of_the_last_release_are_dropped_without_a_word(
    workspace: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"{key}={yaml_text(value)}" for former in FORMER for key, value in former.defaults.items()]
    settings += [f"{key}=null" for former in FORMER for key, lost in former.lost.items() if "none" in lost]
    assert load_config("run.yaml", settings) == load_config("run.yaml")
    assert capsys.readouterr().err == ""


def test_no_key_is_there_and_gone() -> None:
    gone = {key for former in FORMER for key in former.defaults}
    assert not gone & KEYS.keys()
    assert {key for former in FORMER for key in (*former.lost, *former.reads)} <= KEYS.keys()
    assert all(map(is_former_group, {key.rpartition(".")[0] for key in gone} - KEYS.keys()))


def test_a_line_names_the_place(workspace: Any, capsys: pytest.CaptureFixture[str]) -> None:
    workspace.write("old.yaml", "base: run.yaml\nreward:\n  alarm: {deviations: 3}\n")
    load_config("old.yaml")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: old.yaml:3: reward.alarm.deviations=3 ") and "alarms.defaults=false" in line


def test_assignment_of_a_former_key_names_the_new_key() -> None:
    cfg = Config(model="m")
    with expect_error(ConfigError, field="unknown key alarms.timeout_s", remedy="the limit is 30 s"):
        cfg.alarms.timeout_s = 4  # type: ignore[attr-defined]
    with expect_error(ConfigError, field="schedule.warmup_updates", remedy="set actor.optimizer.schedule.warmup"):
        cfg.actor.optimizer.schedule.warmup_updates = 4  # type: ignore[attr-defined]
    with expect_error(ConfigError, field="bridge.verify='full'", remedy="off, digest"):
        cfg.bridge.verify = "full"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="unknown key"):
        cfg.steps = 3  # type: ignore[attr-defined]


def test_a_checkpoint_of_the_release_before_is_no_other_run(workspace: Any) -> None:
    text = to_yaml(load_config("run.yaml"))
    saved = text.replace("alarms:\n", "alarms:\n  timeout_s: 30.0\n").replace("verify: digest", "verify: full")
    assert compare_configs(saved, text) == ([], [])
    _, changed = compare_configs(text.replace("alarms:\n", "alarms:\n  timeout_s: 5.0\n"), text)
    assert [line.split()[0] for line in changed] == ["alarms.timeout_s"]


def test_a_choice_that_never_was_is_refused(workspace: Any) -> None:
    with expect_error(ConfigError, field="bridge.verify='sampled'", remedy="off, digest"):
        validate(resolve(load_config("run.yaml", ["bridge.verify=sampled"])), check_files=False)


def test_the_configuration_of_an_earlier_release_loads_and_is_compared(workspace: Any) -> None:
    sample = Path(__file__).resolve().parents[2] / "data" / "checkpoint_v1"
    saved = (sample / "checkpoint-2" / "config.yaml").read_text(encoding="utf-8")
    cfg = load_config(sample / "checkpoint-2" / "config.yaml")
    assert (cfg.reference.offload, cfg.logging.trackers, cfg.rollout.sleep_level) == ("never", [], 2)
    fixed, changed = compare_configs(saved, to_yaml(resolve(cfg)))
    assert fixed == [] and {line.split()[0] for line in changed} <= KEYS.keys()
