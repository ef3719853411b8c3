"""An update does not depend on how ranks, microbatches and packing share it: it is that of plain transformers and AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.setting import NOISE
from tests.distributed.update_worker import (
    LOSSES,
    MODELS,
    NUM_SMALL_STEPS,
    OVERLAPPED_LAYOUTS,
    SHARED_LAYOUTS,
    SMALL_LR,
    cuts_of,
    layouts_for,
)
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("update")
    return four_ranks.run("update_worker", directory)


@pytest.mark.parametrize(
    ("model", "layout", "cut", "kind"),
    [(model, layout, *cut) for model in MODELS for layout in layouts_for(model) for cut in cuts_of(model)],
)
def test_loss_gradient_and_new_weights_are_the_oracles(
    findings: Any, model: str, layout: str, cut: str, kind: str
) -> None:
    found, oracle = findings["updates"][f"{model}/{layout}/{cut}/{kind}"], findings["oracle"][model]
    assert found["loss/total"] == pytest.approx(oracle["loss"], rel=1e-5)
    assert found["actor/grad_norm"] == pytest.approx(oracle["grad_norm"], rel=1e-5)
    assert found["weights"] == ""
    assert found["losses"] == [found["loss/total"]] * 4
    assert found["actor/clip_fraction_high"] + found["actor/clip_fraction_low"] > 0, "the batch must exercise clipping"


def test_rows_had_every_kind_of_owner(findings: Any) -> None:
    for part in ("one/packed", "one/padded", "many/packed", "many/padded"):
        cases = [found["owner"] for key, found in findings["updates"].items() if key.endswith(part)]
        assert set(cases) == {0, 1, 2}, part


@pytest.mark.parametrize("kind", ["selective", "full_uniform", "full_block", "mlp_and_attention"])
def test_recomputed_activations_change_nothing(findings: Any, kind: str) -> None:
    found, without = findings["recompute"][kind], findings["recompute"]["off"]
    assert found["loss/total"] == without["loss/total"]
    assert found["actor/grad_norm"] == without["actor/grad_norm"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("layout", [layout for layout in SHARED_LAYOUTS if "cp" in layout])
def test_no_loss_or_aggregation_depends_on_how_ranks_share_a_sequence(
    findings: Any, layout: str, kind: str, loss: str
) -> None:
    found, whole = findings["losses"][f"{layout}/{kind}"][loss], findings["losses"]["dp4/packed"][loss]
    assert found.keys() == whole.keys() and len(found) >= 10
    for name, value in whole.items():
        assert found[name] == pytest.approx(value, rel=NOISE, abs=NOISE), name
    others = {tuple(other.values()) for name, other in findings["losses"][f"{layout}/{kind}"].items() if name != loss}
    assert tuple(found.values()) not in others, "each is another loss"


@pytest.mark.parametrize("layout", OVERLAPPED_LAYOUTS)
def test_overlapped_gradient_reduction_and_weight_gathering_change_nothing(findings: Any, layout: str) -> None:
    found = findings["overlap"][layout]
    for overlapped, plain in zip(found["overlapped"], found["plain"], strict=True):
        assert overlapped == pytest.approx(plain, rel=NOISE, abs=NOISE)  # buckets are summed in another order
    assert found["weights"] == ""
    assert found["plain"][0]["loss/total"] != found["plain"][1]["loss/total"], (
        "weights must have changed between the steps"
    )


@pytest.mark.parametrize("layout", layouts_for(MODELS[0]))
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_old_logprobs_of_the_update_itself_are_those_of_a_pass_before_it(findings: Any, layout: str, kind: str) -> None:
    check_old_of_update(findings["old"][f"{layout}/{kind}"])


def check_old_of_update(found: Any) -> None:
    """Loss, gradient, correction and every metric, to the noise of fp32."""
    assert found["distance"] < NOISE
    computed, skipped = found["computed"], found["skipped"]
    assert computed.keys() == skipped.keys() and len(computed) >= 20
    for name, value in computed.items():
        assert skipped[name] == pytest.approx(value, rel=NOISE, abs=NOISE), name
    assert skipped["rollout/ratio_max"] > 0.1 > skipped["rollout/ratio_min"], "the correction must have something to do"
    assert skipped["actor/importance_ratio"] == 1.0 and skipped["actor/approx_kl"] == 0.0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_small_steps_add_up_in_fp32_masters(findings: Any, dtype: str) -> None:
    check_small_steps(findings["precision"][dtype])


def check_small_steps(found: Any) -> None:
    """A weight near 1 has steps of 4e-3 in bf16: updates of 2e-5 are lost but for the fp32 masters."""
    assert found["skipped"] == 0
    # The batch is the same in each step: a weight whose gradient keeps its sign is moved by about the learning rate in each.
    assert found["moved"] == pytest.approx(NUM_SMALL_STEPS * SMALL_LR, rel=0.2)
    assert found["losses"][-1] < found["losses"][0]
    assert 0 < found["grad_norm"] < float("inf")
