"""Published configurations (configs/experiments): each is valid and fits, and its plan is the golden one, to 5 %.

`golden_plans.json` holds bytes of every part of every phase, and seconds. After a wanted change, write it again and read its diff:

    python -m tests.unit.planning.test_experiments
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.validate import validate
from rlhf_mcore.planning.inputs import GPUS
from rlhf_mcore.planning.known_models import with_known_configs
from rlhf_mcore.planning.plan import RunPlan, make_plan
from rlhf_mcore.planning.report import refusal

EXPERIMENTS = {
    path.stem: path for path in sorted(Path(__file__).resolve().parents[3].glob("configs/experiments/*.yaml"))
}
GOLDEN = Path(__file__).with_name("golden_plans.json")
TOLERANCE = 0.05


def plan_of(stem: str) -> RunPlan:
    cfg = load_config(EXPERIMENTS[stem])
    with with_known_configs(cfg):
        validate(cfg, check_files=False)
        return make_plan(resolve(cfg), default_world_size(cfg), GPUS["H100"])


def items_of(plan: RunPlan) -> dict[str, Any]:
    """The numbers of a plan, under the names that its tables have."""
    return {
        "ranks": plan.world_size,
        "cache tokens": plan.kv_tokens,
        "pinned bytes": plan.pinned_bytes,
        "later sync bytes": plan.later_sync_bytes or 0,
        "roles": {
            role.name: {"parameters": role.parameters, "checkpoint bytes": role.checkpoint_bytes}
            | {name: size or 0 for name, size in role.layout.items()}
            for role in plan.roles
        },
        "bytes": {phase.phase: dict(phase.parts) for phase in plan.phases},
        "seconds": plan.seconds,
    }


def flat(items: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in items.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name} / ")
        else:
            yield prefix + name, value


@pytest.mark.parametrize("stem", EXPERIMENTS)
def test_published_experiment_fits_and_matches_its_golden_plan(stem: str) -> None:
    plan = plan_of(stem)
    assert plan.fits, refusal(plan)
    expected = dict(flat(json.loads(GOLDEN.read_text(encoding="utf-8"))[stem]))
    assert dict(flat(items_of(plan))) == pytest.approx(expected, rel=TOLERANCE)


def test_every_golden_plan_has_its_experiment() -> None:
    assert list(json.loads(GOLDEN.read_text(encoding="utf-8"))) == list(EXPERIMENTS)


@pytest.mark.parametrize("stem", EXPERIMENTS)
def test_experiment_names_its_source_and_itself(stem: str) -> None:
    text = EXPERIMENTS[stem].read_text(encoding="utf-8")
    assert "# Hyper-parameters: " in text
    assert text.count(f"experiment: {stem}\n") == 1


if __name__ == "__main__":
    plans = {stem: items_of(plan_of(stem)) for stem in EXPERIMENTS}
    GOLDEN.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
