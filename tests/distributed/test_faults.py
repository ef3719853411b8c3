"""Show Megatron-core's faults that our code avoids, and the results that it computes with them.

The table is in docs/design/megatron-faults.md.
"""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("faults")
    return four_ranks.run("faults_worker", directory)


def test_smoothed_labels_are_averaged_over_a_rank_s_part_of_the_vocabulary(findings: Any) -> None:
    """Finding 1. Without smoothing the loss is correct. With smoothing, the two ranks of a group disagree."""
    assert findings["sharded"] == pytest.approx(findings["loss"], abs=1e-6)
    first, second = findings["smoothed"][:2]
    assert abs(first[0] - second[0]) > 0.05


def test_the_loss_of_gathered_logits_counts_each_rank_s_copy(findings: Any) -> None:
    """Finding 2. The sum of exponentials counts each term tp times."""
    assert findings["gathered"] == pytest.approx([loss + log(2) for loss in findings["loss"]], abs=1e-6)


def test_tokens_that_mtp_layers_predict_weigh_more_on_ranks_with_few(findings: Any) -> None:
    """Finding 3. Six tokens are valid and four are predicted, so every token should weigh 3/2. test_mtp.py checks our weights."""
    if findings["predicted"][0] is None:
        pytest.skip("this Megatron divides nothing here")
    first, second = [4 / 3, 4 / 3, 4 / 3, 0.0], [2.0, 0.0, 0.0, 0.0]
    for found, expected in zip(findings["predicted"], [first, second] * 2, strict=True):
        assert found == pytest.approx(expected)


def test_modules_that_name_no_group_take_the_global_one_which_is_the_model_s(findings: Any) -> None:
    """Findings 4 to 7. With another global group, a tensor that two ranks share would be split over four."""
    assert findings["groups"] == {"2 within 4": [4, 4, 4], "2 within 2": [2, 2, 2], "4 within 4": [4, 4, 4]}


def test_a_loss_is_divided_by_a_rank_s_own_tokens_but_not_ours(findings: Any) -> None:
    """Finding 9. Ten over four tokens is 2.5, but the mean of the ranks is 3. Our loss is already divided by the global count."""
    first, second = findings["divided"][:2]
    assert [first["theirs"], second["theirs"]] == [2.0, 4.0]
    assert [first["ours"], second["ours"]] == [6.0, 4.0]


def test_the_norm_of_a_gated_delta_net_gets_a_part_of_its_gradient_but_not_ours(findings: Any) -> None:
    """Finding 11, without sequence parallelism. Two ranks have a gradient of 1 each, and the sum should be 2."""
    assert findings["norm"] == [[1.0]] * 4
    for rank in range(4):
        assert findings["delta"]["tp2_dp2"][rank] == pytest.approx(findings["delta"]["dp4"][0], rel=1e-4, abs=1e-5)


def test_the_count_of_a_rank_s_valid_tokens_becomes_that_of_all(findings: Any) -> None:
    """Finding 10. The ranks of a group have three valid tokens and one valid token."""
    assert findings["counts"][:2] == [[4.0, 4.0], [4.0, 4.0]]


def test_sinks_of_all_ranks_are_in_the_norm_of_the_gradient_only_with_ours(findings: Any) -> None:
    """Finding 8. Our code marks each rank's part as its own. test_families.py checks the norm."""
    assert findings["counted"] == [True, False] * 2
    assert findings["sinks"] == [[2, True]] * 4
