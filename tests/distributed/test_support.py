"""Check that ratios and gradients use the support left by top-k and top-p, under every layout. transformers' warpers
are the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cells import check_all, check_below
from tests.distributed.test_update import check_update
from tests.distributed.world import World


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("support")
    return four_ranks.run("support_worker", directory)


def test_logprobs_are_those_within_the_supports(findings: Any) -> None:
    """Logprobs in double precision, from a separate pass and from the update's forward pass."""
    sizes = findings["sizes"]
    assert sizes[0] == 0 and len(sizes) > 4 and sizes[-1] <= 31

    def check(found: Any) -> None:
        for name in ("own", "of_update"):
            check_below(name, found[name], 1e-5)
            assert found[name] > 0

    check_all(findings["cells"], check)


def test_an_update_is_that_of_transformers(findings: Any) -> None:
    check_all(findings["cells"], lambda found: check_update(found, findings["oracle"]))
