from __future__ import annotations

import pytest
import torch.distributed as dist

from rlhf_mcore.parallel import collectives
from rlhf_mcore.parallel.collectives import StoreClaims


def test_claims_are_each_engines_own_and_leave_a_counter_a_round_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(collectives, "broadcast_json", lambda value, source: "name")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    engines = StoreClaims(), StoreClaims()
    for count in (3, 2):
        for claims in engines:
            claims.begin()
        found = [claims.claim(count) for _ in range(5) for claims in engines]
        assert found == [count * place for place in range(10)]
    assert store.num_keys() == 2
