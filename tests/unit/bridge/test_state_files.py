"""Move optimizer state through files between splits, and compare with tensors fused and split without the rules."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mcore.bridge.files.state_files import STATE_INDEX, RankState, make_index, regions, state_file, writes
from rlhf_mcore.bridge.files.state_reader import StateReader, check_scalars
from rlhf_mcore.bridge.files.tensor_files import FileImage, bytes_of
from rlhf_mcore.bridge.map.pieces import Piece, of_interval
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import ModelGeometry, Shard, StateShard
from tests.messages import expect_error
from tests.unit.bridge.geometry import GEOMETRY, geometries, hf_tensors, mcore_tensors

FACTORS = {"master": 1.0, "exp_avg": -2.0, "exp_avg_sq": 0.5}


def make_shards(g: ModelGeometry, tp: int, dp: int, kinds: tuple[str, ...], fill: bool) -> list[list[StateShard]]:
    """Return the shards of each rank of tp x dp: the tensors of a tp rank in a row, split into ``dp`` equal parts."""
    hf, ranks = hf_tensors(g), []
    for tp_rank in range(tp):
        tensors = mcore_tensors(g, hf, tp_rank, tp)
        total = sum(t.numel() for t in tensors.values())
        part = -(-total // dp)
        for dp_rank in range(dp):
            low, high, position, held = dp_rank * part, min((dp_rank + 1) * part, total), 0, []
            for name, tensor in tensors.items():
                start, stop = max(low - position, 0), min(high - position, tensor.numel())
                position += tensor.numel()
                if start < stop:
                    flat = tensor.view(-1)[start:stop].float()
                    state = {k: flat * FACTORS[k] if fill else torch.full_like(flat, torch.nan) for k in kinds}
                    held.append(StateShard(name, Shard(tp_rank, tp), start, stop, state))
            ranks.append(held)
    return ranks


def save(
    directory: Path, g: ModelGeometry, ranks: list[list[StateShard]], scalars: dict[str, Any] | None = None
) -> None:
    described = {}
    for rank, shards in enumerate(ranks):
        state = RankState(shards, g)
        described[rank] = state.described
        if state.described:
            state.write(directory / state_file(rank))
    (directory / STATE_INDEX).write_text(json.dumps(make_index(described, g, scalars or {})))


# ------------------------------------------------------------------------------------------------------------- geometry
@pytest.mark.parametrize(
    ("shape", "begin", "end", "expected"),
    [
        ((10,), 3, 7, [((3,), (4,))]),
        ((4, 5), 0, 20, [((0, 0), (4, 5))]),
        ((4, 5), 3, 17, [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]),
        ((4, 5), 6, 9, [((1, 1), (1, 3))]),
        ((4, 5), 5, 13, [((1, 0), (1, 5)), ((2, 0), (1, 3))]),
        ((4, 5), 7, 7, []),
        (
            (2, 3, 4),
            5,
            14,
            [((0, 1, 1), (1, 1, 3)), ((0, 2, 0), (1, 1, 4)), ((1, 0, 0), (1, 1, 2))],
        ),
    ],
)
def test_an_interval_of_a_matrix_is_few_rectangles(shape: Any, begin: int, end: int, expected: Any) -> None:
    assert list(of_interval(shape, begin, end)) == expected


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_rectangles_hold_exactly_the_interval_in_order(shape: list[int], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(begin, prod(shape)))
    numbers = torch.arange(prod(shape)).view(shape)
    found = [
        numbers[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].reshape(-1)
        for start, size in of_interval(tuple(shape), begin, end)
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(begin, end))
    assert len(found) <= 2 * len(shape) - 1


def test_padding_of_the_vocabulary_is_nobodys() -> None:
    # 13 rows of 8 in two parts of 7 rows. The last row of the second part is padding.
    held = pieces("embedding.word_embeddings.weight", GEOMETRY, Shard(1, 2))
    assert [(r.rectangle, r.offset) for r in regions(held, 44, 56)] == [(((12, 4), (1, 4)), 0)]
    assert regions(held, 48, 56) == []


def test_an_interval_of_what_is_held_transposed_by_hand() -> None:
    # The second of two matrices [2, 3], stored as [3, 2] from element 6 on. Its elements 1 to 5 end one column and
    # contain two more.
    full = torch.arange(12).view(2, 2, 3)
    flat = full[1].T.reshape(-1)
    found = regions([Piece("x", (1, 0, 0), (1, 2, 3), 6, (6, 1, 2))], 7, 12)
    assert [(r.rectangle, r.offset) for r in found] == [
        (((1, 1, 0), (1, 1, 1)), 0),
        (((1, 0, 1), (1, 2, 2)), 1),
    ]
    for region in found:
        assert torch.equal(region.of(flat[1:]), full[region.rectangle.slices()])


def test_of_replicas_one_writes() -> None:
    def writers(name: str, tied: bool = False) -> list[bool]:
        geometry = GEOMETRY if not tied else ModelGeometry(**{**_fields(GEOMETRY), "tied_embeddings": True})
        return [writes(name, geometry, Shard(rank, 2)) for rank in range(2)]

    assert writers("decoder.final_layernorm.weight") == [True, False]
    assert writers("decoder.layers.1.mlp.linear_fc1.weight") == [True, True]
    assert writers("output_layer.weight") == [True, True]
    assert writers("output_layer.weight", tied=True) == [False, False]
    assert writers("embedding.word_embeddings.weight", tied=True) == [True, True]


def _fields(g: ModelGeometry) -> dict[str, Any]:
    return {name: getattr(g, name) for name in ModelGeometry.__dataclass_fields__}


# ---------------------------------------------------------------------------------------------------------- there and back
@settings(max_examples=6, deadline=None)
@given(geometries(), geometries(), st.integers(1, 5), st.integers(1, 5))
def test_any_cut_is_read_back_at_any_other(
    saved_state: tuple[ModelGeometry, int], other: tuple[ModelGeometry, int], dp: int, other_dp: int
) -> None:
    g, tp = saved_state
    other_tp = next(size for size in (other[1], tp) if _fits(g, size))
    kinds = ("master", "exp_avg", "exp_avg_sq") if dp % 2 else ("exp_avg", "exp_avg_sq")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save(directory, g, make_shards(g, tp, dp, kinds, fill=True), {"step": 7})
        wanted = make_shards(g, other_tp, other_dp, kinds, fill=True)
        found = make_shards(g, other_tp, other_dp, kinds, fill=False)
        reader = StateReader(directory, g)
        assert reader.scalars.content == {"step": 7}
        for rank, shards in enumerate(found):
            reader.read_into(shards)
            for shard, expected in zip(shards, wanted[rank], strict=True):
                for kind in kinds:
                    assert torch.equal(shard.tensors[kind], expected.tensors[kind]), (shard.name, kind)


def _fits(g: ModelGeometry, tp: int) -> bool:
    rows = g.num_kv_heads * (g.num_heads // g.num_kv_heads + 2) * g.head_dim
    return rows % tp == 0 and g.num_heads * g.head_dim % tp == 0 and g.ffn_size % tp == 0


def test_the_files_are_plain_safetensors_with_every_element_once(tmp_path: Path) -> None:
    save(tmp_path, GEOMETRY, make_shards(GEOMETRY, 2, 3, ("exp_avg", "exp_avg_sq"), fill=True))
    held = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert len(held) == 6
    assert sum(t.numel() for part in held for t in part.values()) == 2 * sum(map(prod, hf_shapes(GEOMETRY).values()))
    with safe_open(tmp_path / state_file(0), framework="pt") as first:
        key = "exp_avg/model.embed_tokens.weight[0:7,0:8]"
        expected = hf_tensors(GEOMETRY)["model.embed_tokens.weight"][:7].float() * -2.0
        assert torch.equal(first.get_tensor(key), expected)


def test_a_copy_in_memory_is_what_is_written(tmp_path: Path) -> None:
    state = RankState(make_shards(GEOMETRY, 1, 2, ("exp_avg", "exp_avg_sq"), fill=True)[1], GEOMETRY)
    image = FileImage.empty("image", state.layout)
    state.copy_to(image)
    state.write(tmp_path / "file")
    assert image.write(tmp_path) == tmp_path / "image"
    assert (tmp_path / "file").read_bytes() == (tmp_path / "image").read_bytes()


def test_ranks_that_do_not_cover_a_tensor_are_found_out_when_saving() -> None:
    ranks = make_shards(GEOMETRY, 2, 1, ("exp_avg",), fill=True)
    described = {rank: RankState(shards, GEOMETRY).described for rank, shards in enumerate(ranks)}
    with expect_error(ValueError, field="model.embed_tokens.weight", value=(56, 104)):
        make_index({0: described[0]}, GEOMETRY, {})
    with pytest.raises(ValueError, match=r"the ranks hold .* elements"):
        make_index({0: described[0], 1: described[1], 2: described[1]}, GEOMETRY, {})


# ---------------------------------------------------------------------------------------------- some tensors are not trained
NORM = "model.norm.weight"
LAYER = {name for name in hf_shapes(GEOMETRY) if name.startswith("model.layers.0.")}
TRAINED = LAYER | {NORM}


def trained_shards(fill: bool, names: set[str] = TRAINED) -> list[StateShard]:
    """Return the shards of one rank whose Hugging Face tensors are all in ``names``."""
    shards = make_shards(GEOMETRY, 1, 1, ("exp_avg",), fill)[0]
    return [s for s in shards if {piece.hf_name for piece in pieces(s.name, GEOMETRY, s.shard)} <= names]


@pytest.fixture
def saved_part(tmp_path: Path) -> Path:
    """Save the state of one layer and the last norm. Embeddings, output layer and the other layer were frozen."""
    state = RankState(trained_shards(fill=True), GEOMETRY)
    state.write(tmp_path / state_file(0))
    (tmp_path / STATE_INDEX).write_text(json.dumps(make_index({0: state.described}, GEOMETRY, {"step": 3}, TRAINED)))
    return tmp_path


def test_an_index_covers_the_tensors_that_it_declares(saved_part: Path) -> None:
    reader = StateReader(saved_part, GEOMETRY)
    assert reader.covers == TRAINED and reader.scalars.content == {"step": 3}
    found, expected = trained_shards(fill=False), trained_shards(fill=True)
    reader.read_into(found)
    assert len(found) > 5
    for shard, known in zip(found, expected, strict=True):
        assert torch.equal(shard.tensors["exp_avg"], known.tensors["exp_avg"]), shard.name


def test_state_that_an_index_does_not_cover_is_refused(saved_part: Path) -> None:
    frozen = make_shards(GEOMETRY, 1, 1, ("exp_avg",), fill=False)[0]
    with expect_error(ConfigError, field="model.embed_tokens.weight", value="did not train"):
        StateReader(saved_part, GEOMETRY).read_into(frozen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda i: i["tensors"].pop(NORM),
            r"1 tensors differ from its list covers, among them model.norm.weight .missing",
        ),
        (lambda i: i["covers"].remove(NORM), r"1 tensors differ .* model.norm.weight .unknown"),
        (lambda i: i["covers"].append("lm_head.weight"), r"1 tensors differ .* lm_head.weight .missing"),
        (
            lambda i: i["covers"].append("model.adapter"),
            r"it covers 1 tensors that config.json does not define, among them model.adapter",
        ),
        (lambda i: i.__setitem__("covers", [3]), "not a list of texts"),
        (lambda i: i.pop("covers"), "format 2 without covers"),
        (lambda i: i["tensors"][NORM]["regions"].clear(), "model.norm.weight: 8 elements are missing"),
    ],
)
def test_what_differs_from_the_declaration_is_refused(
    saved_part: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    change_index(saved_part, change)
    with pytest.raises(ConfigError, match=message):
        StateReader(saved_part, GEOMETRY).read_into(trained_shards(fill=False))


def test_ranks_that_differ_from_the_declaration_are_found_out_when_saving() -> None:
    held = RankState(trained_shards(fill=True), GEOMETRY).described
    with expect_error(ValueError, field=("rank 0", "model.norm.weight")):
        make_index({0: held}, GEOMETRY, {}, LAYER)
    with expect_error(ValueError, field="lm_head.weight", value=(0, 104)):
        make_index({0: held}, GEOMETRY, {}, TRAINED | {"lm_head.weight"})
    with expect_error(ValueError, field="model.adapter"):
        make_index({0: held}, GEOMETRY, {}, TRAINED | {"model.adapter"})


def test_an_index_of_a_whole_model_is_as_it_always_was(tmp_path: Path) -> None:
    save(tmp_path, GEOMETRY, make_shards(GEOMETRY, 1, 2, ("exp_avg",), fill=True))
    index = json.loads((tmp_path / STATE_INDEX).read_text())
    assert index.keys() == {"format", "files", "tensors", "scalars"} and index["format"] == 1
    assert index["tensors"][NORM] == {"shape": [8], "regions": [[1, [0], [8]]], "kinds": ["exp_avg"]}
    assert StateReader(tmp_path, GEOMETRY).covers == hf_shapes(GEOMETRY).keys()


# -------------------------------------------------------------------------------------------------------------- bad input
@pytest.fixture
def saved_state(tmp_path: Path) -> Path:
    save(tmp_path, GEOMETRY, make_shards(GEOMETRY, 1, 2, ("exp_avg", "exp_avg_sq"), fill=True))
    return tmp_path


def change_index(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((directory / STATE_INDEX).read_text())
    change(index)
    (directory / STATE_INDEX).write_text(json.dumps(index))


def read_all(directory: Path, kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> list[Tensor]:
    shards = make_shards(GEOMETRY, 1, 1, kinds, fill=False)[0]
    StateReader(directory, GEOMETRY).read_into(shards)
    return [shard.tensors["exp_avg"] for shard in shards]


NORM = "model.norm.weight"
DELETED = object()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i["files"].__setitem__(0, "../state-00000.safetensors"), "not a plain file"),
        (lambda i: i["files"].__setitem__(0, "/etc/passwd"), "not a plain file"),
        (lambda i: i["files"].__setitem__(0, "state-00009.safetensors"), "state-00009.safetensors is missing"),
        (lambda i: i["files"].__setitem__(0, 3), r"index\.json has files=.*, not a list of texts"),
        (lambda i: i.__setitem__("format", 3), "format 3 is not supported; this version reads 1 and 2"),
        (lambda i: i.__setitem__("format", 2), "format 2 without covers"),
        (lambda i: i.__setitem__("covers", [NORM]), "format 1 with covers"),
        (lambda i: i.pop("scalars"), "not an index"),
        (lambda i: i["tensors"].pop(NORM), "model.norm.weight .missing"),
        (lambda i: i["tensors"].__setitem__("other", {}), "other .unknown"),
        (lambda i: i["tensors"][NORM].__setitem__("shape", [9]), r"model.norm.weight: shape \[9\]"),
        (lambda i: i["tensors"][NORM].__setitem__("kinds", ["grad"]), "model.norm.weight: kinds"),
        (lambda i: i["tensors"][NORM]["regions"].clear(), "model.norm.weight: 8 elements are missing"),
        (lambda i: i["tensors"][NORM]["regions"][0].__setitem__(0, -1), "is not a valid region"),
        (lambda i: i["tensors"][NORM]["regions"][0].__setitem__(1, [-1]), "is not a valid region"),
        (lambda i: i["tensors"][NORM]["regions"][0].__setitem__(2, [10**12]), "is not a valid region"),
        (lambda i: i["tensors"][NORM]["regions"][0].__setitem__(2, [True]), "is not a valid region"),
        (lambda i: i["tensors"][NORM]["regions"][0].__setitem__(2, [4]), r"\[0:4\] is missing"),
        (
            lambda i: i["tensors"][NORM]["regions"].append([1, [0], [8]]),
            "model.norm.weight: some elements are stored twice",
        ),
        (lambda i: i["tensors"].__setitem__(NORM, i["tensors"]["lm_head.weight"]), "model.norm.weight: shape"),
    ],
)
def test_a_hostile_index_is_refused(saved_state: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    change_index(saved_state, change)
    with pytest.raises(ConfigError, match=message):
        read_all(saved_state)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("exp_avg_sq", -1e-12, f"exp_avg_sq of tensor {NORM} is a mean of squares and has a value of -1e-12"),
        ("exp_avg_sq", torch.nan, f"exp_avg_sq of tensor {NORM} has values that are not finite"),
        ("exp_avg_sq", torch.inf, f"exp_avg_sq of tensor {NORM} has values that are not finite"),
        ("exp_avg", torch.nan, f"exp_avg of tensor {NORM} has values that are not finite"),
        ("exp_avg", -torch.inf, f"exp_avg of tensor {NORM} has values that are not finite"),
    ],
)
def test_a_state_that_no_optimizer_can_have_come_to_is_refused(
    tmp_path: Path, kind: str, value: float, message: str
) -> None:
    ranks = make_shards(GEOMETRY, 1, 1, ("exp_avg", "exp_avg_sq"), fill=True)
    (norm,) = (shard for shard in ranks[0] if shard.name == "decoder.final_layernorm.weight")
    norm.tensors[kind][3] = value
    save(tmp_path, GEOMETRY, ranks)
    shards = make_shards(GEOMETRY, 1, 1, ("exp_avg", "exp_avg_sq"), fill=False)[0]
    with pytest.raises(ConfigError, match=message):
        StateReader(tmp_path, GEOMETRY).read_into(shards)


SCALER = {"scale": 65536.0, "growth_tracker": 3, "hysteresis_tracker": -2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_scale": DELETED}, "expected .*'loss_scale'"),
        ({"more": 1}, "scalars .*'more'"),
        ({"step": -1}, "scalars.step=-1, not an integer"),
        ({"step": 1.0}, r"scalars.step=1\.0, not an integer"),
        ({"step": True}, "scalars.step=True, not an integer"),
        ({"step": 6}, "Adam's step=6 is more than num_updates=5"),
        ({"num_updates": None}, "has no scalars.num_updates"),
        ({"num_bad_updates": -1}, "scalars.num_bad_updates=-1, not an integer"),
        ({"loss_scale": 65536.0}, r"scalars.loss_scale=65536\.0, not an object"),
        ({"loss_scale": {"scale": 1.0}}, "an object with scale, growth_tracker and hysteresis_tracker"),
        ({"loss_scale": {**SCALER, "scale": float("nan")}}, "scale=nan, not a number"),
        ({"loss_scale": {**SCALER, "scale": 0}}, "scale=0, not a positive number"),
        ({"loss_scale": {**SCALER, "scale": "1"}}, "scale='1', not a number"),
        ({"loss_scale": {**SCALER, "growth_tracker": 0.5}}, r"growth_tracker=0\.5, not an integer"),
    ],
)
def test_counts_and_loss_scales_that_no_optimizer_can_have_are_refused(change: dict[str, Any], message: str) -> None:
    good = {"step": 4, "num_updates": 5, "num_bad_updates": 0, "loss_scale": SCALER}
    check_scalars(Fields(good, "index.json", "remedy"))
    check_scalars(Fields({**good, "loss_scale": None}, "index.json", "remedy"))
    content = {name: value for name, value in {**good, **change}.items() if value is not DELETED}
    with pytest.raises(ConfigError, match=message):
        check_scalars(Fields(content, "index.json", "remedy", "scalars."))


@pytest.mark.parametrize("text", ["", "[]", "{" * 100_000, '{"format": 1}', "\xff"])
def test_an_index_that_is_none_is_refused(saved_state: Path, text: str) -> None:
    (saved_state / STATE_INDEX).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="index"):
        read_all(saved_state)


def test_a_file_that_leads_outside_is_refused(saved_state: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "state"
    (saved_state / state_file(0)).rename(elsewhere)
    (saved_state / state_file(0)).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="not a plain file in this directory"):
        read_all(saved_state)


def test_files_that_do_not_hold_what_the_index_says_are_refused(saved_state: Path) -> None:
    path = saved_state / state_file(1)
    data = path.read_bytes()
    whole = safetensors.torch.load(data)  # not memory-mapped, because the file is overwritten below
    path.write_bytes(data[: len(data) // 2])
    with expect_error(ConfigError, field="state-00001.safetensors", value="safetensors file"):
        read_all(saved_state)
    path.write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(ConfigError, match="not a readable safetensors file"):
        read_all(saved_state)
    save_file({name: tensor.double() for name, tensor in whole.items()}, path)
    with expect_error(ConfigError, field="state-00001.safetensors", value="torch.float64"):
        read_all(saved_state)


def test_a_kind_that_was_not_saved_is_named(saved_state: Path) -> None:
    with expect_error(ConfigError, field=("model.embed_tokens.weight", "master"), remedy=("model.dtype", "optimizer")):
        read_all(saved_state, ("master", "exp_avg"))


def test_a_tensor_that_was_written_can_leave_the_device() -> None:
    """If numpy gets a view of a storage, the storage can never be resized again."""
    tensor = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    data = bytes_of(tensor)
    assert bytes(data) == b"\xc0\x3f\x00\xc0"  # the upper halves of 0x3fc00000 and 0xc0000000
    del data
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
