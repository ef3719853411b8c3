"""Check small transfers worked by hand: copies, sends and receives of each rank, the chosen sources, and rejected plans."""

from __future__ import annotations

import pytest

from rlhf_mcore.bridge.map.coverage import CoverageError, check_coverage, padding_of
from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.plan.build import Plan, build_plan, spread_order
from rlhf_mcore.bridge.plan.rank_plan import Bucket, Copy, LocalCopy, Message, Phase
from rlhf_mcore.geometry import GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from tests.engine_layout import PlannedTensor, engine_places
from tests.messages import expect_error
from tests.plan_bytes import count_bytes
from tests.trainer_layout import even_nodes, replicas, stage_names, trainer_places
from tests.unit.bridge.geometry import bucket_names


def whole_rows(name: str, first: int, count: int, offset: int = 0, width: int = 2) -> Piece:
    return Piece(name, (first, 0), (count, width), offset, (width, 1))


def plan_of(sources: list[Place], destinations: list[Place], **options: object) -> Plan:
    names = sorted({piece.hf_name for place in sources for piece in place.pieces})
    settings = {"element_sizes": dict.fromkeys(names, 2), "bucket_bytes": 1024, "order": names} | options
    return build_plan(sources, destinations, **settings)


def test_tp2_to_tp1() -> None:
    """w[4, 2] in bf16: rank 0 holds rows 0 and 1, rank 1 holds rows 2 and 3, and both need all."""
    sources = [Place("s", (whole_rows("w", 0, 2),), (0,)), Place("s", (whole_rows("w", 2, 2),), (1,))]
    destinations = [Place("d", (whole_rows("w", 0, 4),), (0, 1))]
    plan = plan_of(sources, destinations)
    top, bottom = ("w", (0, 0), (2, 2)), ("w", (2, 0), (2, 2))
    assert plan.rank_view(0).buckets == [
        Bucket(
            0,
            [LocalCopy(Copy(*top, "s", 0, (2, 1), 2, 0), Copy(*top, "d", 0, (2, 1), 2, 0))],
            (
                Phase(
                    sends=[Message(1, 8, [Copy(*top, "s", 0, (2, 1), 2, 0)])],
                    receives=[Message(1, 8, [Copy(*bottom, "d", 4, (2, 1), 2, 0)])],
                ),
                Phase(),
            ),
        )
    ]
    assert plan.rank_view(1).buckets[0].phases[0] == Phase(
        sends=[Message(0, 8, [Copy(*bottom, "s", 0, (2, 1), 2, 0)])],
        receives=[Message(0, 8, [Copy(*top, "d", 0, (2, 1), 2, 0)])],
    )
    counted = count_bytes(plan)
    assert counted.received.tolist() == counted.sent.tolist() == counted.lower_bound.tolist() == [8, 8]
    assert counted.local.tolist() == [8, 8]
    assert counted.peak(depth=2) == 32


def two_by_two() -> tuple[list[Place], list[Place]]:
    """Return the places for training with TP2 PP2 on ranks 0 to 3, and two engines of TP2.

    ``a`` [4, 2] is split by rows on both sides, ``b`` by columns in the engine. The engine holds both in one buffer:
    two rows of ``a``, then one column of ``b``.
    """
    layout = ParallelLayout(4, tp=2, pp=2)
    sources = [
        Place("s", (whole_rows(name, 2 * tp, 2),), replicas(layout, tp, stage))
        for stage, name in enumerate("ab")
        for tp in range(2)
    ]
    fused = [(whole_rows("a", 2 * tp, 2), Piece("b", (0, tp), (4, 1), 4, (1, 1))) for tp in range(2)]
    destinations = [Place("d", fused[tp], range(tp, 4, 2), 8) for tp in range(2)]
    return sources, destinations


def test_tp2_pp2_to_tp2() -> None:
    sources, destinations = two_by_two()
    check_coverage(sources, destinations, {"a": (4, 2), "b": (4, 2)})
    (first,) = plan_of(sources, destinations).rank_view(0).buckets
    top = ("a", (0, 0), (2, 2))
    assert first.local == [LocalCopy(Copy(*top, "s", 0, (2, 1), 2, 0), Copy(*top, "d", 0, (2, 1), 2, 0))]
    assert first.phases[0] == Phase(
        sends=[Message(2, 8, [Copy(*top, "s", 0, (2, 1), 2, 0)])],
        receives=[
            Message(2, 4, [Copy("b", (0, 0), (2, 1), "d", 4, (1, 1), 2, 0)]),
            Message(3, 4, [Copy("b", (2, 0), (2, 1), "d", 6, (1, 1), 2, 0)]),
        ],
    )
    (last,) = plan_of(sources, destinations).rank_view(3).buckets
    assert last.local == [
        LocalCopy(
            Copy("b", (2, 1), (2, 1), "s", 1, (2, 1), 2, 0),
            Copy("b", (2, 1), (2, 1), "d", 6, (1, 1), 2, 0),
        )
    ]
    assert last.phases[0] == Phase(
        sends=[
            Message(0, 4, [Copy("b", (2, 0), (2, 1), "s", 0, (2, 1), 2, 0)]),
            Message(1, 4, [Copy("b", (2, 1), (2, 1), "s", 1, (2, 1), 2, 0)]),
            Message(2, 4, [Copy("b", (2, 0), (2, 1), "s", 0, (2, 1), 2, 0)]),
        ],
        receives=[
            Message(1, 8, [Copy("a", (2, 0), (2, 2), "d", 0, (2, 1), 2, 0)]),
            Message(2, 4, [Copy("b", (0, 1), (2, 1), "d", 4, (1, 1), 2, 0)]),
        ],
    )


def test_buckets_follow_the_order_and_cut_what_is_too_large() -> None:
    """Rank 3 sends 12 bytes of ``b``, over a limit of 8, so ``b`` is split over two buckets.

    ``a`` takes 8 bytes and a separate bucket.
    """
    sources, destinations = two_by_two()
    plan = plan_of(sources, destinations, bucket_bytes=8)
    assert bucket_names(plan)[0] == ["a"]
    assert {name for names in bucket_names(plan)[1:] for name in names} == {"b"}
    assert len(bucket_names(plan)) >= 3
    # A tensor of other ranks does not wait for the last part of a split tensor.
    assert bucket_names(plan_of(sources, destinations, bucket_bytes=8, order=["b", "a"])) == [["b"], ["a"], ["b"]]
    for rank in range(4):
        view = plan.rank_view(rank)
        assert all(bucket.send_bytes <= 8 and bucket.receive_bytes <= 8 for bucket in view.buckets)
        assert view.received_bytes == plan_of(sources, destinations).rank_view(rank).received_bytes


def test_adjacent_rectangles_become_one_copy() -> None:
    """Two pieces that are adjacent only on the sending side become one copy there, and two copies on the receiving side."""
    sources = [Place("s", (whole_rows("w", 0, 2), whole_rows("w", 2, 2, offset=4)), (0,))]
    destinations = [Place("d", (whole_rows("w", 0, 2, offset=10), whole_rows("w", 2, 2)), (1,))]
    plan = plan_of(sources, destinations)
    (sent,) = plan.rank_view(0).buckets[0].phases[0].sends
    (received,) = plan.rank_view(1).buckets[0].phases[0].receives
    assert sent == Message(1, 16, [Copy("w", (0, 0), (4, 2), "s", 0, (2, 1), 2, 0)])
    assert [(copy.start, copy.offset, copy.message_offset) for copy in received.copies] == [
        ((0, 0), 10, 0),
        ((2, 0), 0, 8),
    ]


def test_what_a_rank_needs_twice_travels_once() -> None:
    sources = [Place("s", (whole_rows("w", 0, 4),), (0,))]
    destinations = [Place(name, (whole_rows("w", 0, 4),), (1,)) for name in ("embedding", "head")]
    (message,) = plan_of(sources, destinations).rank_view(1).buckets[0].phases[0].receives
    assert message.nbytes == 16
    assert [(copy.buffer, copy.message_offset) for copy in message.copies] == [("embedding", 0), ("head", 0)]


def test_larger_elements_come_first_so_that_nothing_is_misaligned() -> None:
    names = ["a", "b", "c"]
    held = tuple(Piece(name, (0,), (3,), 0, (1,)) for name in names)
    sources = [Place(f"s{piece.hf_name}", (piece,), (0,)) for piece in held]
    destinations = [Place(f"d{piece.hf_name}", (piece,), (1,)) for piece in held]
    plan = plan_of(sources, destinations, element_sizes={"a": 1, "b": 4, "c": 2})
    (message,) = plan.rank_view(1).buckets[0].phases[0].receives
    assert message.nbytes == 21
    assert [(copy.hf_name, copy.message_offset) for copy in message.copies] == [("b", 0), ("c", 12), ("a", 18)]


def test_a_holder_on_the_same_node_is_preferred() -> None:
    sources = [Place("s", (whole_rows("w", 0, 4),), (0, 4, 8))]
    destinations = [Place("d", (whole_rows("w", 0, 4),), (5, 9, 10))]
    plan = plan_of(sources, destinations, nodes=even_nodes(12, 4))
    peers = {rank: plan.rank_view(rank).buckets[0].phases[0].receives[0].peer for rank in (5, 9, 10)}
    assert peers == {5: 4, 9: 8, 10: 8}
    assert count_bytes(plan).imported.sum() == 0


def test_a_node_imports_once_and_hands_on() -> None:
    """Rank 0 holds eight equal tensors, and all four ranks of the other node need them.

    Each rank imports two and forwards them.
    """
    names = [f"w{number}" for number in range(8)]
    sources = [Place(name, (whole_rows(name, 0, 4),), (0,)) for name in names]
    destinations = [Place(name, (whole_rows(name, 0, 4),), range(4, 8)) for name in names]
    plan = plan_of(sources, destinations, nodes=even_nodes(12, 4))
    assert plan.rank_view(0).sent_bytes == 8 * 16
    for rank in range(4, 8):
        (bucket,) = plan.rank_view(rank).buckets
        imports, forwards = bucket.phases
        assert [(message.peer, message.nbytes) for message in imports.receives] == [(0, 32)]
        assert [(message.peer, message.nbytes) for message in forwards.sends] == [
            (peer, 32) for peer in range(4, 8) if peer != rank
        ]
    flat = count_bytes(plan_of(sources, destinations))
    assert flat.sent[0] == 4 * 8 * 16
    assert count_bytes(plan).imported.tolist() == [0, 0, 0, 0, 32, 32, 32, 32]


def test_a_subset_travels_alone() -> None:
    sources, destinations = two_by_two()
    plan = plan_of(sources, destinations, only=["b"])
    assert bucket_names(plan) == [["b"]]
    assert count_bytes(plan).received.tolist() == [8, 8, 4, 4]


def test_a_plan_over_nothing_is_empty() -> None:
    plan = plan_of([Place("s", (whole_rows("w", 0, 4),), (0,))], [])
    assert (plan.num_buckets, plan.rank_view(0).buckets, count_bytes(plan).received.tolist()) == (0, [], [0])


def test_refusals_name_the_field_and_the_tensor() -> None:
    sources, destinations = two_by_two()
    with expect_error(ValueError, field=("order", "b"), value=1):
        plan_of(sources, destinations, order=["a"])
    with expect_error(ValueError, field=("only", "c"), value=1):
        plan_of(sources, destinations, only=["a", "c"])
    with expect_error(ValueError, field=("bucket_bytes", "b"), value=(2, 4)):
        plan_of(sources, destinations, bucket_bytes=2)
    with expect_error(ValueError, field=("nodes", "rank 3"), value=1):
        plan_of(sources, destinations, nodes=[0])
    with expect_error(ValueError, field="element_sizes"):
        plan_of(sources, destinations, element_sizes={"a": 3, "b": 2})
    with expect_error(ValueError, field="b", value="(2, 0)"):
        plan_of(sources[:3], destinations)
    with pytest.raises(ValueError, match="ascending"):
        plan_of([Place("s", (), (3, 1)), *sources], destinations)


def test_coverage_tells_what_is_wrong() -> None:
    shapes = {"w": (4, 2)}
    good = Place("s", (whole_rows("w", 0, 4),), (0,), 8)
    check_coverage([good], [good], shapes)
    with expect_error(CoverageError, field="w", value=("(1, 0)", "(3, 2)")):
        check_coverage([Place("s", (whole_rows("w", 0, 1),), (0,))], [good], shapes)
    with expect_error(CoverageError, field="d", value=2):
        check_coverage([good], [Place("d", (whole_rows("w", 0, 2), whole_rows("w", 2, 2, offset=2)), (0,), 8)], shapes)
    with expect_error(CoverageError, field=("d", "padding"), value=("[(8, 12)]", "[]")):
        check_coverage([good], [Place("d", good.pieces, (0,), 12)], shapes)
    with expect_error(CoverageError, field="d", value=(8, 6)):
        check_coverage([good], [Place("d", good.pieces, (0,), 6)], shapes)
    with expect_error(CoverageError, field="w", value="(4, 2)"):
        check_coverage([good], [Place("d", (whole_rows("w", 3, 2),), (0,))], shapes)
    with expect_error(CoverageError, field="v"):
        check_coverage([good], [Place("d", (whole_rows("v", 0, 2),), (0,))], shapes)
    check_coverage([good], [Place("d", good.pieces, (0,), 12, ((8, 12),))], shapes)


def test_padding_is_what_no_piece_fills() -> None:
    """Columns 0 and 2 of a local [3, 4], and element 11, are filled."""
    held = (
        Piece("a", (0, 0), (3, 1), 0, (4, 1)),
        Piece("a", (0, 1), (3, 1), 2, (4, 1)),
        Piece("b", (0,), (1,), 11, (1,)),
    )
    assert padding_of(Place("d", held, (0,), 12)) == ((1, 2), (3, 4), (5, 6), (7, 8), (9, 10))


def test_places_of_a_layout_cover_the_model() -> None:
    geometry = ModelGeometry("qwen3", 3, 16, GroupedSizes(4, 2, 4), 24, 50, tied_embeddings=True)
    layout, whole = ParallelLayout(8, tp=2, pp=2, layers_per_stage=(1, 2)), ParallelLayout(8, tp=2)
    names = stage_names(geometry, layout)
    assert [name.split(".")[2] for name in names[1] if name.endswith("linear_qkv.weight")] == ["1", "2"]
    assert names[0][0] == "embedding.word_embeddings.weight"
    assert names[1][-1] == "output_layer.weight"
    assert "output_layer.weight" not in stage_names(geometry, whole)[0]
    fused = stage_names(geometry, whole, fused=True)[0]
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in fused
    assert "decoder.layers.0.pre_mlp_layernorm.weight" not in fused
    places = trainer_places(names, geometry, layout)
    owners = {place.ranks for place in places if place.pieces[0].hf_name == "model.embed_tokens.weight"}
    assert owners == {range(0, 4, 2), range(1, 5, 2), range(4, 8, 2), range(5, 9, 2)}


def test_engines_are_consecutive_ranks() -> None:
    tensor = PlannedTensor("d", (4, 2), (whole_rows("w", 0, 4),))
    places = engine_places([[tensor], [tensor]], num_engines=3, first_rank=10)
    assert [list(place.ranks) for place in places] == [[10, 12, 14], [11, 13, 15]]
    assert [place.numel for place in places] == [8, 8]


def test_owners_take_turns_within_a_layer_or_over_the_model() -> None:
    def place_on(name: str, *ranks: int) -> Place:
        return Place(name, (whole_rows(name, 0, 1),), ranks)

    order = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("e0", "e1", "e2", "e3")]
    sources = [place_on(name, 4 * int(name[13]) + int(name[-1]) // 2) for name in order]
    assert [name[13:] for name in spread_order(order, sources)] == [
        f"{layer}.{name}" for layer in (0, 1) for name in ("e0", "e2", "e1", "e3")
    ]
    spread = [name[13:] for name in spread_order(order, sources, keep_layers=False)]
    assert spread == ["0.e0", "0.e2", "1.e0", "1.e2", "0.e1", "0.e3", "1.e1", "1.e3"]
