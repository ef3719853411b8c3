from __future__ import annotations

import pytest
import torch.distributed as dist

from rlhf_mcore.parallel import shared_store
from rlhf_mcore.parallel.shared_store import StoreClaims
from rlhf_mcore.protocols import EngineRank
from tests.unit.parallel.world import ThreadGroup, rank_threads, run_ranks

__all__ = ["rank_threads"]


@pytest.mark.usefixtures("rank_threads")
def test_claims_are_each_engines_own_and_leave_a_counter_a_round_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(shared_store, "broadcast_json", lambda value, source: "name")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def body(group: ThreadGroup) -> list[list[int]]:
        counter = StoreClaims(EngineRank.of(group.rank(), 6, 3))
        rounds = []
        for count in (3, 2):
            counter.begin()
            rounds.append([counter.claim(count) for _ in range(5)])
        return rounds

    found = run_ranks(6, body)
    assert found[0] == found[1] == found[2] and found[3] == found[4] == found[5]
    for number, count in enumerate((3, 2)):
        assert sorted(found[0][number] + found[3][number]) == [count * place for place in range(10)]
    assert store.num_keys() == 2
