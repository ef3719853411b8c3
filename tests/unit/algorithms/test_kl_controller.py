"""The weight of the KL over a run, and its state over a resume."""

from __future__ import annotations

import json

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import KLConfig, KLControllerConfig
from rlhf_mcore.trainer.advantages import build_kl_controller
from tests.messages import expect_error

ADAPTIVE = KLControllerConfig(target=0.5, gain=0.1)
LINEAR = KLControllerConfig(final=0.1, steps=10)


def run(controller: KLControllerConfig, kls: list[float], coef: float = 0.01) -> list[float]:
    """The weight of each step, the one after the last included."""
    made = build_kl_controller(KLConfig(coef=coef, controller=controller))
    weights = [made.coef]
    for kl in kls:
        made.update(kl)
        weights.append(made.coef)
    return weights


def test_fixed():
    assert run(KLControllerConfig(), [5.0, float("nan")], coef=0.3) == [0.3, 0.3, 0.3]


def test_adaptive_by_hand():
    # Errors: 0.55/0.5 - 1 = 0.1; 2 clipped to 0.2; 0 - 1 clipped to -0.2; none at the target. Gain 0.1.
    weights = run(ADAPTIVE, [0.55, 1.5, 0.0, 0.5], coef=1.0)
    assert weights == pytest.approx([1.0, 1.01, 1.01 * 1.02, 1.01 * 1.02 * 0.98, 1.01 * 1.02 * 0.98])


def test_adaptive_with_a_kl_that_is_not_finite():
    assert run(ADAPTIVE, [float("nan"), float("inf")], coef=1.0) == pytest.approx([1.0, 1.0, 1.02])


def test_linear_by_hand():
    weights = run(LINEAR, [0.0] * 11)
    assert weights[:10] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1])
    assert weights[9:] == [0.1, 0.1, 0.1]  # exactly, and from then on
    assert run(KLControllerConfig(final=0.5, steps=1), [0.0]) == [0.5, 0.5]
    assert run(KLControllerConfig(final=0.0, steps=3), [0.0] * 2, coef=1.0) == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("controller", [KLControllerConfig(), ADAPTIVE, LINEAR], ids=lambda c: c.name)
def test_a_resumed_controller_goes_on_as_if_nothing_had_happened(controller: KLControllerConfig):
    cfg = KLConfig(coef=0.037, controller=controller)
    kls = [0.3, 1.1, 0.9, 0.07, 0.5]
    whole, first, second = (build_kl_controller(cfg) for _ in range(3))
    for kl in kls:
        whole.update(kl)
    for kl in kls[:2]:
        first.update(kl)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for kl in kls[2:]:
        second.update(kl)
    assert second.coef == whole.coef and second.state_dict() == whole.state_dict()


def test_a_state_of_another_controller_is_refused():
    made = build_kl_controller(KLConfig(coef=0.1, controller=LINEAR))
    with expect_error(ConfigError, field="algorithm.kl.controller", value=("adaptive", "linear")):
        made.load_state_dict({"name": "adaptive", "coef": 0.1})
    with pytest.raises(ConfigError, match=r"\['name', 'steps'\], expected \['name', 'num_steps'\]"):
        made.load_state_dict({"name": "linear", "steps": 1})


def test_a_linear_controller_without_steps_is_refused():
    with expect_error(ConfigError, field="algorithm.kl.controller.steps", value="null", remedy="number of steps"):
        build_kl_controller(KLConfig(coef=0.1, controller=KLControllerConfig(final=0.1)))
