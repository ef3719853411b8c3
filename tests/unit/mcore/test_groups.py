"""Process groups in a world of one. Real worlds are in tests/distributed."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from rlhf_mcore.mcore import groups as module
from rlhf_mcore.mcore.groups import GroupPool, build_groups
from rlhf_mcore.parallel.layout import ParallelLayout

pytestmark = pytest.mark.usefixtures("world")


def test_groups_of_the_same_ranks_are_one_group() -> None:
    pool = GroupPool()
    first = pool.group_of([[0]])
    assert first is not None and pool.group_of([[0]]) is first
    assert first is not dist.group.WORLD
    assert GroupPool().group_of([[0]]) is not first


def test_a_rank_in_none_of_the_groups_has_none() -> None:
    assert GroupPool().group_of([]) is None


def test_an_enumeration_of_some_ranks_is_completed_with_singletons(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[list[int]]] = []
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(
        module.dist, "new_subgroups_by_enumeration", lambda ranks, timeout: (object(), asked.append(ranks))
    )
    pool = GroupPool()
    assert pool.group_of([[1, 3], [2, 4]]) is None  # this is rank 0
    assert pool.group_of([[5, 4, 3, 2, 1, 0]]) is not None
    assert asked == [[[0], [1, 3], [2, 4], [5]], [[5, 4, 3, 2, 1, 0]]]


def test_two_models_with_one_pool_share_their_groups() -> None:
    pool = GroupPool()
    actor, critic = (build_groups(ParallelLayout(1), pool) for _ in range(2))
    assert actor is not None and critic is not None
    for axis in ("tp", "pp", "dp", "mp", "dp_cp", "embd", "ep", "expt_dp", "intra_dist_opt"):
        group = getattr(actor.collection, axis)
        assert group is getattr(critic.collection, axis) is not None
        assert dist.get_process_group_ranks(group) == [0]
