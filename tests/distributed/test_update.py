"""Check that an update does not depend on ranks, microbatches and packing, and compare it with plain transformers and AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_close
from tests.distributed.setting import NOISE
from tests.distributed.update_worker import MODELS, NUM_SMALL_STEPS, RECOMPUTE, SHARED, SMALL_LR, UNSHARED
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("update")
    return four_ranks.run("update_worker", directory)


@pytest.mark.parametrize("model", MODELS)
def test_an_update_is_that_of_transformers(findings: Any, model: str) -> None:
    cells = {name: found for name, found in findings["updates"].items() if name.startswith(f"{model}/")}
    check_all(cells, lambda found: check_clipped_update(found, findings["oracle"][model]))


def check_clipped_update(found: Any, oracle: Any) -> None:
    check_update(found, oracle)
    assert found["actor/clip_fraction_high"] + found["actor/clip_fraction_low"] > 0, "the batch must exercise clipping"


def check_update(found: Any, oracle: Any) -> None:
    """Check loss, gradient norm and new weights. All ranks report the same loss."""
    check_close("loss/total", found["loss/total"], oracle["loss"], rel=1e-5)
    check_close("actor/grad_norm", found["actor/grad_norm"], oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""
    assert found["losses"] == [found["loss/total"]] * 4


def test_recomputed_activations_change_nothing(findings: Any) -> None:
    without = findings["recompute"]["off"]

    def check(kind: str) -> None:
        for name in ("loss/total", "actor/grad_norm"):
            assert findings["recompute"][kind][name] == without[name], name

    check_all(list(RECOMPUTE), check)


@pytest.mark.parametrize("where", SHARED)
def test_no_loss_depends_on_how_ranks_share_a_sequence(findings: Any, where: str) -> None:
    unshared = findings["losses"][UNSHARED]

    def check(loss: str) -> None:
        found, whole = (
            {
                name: value for name, value in of_loss.items() if name != "trainer/computed_share"
            }  # depends on the layout
            for of_loss in (findings["losses"][where][loss], unshared[loss])
        )
        assert found.keys() == whole.keys() and len(found) >= 10
        for name, value in whole.items():
            check_close(name, found[name], value, NOISE, NOISE)

    check_all(findings["losses"][where].keys(), check)
    others = [tuple(metrics.values()) for metrics in findings["losses"][where].values()]
    assert len(set(others)) == len(others), "each is another loss"


def test_every_loss_and_aggregation_is_another_one(findings: Any) -> None:
    found = [tuple(metrics.values()) for metrics in findings["losses"][UNSHARED].values()]
    assert len(set(found)) == len(found)


def test_overlapped_communication_and_hosted_state_change_nothing(findings: Any) -> None:
    """Gradients overlap with the backward pass, and weights with the forward pass. The order of bucket sums changes."""

    def check(found: Any) -> None:
        for overlapped, plain in zip(found["overlapped"], found["plain"], strict=True):
            assert overlapped == pytest.approx(plain, rel=NOISE, abs=NOISE)
        assert found["weights"] == ""
        assert found["plain"][0]["loss/total"] != found["plain"][1]["loss/total"], "weights must have changed"

    check_all(findings["overlap"], check)


def test_old_logprobs_of_the_update_itself_are_those_of_a_pass_before_it(findings: Any) -> None:
    check_all(findings["old"], check_old_of_update)


def check_old_of_update(found: Any) -> None:
    """Check that loss, gradient, correction and every metric agree within fp32 noise."""
    assert found["distance"] < NOISE
    computed, skipped = found["computed"], found["skipped"]
    assert computed.keys() == skipped.keys() and len(computed) >= 20
    for name, value in computed.items():
        check_close(name, skipped[name], value, NOISE, NOISE)
    assert skipped["rollout/ratio_max"] > 0.1 > skipped["rollout/ratio_min"], "the correction must have something to do"
    assert skipped["actor/importance_ratio"] == 1.0 and skipped["actor/approx_kl"] == 0.0


def test_small_steps_add_up_in_fp32_masters(findings: Any) -> None:
    check_all(findings["precision"], check_small_steps)


def check_small_steps(found: Any) -> None:
    """Near 1, bf16 weights have a resolution of 4e-3. Without fp32 masters, updates of 2e-5 would be lost."""
    assert found["skipped"] == 0
    # The batch is the same in each step. A weight whose gradient keeps its sign moves by about the learning rate per step.
    assert found["moved"] == pytest.approx(NUM_SMALL_STEPS * SMALL_LR, rel=0.2)
    assert found["losses"][-1] < found["losses"][0]
    assert 0 < found["grad_norm"] < float("inf")
