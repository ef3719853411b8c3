"""Run the tracer on vLLM modules of every kind of family with TP 1 and 2, and in a whole engine. One world runs everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.families import FAMILIES
from rlhf_mcore.foreign import Fields
from rlhf_mcore.planning.inputs import EngineGrid
from tests.distributed.cells import check_all, check_below
from tests.distributed.world import run_world
from tests.e2e.bridge.eight_bits import GRIDS
from tests.e2e.bridge.eight_bits import hf_config as eight_bits_config
from tests.e2e.bridge.models import HIDDEN, MIXTURES, SIZES, VOCABULARY, Case, hf_config
from tests.e2e.processors import needs_kernel
from tests.e2e.rollout.tiny import save_model
from tests.engine_layout import engine_tensors, weight_bytes

Seen = list[dict[str, Any]]  # the result of each rank

# fp32 kernels may sum in another order. bf16 rounds to 8 bits, and the expert kernel also rounds intermediate values.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
CELLS = {f"{case.key}-tp{tp}": (case, tp) for tp, cases in SIZES.items() for case in cases}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("trace")
    for letter, seed in (("a", 1), ("b", 2)):
        save_model(directory / letter, "qwen3", seed)
    run_world("e2e.bridge.worker", 2, directory)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


def check_cells(ranks: Seen, check: Callable[[Case, int, Seen], None], is_meant: Callable[[Case], bool] = bool) -> None:
    """Call ``check`` with each case, its TP size and the results of both ranks."""

    def check_cell(name: str) -> None:
        case, tp = CELLS[name]
        check(case, tp, [rank[f"tp{tp}"][case.key] for rank in ranks])

    check_all([name for name, (case, _) in CELLS.items() if is_meant(case)], check_cell)


def is_mixture(case: Case) -> bool:
    return case.family in MIXTURES


def test_replayed_pieces_are_what_load_weights_makes(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        for seen in both:
            assert seen["replay"]["difference"] == ""
            assert seen["replay"]["names"] == seen["replay"]["traced"]

    check_cells(ranks, check)


def test_pieces_are_disjoint_and_only_padding_is_left(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        for name, parameter in [item for seen in both for item in seen["map"]["parameters"].items()]:
            filled = np.zeros(prod(parameter["shape"]), int)
            for _, _, shape, offset, strides in parameter["pieces"]:
                np.add.at(filled, elements(shape, offset, strides), 1)
            for begin, end in parameter["padding"]:
                filled[begin:end] += 1
            assert (filled == 1).all(), name

    check_cells(ranks, check)


def elements(shape: list[int], offset: int, strides: list[int]) -> Any:
    """Return the positions of a rectangle in a flat tensor."""
    found = np.array(offset)
    for size, stride in zip(shape, strides, strict=True):
        found = found[..., None] + np.arange(size) * stride
    return found.reshape(-1)


def test_the_planner_describes_the_same_tensors_without_an_engine(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        geometry = FAMILIES[case.family].geometry(Fields(hf_config(case).to_dict(), "config.json", ""))
        for rank, seen in enumerate(both):
            planned = [
                describe_tensor(t.shape, [(p.hf_name, p.start, p.shape) for p in t.pieces])
                for t in engine_tensors(geometry, EngineGrid(tp), rank % tp)
            ]
            traced = [
                describe_tensor(p["shape"], [piece[:3] for piece in p["pieces"]])
                for p in seen["map"]["parameters"].values()
            ]
            assert sorted(planned) == sorted(traced)

    check_cells(ranks, check)


def describe_tensor(shape: Any, pieces: Any) -> tuple[int, list[Any]]:
    """Return the number of elements of a tensor, and the rectangles in it."""
    return prod(shape), sorted([name, list(start), list(size)] for name, start, size in pieces)


def test_padding_is_that_of_the_vocabulary(ranks: Seen) -> None:
    """vLLM pads 97 rows to 128. With two ranks, the first contains 64 real rows, and the second 33 of 64."""

    def check(case: Case, tp: int, both: Seen) -> None:
        rows = {1: [(97, 128), (97, 128)], 2: [None, (33, 64)]}[tp]
        padded = ["model.embed_tokens.weight"] + ([] if case.is_tied else ["lm_head.weight"])
        for seen, expected in zip(both, rows, strict=True):
            found = {name: p["padding"] for name, p in seen["map"]["parameters"].items() if p["padding"]}
            if expected is None:
                assert found == {}
            else:
                assert found == {key: [[expected[0] * HIDDEN, expected[1] * HIDDEN]] for key in padded}

    check_cells(ranks, check)


def test_both_ranks_together_hold_every_element(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        rows: dict[str, set[int]] = {}
        for seen in both:
            for parameter in seen["map"]["parameters"].values():
                for name, start, shape, _, _ in parameter["pieces"]:
                    rows.setdefault(name, set()).update(range(start[0], start[0] + shape[0]))
        assert rows["model.embed_tokens.weight"] == set(range(VOCABULARY))
        heads = 2 if case.family.startswith("qwen2") else 4
        assert rows["model.layers.1.self_attn.q_proj.weight"] == set(range(32 * heads))
        assert rows["model.layers.1.self_attn.v_proj.weight"] == set(range(32 * case.num_kv_heads))

    check_cells(ranks, check)


def test_a_single_key_value_head_is_on_both_ranks(ranks: Seen) -> None:
    for rank in ranks:
        pieces = rank["tp2"]["llama-tied-kv1-float32"]["map"]["parameters"]["model.layers.0.self_attn.qkv_proj.weight"]
        # Two of four query heads with 32 rows each, then the whole key and the whole value.
        assert [(piece[0].split(".")[4], piece[2], piece[3]) for piece in pieces["pieces"]] == [
            ("q_proj", [64, 64], 0),
            ("k_proj", [32, 64], 64 * 64),
            ("v_proj", [32, 64], 96 * 64),
        ]


def test_gate_and_up_of_an_expert_lie_in_one_tensor(ranks: Seen) -> None:
    """With TP 2 each rank has 48 of 96 rows. Expert 3 of 4 starts at row 3 * 96, and a row has 64 elements."""
    name = "model.layers.0.block_sparse_moe.experts.routed_experts.w13_weight"
    parameter = ranks[1]["tp2"]["mixtral-untied-kv1-float32"]["map"]["parameters"][name]
    prefix = "model.layers.0.block_sparse_moe.experts.3."
    assert parameter["shape"] == [4, 96, 64]
    assert [piece for piece in parameter["pieces"] if piece[0].startswith(prefix)] == [
        [prefix + "w1.weight", [48, 0], [48, 64], 3 * 96 * 64, [64, 1]],
        [prefix + "w3.weight", [48, 0], [48, 64], (3 * 96 + 48) * 64, [64, 1]],
    ]


def test_a_packed_model_has_the_same_pieces(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        for seen in both:
            plain, packed = seen["map"]["parameters"], seen["packed"]["parameters"]
            assert list(plain) == list(packed)
            for name in plain:
                assert {**packed[name], "repacked": ""} == plain[name], name

    check_cells(ranks, check)


def test_tracing_is_deterministic_and_leaves_the_model_as_it_was(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        for seen in both:
            assert seen["deterministic"] and seen["packed again"]
            assert seen["change by tracing"] == ""

    check_cells(ranks, check)


def test_an_update_reaches_every_kernel(ranks: Seen) -> None:
    """A parameter counts as direct only if its kernel reads it in place, whatever this CPU packs."""

    def check(case: Case, tp: int, both: Seen) -> None:
        for seen in both:
            name, gap = max(seen["packed gaps"].items(), key=lambda item: item[1])
            check_below(name, gap, TOLERANCE[case.dtype])
            direct = {name for name, p in seen["packed"]["parameters"].items() if not p["repacked"]}
            assert {name for name in direct if "norm" in name} == {
                name for name in seen["map"]["parameters"] if "norm" in name
            }
            if is_mixture(case):  # vLLM packs experts on every CPU
                assert not any("experts." in name and "gate" not in name for name in direct)

    check_cells(ranks, check)


def test_without_packed_kernels_all_but_experts_is_direct(ranks: Seen) -> None:
    for rank in ranks:
        for case in SIZES[1]:
            parameters = rank["without packing"][case.key]["parameters"]
            repacked = {name for name, parameter in parameters.items() if parameter["repacked"]}
            assert repacked == {name for name in parameters if "routed_experts" in name}, case.key


def test_with_plain_kernels_parameters_are_live(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        for live in (seen["live"] for seen in both):
            repacked = [name for name, p in live["map"]["parameters"].items() if p["repacked"]]
            assert all("routed_experts" in name for name in repacked)
            assert bool(repacked) == is_mixture(case)
            check_below("live", max(live["gaps"].values()), TOLERANCE[case.dtype])
            assert "lm_head" in live["changed"] and "model.layers.1.self_attn.o_proj" in live["changed"]

    check_cells(ranks, check)


def test_vllms_own_reload_leaves_parameters_live(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        for live in (seen["live"] for seen in both):
            assert live["moved"] == []
            assert live["reloaded map is equal"]
            check_below("reloaded", max(live["reloaded gaps"].values()), TOLERANCE[case.dtype])

    check_cells(ranks, check, lambda case: not is_mixture(case))


def test_tied_weights_are_one_parameter(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        for seen in both:
            parameters = seen["map"]["parameters"]
            assert ("lm_head.weight" in parameters) != case.is_tied
            assert parameters["model.embed_tokens.weight"]["aliases"] == (["lm_head.weight"] if case.is_tied else [])
            assert seen["map"]["unused"] == []
            assert seen["with both names"]["parameters"] == parameters
            assert seen["with both names"]["unused"] == (["lm_head.weight"] if case.is_tied else [])

    check_cells(ranks, check)


def test_a_format_without_a_tensor_is_rejected(ranks: Seen) -> None:
    def check(case: Case, tp: int, both: Seen) -> None:
        for seen in both:
            assert "unwritten" in seen["incomplete"]
            assert "model.layers.1.self_attn.qkv_proj.weight" in seen["incomplete"]

    check_cells(ranks, check)


def test_an_engine_updated_through_the_map_answers_as_after_its_own_load(ranks: Seen) -> None:
    for rank in ranks:
        seen = rank["engine"]
        assert seen["b loaded"] != seen["a loaded"]
        assert seen["b through the map"] == seen["b loaded"]
        assert seen["repacked when live"] == []
        assert seen["b in place"] == seen["b loaded"]
        assert seen["a loaded again"] == seen["a loaded"]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_layers_of_8_bits_hold_what_vllm_makes_of_the_same_weights(ranks: Seen, kind: str) -> None:
    """Compared with vLLM's own layers, loaders and quantisers, for every layout of an engine."""
    geometry = FAMILIES["qwen3_moe"].geometry(Fields(eight_bits_config(None).to_dict(), "config.json", ""))

    def check(name: str) -> None:
        num_layers = 2 // GRIDS[name].get("pp", 1)
        for rank in ranks:
            seen = rank[f"8 bits-{name}"][kind]
            assert [seen[what] for what in seen if what.startswith("other than")] == [[], [], []]
            assert len(seen["8 bits"]) == num_layers * 4  # qkv, o, w13, w2
            # Tensors of other ranks: two of four experts in two layers, or a layer with 16 matrices. Matrices have scales.
            elsewhere = {"ep2": 2 * 2 * 3 * 2, "dp2_ep2": 2 * 2 * 3 * 2, "pp2": 16 * 2 + 5}
            assert len(seen["unused"]) == elsewhere.get(name, 0)
            assert seen["compared"] == (2 * len(seen["8 bits"]) if kind == "fp8" else 2 * 2 * (4 + 3 * 4))
        planned = weight_bytes(geometry, EngineGrid(**GRIDS[name]), 2, kind)
        assert planned == max(rank[f"8 bits-{name}"][kind]["bytes"] for rank in ranks)

    check_all(list(GRIDS), check)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [pytest.param("fp8", 0.005, marks=needs_kernel("fp8")), pytest.param("int8", 0.02, marks=needs_kernel("int8"))],
)
def test_kernels_multiply_by_the_values_of_the_8_bits(ranks: Seen, kind: str, bound: float) -> None:
    """Products are in bf16. With int8, inputs are also rounded to 8 bits."""
    for name in GRIDS:
        for rank in ranks:
            check_below(name, max(rank[f"8 bits-{name}"][kind]["gaps"].values()), bound)
