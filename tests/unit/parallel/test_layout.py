from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.config.schema import LayoutConfig
from rlhf_mcore.geometry import Shard
from rlhf_mcore.parallel.layout import ParallelLayout
from tests.messages import expect_error

SIZES = st.integers(1, 5)


def groups(layout: ParallelLayout, axis: str) -> list[list[int]]:
    """Return the ranks that differ in only one coordinate."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        found.setdefault(tuple(place[name] for name in place if name != axis), []).append(rank)
    return sorted(found.values())


def test_the_example_of_megatrons_documentation() -> None:
    # parallel_state.initialize_model_parallel: 16 GPUs, tensor parallel 2, pipeline parallel 4.
    layout = ParallelLayout(16, tp=2, pp=4)
    assert layout.dp == 2
    assert groups(layout, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert groups(layout, "dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups(layout, "pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_context_parallel_ranks_lie_between_tensor_and_data_parallel_ones() -> None:
    layout = ParallelLayout(16, tp=2, cp=2, pp=2)
    assert layout.coordinates(11) == {"tp": 1, "cp": 1, "dp": 0, "pp": 1}
    assert layout.rank_of(tp=1, cp=1, dp=0, pp=1) == 11
    assert groups(layout, "cp")[:2] == [[0, 2], [1, 3]]
    assert groups(layout, "dp")[:2] == [[0, 4], [1, 5]]


@given(SIZES, SIZES, SIZES, SIZES, st.integers(0, 9))
def test_ranks_and_coordinates_are_inverse(tp: int, cp: int, dp: int, pp: int, first: int) -> None:
    layout = ParallelLayout(tp * cp * dp * pp, tp=tp, cp=cp, pp=pp, first_rank=first)
    assert layout.dp == dp
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    assert list(layout.ranks) == list(range(first, first + tp * cp * dp * pp))
    for rank in layout.ranks:
        place = layout.coordinates(rank)
        assert all(0 <= place[axis] < size for axis, size in sizes.items())
        assert layout.rank_of(**place) == rank


def test_a_layout_that_does_not_begin_at_the_first_rank_by_hand() -> None:
    # Ranks 4 to 11 of a larger world. Rank 4 corresponds to rank 0 in a world of these eight.
    layout = ParallelLayout(8, tp=2, pp=2, ep=4, etp=1, first_rank=4)
    alone = ParallelLayout(8, tp=2, pp=2, ep=4, etp=1)
    assert layout.ranks == range(4, 12) and alone.ranks == range(8)
    assert layout.coordinates(4) == {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
    assert layout.coordinates(11) == {"tp": 1, "cp": 0, "dp": 1, "pp": 1}
    assert layout.rank_of(tp=1, dp=1, pp=1) == 11
    expert = "decoder.layers.3.mlp.experts.linear_fc1.weight1"
    for rank in alone.ranks:
        assert layout.coordinates(4 + rank) == alone.coordinates(rank)
        assert layout.expert_coordinates(4 + rank) == alone.expert_coordinates(rank)
        for name in (expert, "embedding.word_embeddings.weight"):
            assert layout.shard_of(name, 4 + rank) == alone.shard_of(name, rank)
    assert layout.shard_of(expert, 10) == Shard(0, 1, 2, 4)


def test_a_world_that_the_layout_does_not_fill_is_refused() -> None:
    with expect_error(ValueError, field=("world size", "tp", "pp", "cp"), value=(12, 2, 4, 1, 8)):
        ParallelLayout(12, tp=2, pp=4)
    with expect_error(ValueError, field=("etp", "ep"), value=(6, 2)):
        ParallelLayout(12, tp=2, pp=2, ep=2)
    with expect_error(ValueError, field=("etp", "tp", "ep"), value=(1, 2)):
        ParallelLayout(4, tp=2, etp=1)


def test_experts_lie_on_a_grid_of_their_own_by_hand() -> None:
    # Eight ranks, two stages. The model uses TP2 DP2, and the experts EP4 without splits.
    layout = ParallelLayout(8, tp=2, pp=2, ep=4, etp=1)
    assert (layout.dp, layout.expert_tp, layout.expert_dp) == (2, 1, 1)
    assert layout.expert_coordinates(6) == {"etp": 0, "ep": 2, "edp": 0, "pp": 1}
    assert layout.shard_of("decoder.layers.3.mlp.experts.local_experts.0.linear_fc1.weight", 6) == Shard(0, 1, 2, 4)
    assert layout.shard_of("decoder.layers.3.mlp.experts.linear_fc1.weight1", 6) == Shard(0, 1, 2, 4)
    assert layout.shard_of("decoder.layers.3.mlp.router.weight", 6) == Shard(0, 2)
    assert layout.shard_of("decoder.layers.3.mlp.linear_fc1.weight", 7) == Shard(1, 2)


@settings(deadline=None)  # the first example imports megatron
@given(SIZES, SIZES, SIZES, SIZES)
def test_the_grid_of_experts_is_megatrons(etp: int, ep: int, edp: int, pp: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    tp = etp if ep == 1 else 1
    layout = ParallelLayout(etp * ep * edp * pp, tp=tp, pp=pp, ep=ep, etp=etp)
    assert layout.expert_dp == edp
    megatron = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    for ours, theirs in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("pp", "pp")):
        for group in megatron.get_ranks(theirs):
            places = [layout.expert_coordinates(rank) for rank in group]
            assert [place.pop(ours) for place in places] == list(range(len(group)))
            assert all(place == places[0] for place in places)


def test_layers_of_even_and_uneven_stages() -> None:
    # Megatron's documentation: 8 layers, 2 stages, 2 chunks. Stage 0 holds [0, 1] and [4, 5], stage 1 holds [2, 3] and [6, 7].
    even = ParallelLayout(2, pp=2, vpp=2)
    assert [[list(even.layers_of(8, pp, chunk)) for chunk in (0, 1)] for pp in (0, 1)] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    uneven = ParallelLayout(2, pp=2, vpp=2, layers_per_stage=(1, 2, 3, 1))
    assert [[list(uneven.layers_of(7, pp, chunk)) for chunk in (0, 1)] for pp in (0, 1)] == [
        [[0], [3, 4, 5]],
        [[1, 2], [6]],
    ]


def test_stages_that_do_not_fit_the_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="layers_per_stage"):
        ParallelLayout(2, pp=2).layers_of(7, 0)
    with pytest.raises(ValueError, match="layers_per_stage"):
        ParallelLayout(2, pp=2, layers_per_stage=(3, 3)).layers_of(7, 0)
    with expect_error(ValueError, field="layers_per_stage", value=("(3, 4)", 4)):
        ParallelLayout(2, pp=2, vpp=2, layers_per_stage=(3, 4))


def test_a_layout_of_the_configuration_is_over_its_ranks_or_over_the_world() -> None:
    cfg = LayoutConfig(tp=2, pp=2, vpp=2, sequence_parallel=True, ep=2, etp=1, layers_per_stage=[1, 2, 3, 1])
    expected = dict(tp=2, pp=2, vpp=2, sequence_parallel=True, ep=2, etp=1, layers_per_stage=(1, 2, 3, 1))
    assert ParallelLayout.of(cfg, None, 8) == ParallelLayout(8, **expected)
    assert ParallelLayout.of(cfg, [4, 12], 16) == ParallelLayout(8, **expected, first_rank=4)
    with expect_error(ValueError, field=("world size", "tp", "pp", "cp"), value=(6, 4)):
        ParallelLayout.of(cfg, None, 6)
