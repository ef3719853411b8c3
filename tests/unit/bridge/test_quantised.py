"""Compare the two 8-bit quantisers with slow versions under every split, and sync their values into engines."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import Rectangle, view
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run import quantised
from rlhf_mcore.bridge.run.endpoints import EngineDestinations
from rlhf_mcore.bridge.run.quantised import dequantise, largest_magnitudes, quantise, scales_of
from rlhf_mcore.bridge.run.sync import PlannedBridge
from rlhf_mcore.families.quantised import FP8_OF_TRAINING, QUANTISATIONS, Quantisation, quantisation
from rlhf_mcore.geometry import GroupedSizes, LocalParameter, ModelGeometry, Shard
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.planning.inputs import EngineGrid
from rlhf_mcore.protocols import SyncMismatch
from tests.engine_layout import engine_tensors
from tests.planned_bridge import planned_bridge
from tests.unit.bridge.eight_bits import amax_of_blocks, of_training, slow, slow_values
from tests.unit.bridge.engine import Engine
from tests.unit.bridge.geometry import BLOCKS, hf_tensors, mcore_tensors
from tests.unit.pairs import each_value

KINDS = list(QUANTISATIONS.values())


def whole(weight: Tensor, kind: Quantisation) -> tuple[Tensor, Tensor]:
    """Quantise a whole tensor."""
    largest = largest_magnitudes(weight, (0, 0), kind)
    eight = torch.empty(weight.shape, dtype=getattr(torch, kind.dtype))
    quantise(weight, (0, 0), largest, kind, eight)
    return eight, scales_of(largest, kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (300, 100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantisers_are_the_slow_ones(kind: Quantisation, shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)).to(dtype)
    weight[:, 0] = 0
    weight[0] = 0  # a row of zeros has a scale too
    values, scales = slow(weight, kind)
    eight, found = whole(weight, kind)
    assert torch.equal(found, scales)
    assert torch.equal(eight.float(), values)
    back = torch.empty(shape)
    dequantise(eight, (0, 0), found, kind, back)
    of_elements = scales.repeat_interleave(kind.block[0], 0)[: shape[0]]
    if kind.name == "fp8":
        of_elements = of_elements.repeat_interleave(128, 1)[:, : shape[1]]
    assert torch.equal(back, values * of_elements)


def test_the_values_of_a_small_row_by_hand() -> None:
    row = torch.tensor([[-2.55, 2.55, 0.01, 0.03, 0.0]])
    eight, scale = whole(row, QUANTISATIONS["int8"])
    assert scale.item() == pytest.approx(0.02, rel=1e-6)
    assert eight.tolist() == [[-128, 127, 0, 2, 0]]  # ties go to even, and larger values to the end of the range
    eight, scale = whole(torch.tensor([[448.0, -1.0, 17.0, 19.0, 0.001, 0.0009]]), QUANTISATIONS["fp8"])
    assert scale.item() == 1
    assert eight.float().tolist() == [[448.0, -1.0, 16.0, 20.0, 2.0**-9, 0.0]]


OF_TRAINING = quantisation(FP8_OF_TRAINING)


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (300, 100)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_trained_with_is_what_transformer_engine_makes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """The kernel multiplies by 448 / amax, rounded to fp32, and stores the reciprocal. Both are fp32 operations."""
    generator = torch.Generator().manual_seed(7)
    weight = (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)).to(dtype)
    weight[:128, :100] = 0  # a block of zeros in the narrow matrix
    weight[128:, :] *= 1e-7  # blocks whose largest magnitude is below 1e-4
    eight, scales = whole(weight, OF_TRAINING)
    values, known = of_training(weight)
    assert torch.equal(scales, known) and torch.equal(eight.float(), values)
    exact = amax_of_blocks(weight).double() / 448  # the published formula, in float64
    assert torch.where(exact > 0, (known.double() / exact - 1).abs(), 0).max() < 2**-23


def test_the_two_ways_differ_by_roundings_alone() -> None:
    """vLLM divides by 448 and multiplies by the reciprocal. Transformer Engine does the opposite, so ties round differently."""
    weight = (torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    (one, scales), (other, others) = whole(weight, QUANTISATIONS["fp8"]), whole(weight, OF_TRAINING)
    assert ((scales / others - 1).abs() <= 2**-23).all() and not torch.equal(scales, others)
    steps = (one.view(torch.uint8).int() - other.view(torch.uint8).int()).abs()
    assert steps.max() == 1 and 0 < (steps > 0).float().mean() < 0.002


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("head_dim", "ffn_size", "equal"), [(128, 512, True), (64, 512, False), (128, 320, False)])
def test_blocks_of_a_ranks_own_layers_are_those_that_are_sent(
    tp: int, head_dim: int, ffn_size: int, equal: bool
) -> None:
    """Layers quantise a rank's part: queries, keys and values group by group, gate before up, some of the columns."""
    sizes = ModelGeometry("llama", 1, 192, GroupedSizes(8, 4, head_dim), ffn_size, 13, False)
    generator = torch.Generator().manual_seed(2)
    hf = {
        name: torch.randn(tensor.shape, generator=generator) * torch.rand(tensor.shape, generator=generator)
        for name, tensor in hf_tensors(sizes).items()
    }
    sent = {name: whole(tensor, OF_TRAINING) for name, tensor in hf.items() if is_matrix(name)}
    scales = {
        name: scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(hf[name]), : hf[name].shape[1]]
        for name, (_, scale) in sent.items()
    }
    differing = set()
    for rank in range(tp):
        held = mcore_tensors(sizes, hf, rank, tp)
        of_sent = [
            mcore_tensors(sizes, hf | given, rank, tp)
            for given in ({n: e.float() for n, (e, _) in sent.items()}, scales)
        ]
        for name in (name for name in held if ".linear_" in name and name.endswith(".weight")):
            values, own = of_training(held[name])
            own = own.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(values), : values.shape[1]]
            if not (torch.equal(values, of_sent[0][name]) and torch.equal(own, of_sent[1][name])):
                differing.add(name.rpartition("linear_")[2])
    assert (differing == set()) == equal, differing


@pytest.mark.parametrize("kind", [*KINDS, OF_TRAINING], ids=lambda kind: kind.name + "-trained" * kind.of_training)
@pytest.mark.parametrize("cuts", [(64, 100), (128, 128), (1, 257), (37, 300)], ids=str)
def test_parts_of_a_tensor_have_the_bits_of_the_whole(kind: Quantisation, cuts: tuple[int, int]) -> None:
    weight = torch.randn(259, 300, generator=torch.Generator().manual_seed(1))
    eight, scales = whole(weight, kind)
    largest = torch.zeros(scales.shape)
    parts = [
        Rectangle((row, column), (min(cuts[0], 259 - row), min(cuts[1], 300 - column)))
        for row in range(0, 259, cuts[0])
        for column in range(0, 300, cuts[1])
    ]
    for part in parts:
        at = Rectangle(*kind.blocks(part.start, part.shape)).slices()
        largest[at] = torch.maximum(largest[at], largest_magnitudes(weight[part.slices()], part.start, kind))
    assert torch.equal(scales_of(largest, kind), scales)
    for part in parts:
        found = torch.empty(part.shape, dtype=eight.dtype)
        at = Rectangle(*kind.blocks(part.start, part.shape)).slices()
        quantise(weight[part.slices()], part.start, largest[at], kind, found)
        assert torch.equal(found.view(torch.uint8), eight[part.slices()].view(torch.uint8))


def test_an_engine_has_the_weights_that_the_policy_computes_with(trainer: Trainer) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine, OF_TRAINING, verify=True)
    for version in (0, 1):
        bridge.sync(version)
        for name, tensor in trainer.hf.items():
            assert torch.equal(engine.tensors[name], spread(*of_training(tensor)) if is_matrix(name) else tensor), name
        trainer.update(version + 1)


def spread(values: Tensor, scales: Tensor) -> Tensor:
    return values * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(values), : values.shape[1]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("first", [0, 37, 128])
def test_rows_that_are_converted_at_a_time_have_the_bits_of_all(
    kind: Quantisation, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 of the 411 rows of a large matrix are quantised at a time. They start inside blocks."""
    weight = torch.randn(first + 411, 300, generator=torch.Generator().manual_seed(2))
    values, scales = slow(weight, kind)
    part, start = weight[first:], (first, 0)
    blocks = Rectangle(*kind.blocks(start, tuple(part.shape))).slices()
    own, of_whole = scales[blocks], largest_magnitudes(weight, (0, 0), kind)[blocks]
    monkeypatch.setattr(quantised, "ELEMENTS", 64 * 300)
    largest = largest_magnitudes(part, start, kind)
    if first % kind.block[0] == 0:  # otherwise the first block would contain earlier rows
        assert torch.equal(scales_of(largest, kind), own)
    assert torch.equal(scales_of(largest, kind)[1:], own[1:])
    eight, back = torch.empty(part.shape, dtype=getattr(torch, kind.dtype)), torch.empty(part.shape)
    quantise(part, start, of_whole, kind, eight)
    assert torch.equal(eight.float(), values[first:])
    dequantise(eight, start, own, kind, back)
    assert torch.equal(back, slow_values(weight, kind)[first:])


class Trainer:
    """A model in fp32 on one rank with random weights, and its bridges."""

    def __init__(self) -> None:
        self.hf: dict[str, Tensor] = {}
        self.parameters: list[LocalParameter] = []
        self.update(0)

    def update(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hf = {
            name: torch.randn(t.shape, generator=generator) * torch.rand(t.shape, generator=generator)
            for name, t in hf_tensors(BLOCKS).items()
        }
        held = mcore_tensors(BLOCKS, self.hf, 0, 1)
        self.parameters = self.parameters or [LocalParameter(n, t.clone(), Shard(0, 1)) for n, t in held.items()]
        for parameter in self.parameters:
            parameter.tensor.copy_(held[parameter.name])

    def bridge(self, engine: Engine, kind: Quantisation, **options: Any) -> PlannedBridge:
        return planned_bridge(
            self.parameters,
            BLOCKS,
            engine,
            world_group(),
            bucket_bytes=50_000,
            poison=True,
            quantisation=FP8_OF_TRAINING if kind.of_training else kind.name,
            **options,
        )  # type: ignore[arg-type]

    def values(self, kind: Quantisation) -> dict[str, Tensor]:
        """Return the values that an engine must compute with: products of the slow version, and tensors without 8-bit versions."""
        return {name: slow_values(t, kind) if is_matrix(name) else t for name, t in self.hf.items()}


def is_matrix(name: str) -> bool:
    return "_proj.weight" in name


@pytest.fixture
def trainer(world: None) -> Trainer:
    return Trainer()


def engine_of(trainer: Trainer) -> Engine:
    return Engine({name: tensor.shape for name, tensor in trainer.hf.items()}, torch.float32)


@each_value(
    ("kind", list(KINDS)),
    ("verify", [False, True]),
)
def test_an_engine_has_the_values_of_8_bits(trainer: Trainer, kind: Quantisation, verify: bool) -> None:
    engine = engine_of(trainer)
    bridge = trainer.bridge(engine, kind, verify=verify)
    for version in (0, 1):
        stats = bridge.sync(version)
        assert engine.policy_version == version
        expected = trainer.values(kind)
        assert [name for name, tensor in engine.tensors.items() if not torch.equal(tensor, expected[name])] == []
        trainer.update(version + 1)
    assert stats.local_bytes == sum(tensor.nbytes for tensor in trainer.hf.values())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_sync_of_some_tensors_brings_their_values(trainer: Trainer, kind: Quantisation) -> None:
    engine, changing = engine_of(trainer), ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight"]
    bridge = trainer.bridge(engine, kind, verify=True, changing=changing)
    bridge.sync(0)
    old = trainer.values(kind)
    trainer.update(1)
    bridge.sync(1)
    new = trainer.values(kind)
    for name, tensor in engine.tensors.items():
        is_new = name in changing
        assert torch.equal(tensor, (new if is_new else old)[name]), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_sync_of_some_tensors_leaves_the_others_of_a_fused_one(trainer: Trainer, kind: Quantisation) -> None:
    """The engine fuses queries and values with the synced keys. Padding after each becomes zero."""
    live = []
    for made in engine_tensors(BLOCKS, EngineGrid(), 0):
        numel = prod(made.shape)
        padding = min((begin for begin, _ in made.padding), default=numel), numel + 5
        live.append(EngineParameter(made.name, (numel + 5,), torch.float32, made.pieces, (padding,)))
    engine = Engine({parameter.name: parameter.shape for parameter in live}, torch.float32)
    for tensor in engine.model.parameters():
        tensor.fill_(7)
    brought = "model.layers.0.self_attn.k_proj.weight"
    bridge = trainer.bridge(engine, kind, verify=True, traced=EngineMap(tuple(live)), changing=[brought])
    bridge.sync(0)
    old = trainer.values(kind)
    trainer.update(1)
    bridge.sync(1)
    expected, tensors = old | {brought: trainer.values(kind)[brought]}, engine.tensors
    for parameter in live:
        assert tensors[parameter.name][-5:].tolist() == [0] * 5
        for piece in parameter.pieces:
            found = view(tensors[parameter.name].view(-1), piece)
            assert torch.equal(found, expected[piece.hf_name][piece.slices]), piece.hf_name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_changed_bit_of_a_value_is_noticed(
    trainer: Trainer, kind: Quantisation, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, buffer = engine_of(trainer), "model.layers.1.self_attn.q_proj.weight"
    bridge = trainer.bridge(engine, kind, verify=True)
    close = EngineDestinations.close

    def tamper(landing: EngineDestinations, bucket: Bucket) -> None:
        close(landing, bucket)
        if buffer in bucket.destination_buffers:
            landing.open(bucket)[buffer].view(torch.uint8)[0] ^= 1

    monkeypatch.setattr(EngineDestinations, "close", tamper)
    with pytest.raises(SyncMismatch, match=f"1 of .*{buffer}$"):
        bridge.sync(0)
    assert engine.policy_version == -1
