"""The tracer on real vLLM modules of every family at TP 1 and 2, and in a whole engine: one torchrun for everything."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest

from rlhf_mcore.families import FAMILIES
from rlhf_mcore.foreign import Fields
from rlhf_mcore.planning.inputs import EngineGrid
from rlhf_mcore.planning.sync import engine_tensors, weight_bytes
from tests.distributed.world import run_world
from tests.e2e.bridge.eight_bits import GRIDS
from tests.e2e.bridge.eight_bits import hf_config as eight_bits_config
from tests.e2e.bridge.models import CASES, HIDDEN, MIXTURES, VOCABULARY, Case, hf_config
from tests.e2e.rollout.tiny import save_model

Seen = list[dict[str, Any]]  # what each rank wrote

# fp32 kernels may sum in another order; bf16 rounds to 8 bits, and the kernel of the experts also in between.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("trace")
    for letter, seed in (("a", 1), ("b", 2)):
        save_model(directory / letter, "qwen3", seed)
    run_world("e2e.bridge.worker", 2, directory)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(params=[(case, tp) for case in CASES for tp in (1, 2)], ids=lambda p: f"{p[0].key}-tp{p[1]}")
def both(request: pytest.FixtureRequest, ranks: Seen) -> tuple[Case, int, Seen]:
    """A case, its TP size, and what the two ranks saw."""
    case, tp = request.param
    return case, tp, [rank[f"{case.key}-tp{tp}"] for rank in ranks]


def is_mixture(case: Case) -> bool:
    return case.family in MIXTURES


def test_replayed_pieces_are_what_load_weights_makes(both: tuple[Case, int, Seen]) -> None:
    for seen in both[2]:
        assert seen["replay"]["difference"] == ""
        assert seen["replay"]["names"] == seen["replay"]["traced"]


def test_pieces_are_disjoint_and_only_padding_is_left(both: tuple[Case, int, Seen]) -> None:
    for seen in both[2]:
        for name, parameter in seen["map"]["parameters"].items():
            filled = [0] * prod(parameter["shape"])
            for _, _, shape, offset, strides in parameter["pieces"]:
                for element in elements(shape, offset, strides):
                    filled[element] += 1
            for begin, end in parameter["padding"]:
                filled[begin:end] = [count + 1 for count in filled[begin:end]]
            assert set(filled) == {1}, name


def test_the_planner_describes_the_same_tensors_without_an_engine(both: tuple[Case, int, Seen]) -> None:
    case, tp, seen = both
    geometry = FAMILIES[case.family].geometry(Fields(hf_config(case).to_dict(), "config.json", ""))
    for rank, found in enumerate(seen):
        planned = [
            _held(t.shape, [(p.hf_name, p.start, p.shape) for p in t.pieces])
            for t in engine_tensors(geometry, EngineGrid(tp), rank % tp)
        ]
        traced = [_held(p["shape"], [piece[:3] for piece in p["pieces"]]) for p in found["map"]["parameters"].values()]
        assert sorted(planned) == sorted(traced)


def _held(shape: Any, pieces: Any) -> tuple[int, list[Any]]:
    """Elements of a tensor, and the rectangles in it."""
    return prod(shape), sorted([name, list(start), list(size)] for name, start, size in pieces)


def elements(shape: list[int], offset: int, strides: list[int]) -> list[int]:
    found = [offset]
    for size, stride in zip(shape, strides, strict=True):
        found = [element + index * stride for element in found for index in range(size)]
    return found


def test_padding_is_that_of_the_vocabulary(both: tuple[Case, int, Seen]) -> None:
    """vLLM pads 97 to 128 rows; with two ranks the first holds 64 real ones, the second 33 of 64."""
    case, tp, seen = both
    rows = {1: [(97, 128), (97, 128)], 2: [None, (33, 64)]}[tp]
    padded = ["model.embed_tokens.weight"] + ([] if case.is_tied else ["lm_head.weight"])
    for rank, expected in zip(seen, rows, strict=True):
        found = {name: p["padding"] for name, p in rank["map"]["parameters"].items() if p["padding"]}
        if expected is None:
            assert found == {}
        else:
            assert found == {key: [[expected[0] * HIDDEN, expected[1] * HIDDEN]] for key in padded}


def test_both_ranks_together_hold_every_element(both: tuple[Case, int, Seen]) -> None:
    case, _, seen = both
    held: dict[str, set[tuple[int, ...]]] = {}
    for rank in seen:
        for parameter in rank["map"]["parameters"].values():
            for name, start, shape, _, _ in parameter["pieces"]:
                held.setdefault(name, set()).update(range(start[0], start[0] + shape[0]))  # type: ignore[arg-type]
    assert held["model.embed_tokens.weight"] == set(range(VOCABULARY))
    heads = 2 if case.family.startswith("qwen2") else 4
    assert held["model.layers.1.self_attn.q_proj.weight"] == set(range(32 * heads))
    assert held["model.layers.1.self_attn.v_proj.weight"] == set(range(32 * case.num_kv_heads))


def test_a_single_key_value_head_is_on_both_ranks(ranks: Seen) -> None:
    for rank in ranks:
        pieces = rank["llama-tied-kv1-float32-tp2"]["map"]["parameters"]["model.layers.0.self_attn.qkv_proj.weight"]
        # Two of four query heads of 32 rows; then the whole key and the whole value.
        assert [(piece[0].split(".")[4], piece[2], piece[3]) for piece in pieces["pieces"]] == [
            ("q_proj", [64, 64], 0),
            ("k_proj", [32, 64], 64 * 64),
            ("v_proj", [32, 64], 96 * 64),
        ]


def test_gate_and_up_of_an_expert_lie_in_one_tensor(ranks: Seen) -> None:
    """TP 2: 48 of 96 rows each; expert 3 of 4 starts at 3 * 96 rows of 64."""
    name = "model.layers.0.block_sparse_moe.experts.routed_experts.w13_weight"
    parameter = ranks[1]["mixtral-untied-kv1-float32-tp2"]["map"]["parameters"][name]
    prefix = "model.layers.0.block_sparse_moe.experts.3."
    assert parameter["shape"] == [4, 96, 64]
    assert [piece for piece in parameter["pieces"] if piece[0].startswith(prefix)] == [
        [prefix + "w1.weight", [48, 0], [48, 64], 3 * 96 * 64, [64, 1]],
        [prefix + "w3.weight", [48, 0], [48, 64], (3 * 96 + 48) * 64, [64, 1]],
    ]


def test_a_packed_model_has_the_same_pieces(both: tuple[Case, int, Seen]) -> None:
    for seen in both[2]:
        plain, packed = seen["map"]["parameters"], seen["packed"]["parameters"]
        assert list(plain) == list(packed)
        for name in plain:
            assert {**packed[name], "repacked": ""} == plain[name]


def test_tracing_is_deterministic_and_leaves_the_model_as_it_was(both: tuple[Case, int, Seen]) -> None:
    for seen in both[2]:
        assert seen["deterministic"] and seen["packed again"]
        assert seen["change by tracing"] == ""


def test_what_kernels_do_not_read_in_place_is_detected(both: tuple[Case, int, Seen]) -> None:
    """Whatever this CPU packs: an update through the map must reach every kernel, so nothing repacked was called direct."""
    case, _, ranks = both
    for seen in ranks:
        worst = max(seen["packed gaps"].items(), key=lambda item: item[1])
        assert worst[1] < TOLERANCE[case.dtype], worst
        direct = {name for name, p in seen["packed"]["parameters"].items() if not p["repacked"]}
        assert {name for name in direct if "norm" in name} == {
            name for name in seen["map"]["parameters"] if "norm" in name
        }
        if is_mixture(case):  # vLLM packs experts on every CPU
            assert not any("experts." in name and "gate" not in name for name in direct)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_on_a_cpu_without_packed_kernels_all_but_experts_is_direct(ranks: Seen, case: Case) -> None:
    for rank in ranks:
        parameters = rank["without packing"][case.key]["parameters"]
        repacked = {name for name, parameter in parameters.items() if parameter["repacked"]}
        assert repacked == {name for name in parameters if "routed_experts" in name}


def test_with_plain_kernels_parameters_are_live(both: tuple[Case, int, Seen]) -> None:
    case, _, ranks = both
    for seen in ranks:
        live = seen["live"]
        repacked = [name for name, p in live["map"]["parameters"].items() if p["repacked"]]
        assert all("routed_experts" in name for name in repacked)
        assert bool(repacked) == is_mixture(case)
        assert max(live["gaps"].values()) < TOLERANCE[case.dtype]
        assert "lm_head" in live["changed"] and "model.layers.1.self_attn.o_proj" in live["changed"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if not is_mixture(case)], ids=lambda case: case.key)
def test_vllms_own_reload_leaves_parameters_live(ranks: Seen, case: Case, tp: int) -> None:
    for rank in ranks:
        live = rank[f"{case.key}-tp{tp}"]["live"]
        assert live["moved"] == []
        assert live["reloaded map is equal"]
        assert max(live["reloaded gaps"].values()) < TOLERANCE[case.dtype]


def test_tied_weights_are_one_parameter(both: tuple[Case, int, Seen]) -> None:
    case, _, ranks = both
    for seen in ranks:
        parameters = seen["map"]["parameters"]
        assert ("lm_head.weight" in parameters) != case.is_tied
        assert parameters["model.embed_tokens.weight"]["aliases"] == (["lm_head.weight"] if case.is_tied else [])
        assert seen["map"]["unused"] == []
        assert seen["with both names"]["parameters"] == parameters
        assert seen["with both names"]["unused"] == (["lm_head.weight"] if case.is_tied else [])


def test_a_format_without_a_tensor_is_refused(both: tuple[Case, int, Seen]) -> None:
    for seen in both[2]:
        assert "unwritten" in seen["incomplete"] and "model.layers.1.self_attn.qkv_proj.weight" in seen["incomplete"]


def test_an_engine_updated_through_the_map_answers_as_after_its_own_load(ranks: Seen) -> None:
    for rank in ranks:
        seen = rank["engine"]
        assert seen["b loaded"] != seen["a loaded"]
        assert seen["b through the map"] == seen["b loaded"]
        assert seen["repacked when live"] == []
        assert seen["b in place"] == seen["b loaded"]
        assert seen["a loaded again"] == seen["a loaded"]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("name", GRIDS)
def test_layers_of_8_bits_hold_what_vllm_makes_of_the_same_weights(ranks: Seen, kind: str, name: str) -> None:
    """vLLM's own layers, loaders and quantisers; and its kernels where the processor has them (fp8: AMX)."""
    num_layers = 2 // GRIDS[name].get("pp", 1)
    for rank in ranks:
        seen = rank[f"8 bits-{name}"][kind]
        assert [seen[what] for what in seen if what.startswith("other than")] == [[], [], []]
        matrices = (
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "mlp.experts.routed_experts.w13",
            "mlp.experts.routed_experts.w2",
        )
        assert len(seen["8 bits"]) == num_layers * len(matrices)
        # Of other ranks: two of four experts in two layers; or a layer, with 16 matrices. Matrices have scales.
        elsewhere = {"ep2": 2 * 2 * 3 * 2, "dp2_ep2": 2 * 2 * 3 * 2, "pp2": 16 * 2 + 5}
        assert len(seen["unused"]) == elsewhere.get(name, 0)
        assert seen["compared"] == (2 * len(seen["8 bits"]) if kind == "fp8" else 2 * 2 * (4 + 3 * 4))
        # Products in bf16; with int8 the inputs are rounded to 8 bits too.
        assert max(seen.get("gaps", {"": 0.0}).values()) < (0.005 if kind == "fp8" else 0.02)
    geometry = FAMILIES["qwen3_moe"].geometry(Fields(eight_bits_config(None).to_dict(), "config.json", ""))
    grid = EngineGrid(**GRIDS[name])
    assert weight_bytes(geometry, grid, 2, kind) == max(rank[f"8 bits-{name}"][kind]["bytes"] for rank in ranks)
