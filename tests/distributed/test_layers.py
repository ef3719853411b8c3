"""Compare each kind of layer on four ranks with transformers, in the default tier: logprobs, weights and updates.

Few layouts contain every kind of split. The other files of this folder test more models and layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all
from tests.distributed.layers_worker import CIRCLES, KINDS
from tests.distributed.state_worker import MUON
from tests.distributed.test_parity import check_parity, check_weights
from tests.distributed.test_state import check_circle
from tests.distributed.test_update import check_old_of_update, check_update
from tests.distributed.world import World

pytestmark = pytest.mark.default


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("layers")
    return four_ranks.run("layers_worker", directory)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_transformers(findings: Any, kind: str) -> None:
    check_all(findings[kind]["cells"], check_parity)


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_weights_are_the_files_bit_for_bit(findings: Any, kind: str) -> None:
    check_all(findings[kind]["cells"], check_weights)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_that_of_transformers(findings: Any, kind: str) -> None:
    check_all(findings[kind]["cells"], lambda found: check_update(found["update"], findings[kind]["oracle"]))


@pytest.mark.parametrize("model", CIRCLES)
def test_a_checkpoint_resumes_on_another_layout_and_syncs_to_an_engine(findings: Any, model: str) -> None:
    check_circle(findings["circles"][model], CIRCLES[model])


@pytest.mark.parametrize("model", CIRCLES)
def test_an_update_by_muon_is_one_of_whole_matrices(findings: Any, model: str) -> None:
    """Muon updates queries, keys, values, gates and every expert separately, however Megatron and the layout combine them."""
    found = findings["circles"][model]["muon"]
    assert len(found) == (4 * (4 + 1 + 4 * 3) if model in MUON else 0), sorted(found)
    assert all(difference < 1e-3 for difference in found.values()), found


def test_old_logprobs_of_the_update_itself_are_those_of_a_pass_before_it(findings: Any) -> None:
    check_old_of_update(findings["old"])


def test_a_prefix_tree_that_is_wrong_is_noticed(findings: Any) -> None:
    """All rows share prompts, so the tests of this file compute trees.

    Each of four faults changes logprobs by far more than rounding.
    """
    assert len(findings["broken"]) == 4
    assert all(distance > 0.1 for distance in findings["broken"].values()), findings["broken"]
