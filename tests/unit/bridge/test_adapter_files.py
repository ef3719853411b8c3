"""Test PEFT directories: written files, reads by other layouts, and rejected damaged or hostile directories."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.formats.source import AdaptedSource
from rlhf_mcore.bridge.files.hf_files import adapter_config, load, open_adapters
from rlhf_mcore.bridge.files.state_files import STATE_INDEX, RankState, make_index, state_file
from rlhf_mcore.bridge.files.state_reader import StateReader
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.adapters import hf_names
from rlhf_mcore.foreign import MAX_INTEGER
from rlhf_mcore.geometry import AdapterSizes, ExpertSizes, LocalParameter, ModelGeometry, Shard, StateShard
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, base_model, holds_adapter
from tests.trainer_layout import stage_names
from tests.unit.bridge.geometry import GEOMETRY, hf_tensors

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ENDS = ("embed_tokens", "lm_head")
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
# A configuration as PEFT 0.21 saves it.
CONTENT = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "loftq_config": {},
    "lora_alpha": 12,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 3,
    "rank_pattern": {},
    "target_modules": ["v_proj", "q_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": True,
}


def adapters(*targets: str, rank: int = 3) -> ModelGeometry:
    return replace(GEOMETRY, adapter=AdapterSizes(rank, 12.0, targets, use_rslora=True))


def random_tensors(geometry: ModelGeometry) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in hf_shapes(geometry).items()}


def write(directory: Path, tensors: dict[str, Tensor], **changed: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / ADAPTER_CONFIG).write_text(json.dumps(CONTENT | changed))
    save_file(tensors, directory / ADAPTER_WEIGHTS)
    return directory


def empty_parameters(geometry: ModelGeometry, shard: Shard) -> list[LocalParameter]:
    """Return a rank's parameters with undefined values."""
    parameters = []
    for names in stage_names(geometry, ParallelLayout(shard.size, tp=shard.size)):
        for name in names:
            size = sum(piece.numel for piece in pieces(name, geometry, shard))
            parameters.append(LocalParameter(name, torch.full((size,), float("nan")), shard))
    return parameters


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("model.layers.1.*",), LINEAR])
def test_what_is_written_is_read_again_and_has_one_file_of_tensors(tmp_path: Path, targets: tuple[str, ...]) -> None:
    geometry, base = adapters(*targets), tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        (base / name).write_text("{}")
    tensors = random_tensors(geometry)
    save_file(tensors, tmp_path / ADAPTER_WEIGHTS)
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(CONTENT | {"target_modules": sorted(targets)[0]}))
    parameters = empty_parameters(geometry, Shard(0, 1))
    load(parameters, geometry, open_adapters(tmp_path, GEOMETRY)[0])
    (latest := tmp_path / "latest").symlink_to(base)
    made = Exporter(
        parameters, geometry, [str(base)], world_group(), bucket_bytes=100, adapters_of=str(latest), dropout=0.25
    )
    latest.unlink()  # further training of the base moves the link
    paths = made.write(out := tmp_path / "out")
    assert sorted(path.name for path in paths) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS, "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == [ADAPTER_CONFIG, ADAPTER_WEIGHTS, "tokenizer.json"]
    stored = load_file(out / ADAPTER_WEIGHTS)
    assert stored.keys() == tensors.keys() and all(torch.equal(stored[name], tensors[name]) for name in tensors)
    content = json.loads((out / ADAPTER_CONFIG).read_text())
    named = {
        (3, 12, True, 0.25): (content["r"], content["lora_alpha"], content["use_rslora"], content["lora_dropout"]),
        ("LORA", "CAUSAL_LM", "none"): (content["peft_type"], content["task_type"], content["bias"]),
    }
    assert all(key == value for key, value in named.items())
    if "*" in targets[0]:  # adapts one of two layers; a name's end would match both
        assert content["target_modules"] == sorted(
            {name.split("base_model.model.")[1].split(".lora")[0] for name in tensors}
        )
    else:
        assert content["target_modules"] == sorted(targets)
    again = open_adapters(out, GEOMETRY)[1].adapter
    assert again is not None and (again.rank, again.scale) == (3, 12 / 3**0.5)
    assert holds_adapter(out) and base_model(out) == str(base) and not holds_adapter(base)


@pytest.mark.parametrize(
    ("targets", "written"),
    [("all-linear", (12 / 3**0.5 * 3, False)), ("q_proj", (12, True))],
    ids=["experts", "attention"],
)
def test_alpha_of_experts_is_written_so_that_peft_may_double_their_rank(
    targets: str, written: tuple[float, bool]
) -> None:
    mixture = replace(GEOMETRY, family="qwen3_moe", experts=ExpertSizes(2, 4, 1))
    content = adapter_config(replace(mixture, adapter=AdapterSizes(3, 12.0, (targets,), True)), "base")
    assert (content["lora_alpha"], content["use_rslora"]) == written


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_reads_its_part(tmp_path: Path, size: int) -> None:
    geometry = adapters(*LINEAR, *ENDS)
    tensors = random_tensors(geometry)
    reader, read = open_adapters(write(tmp_path / "a", tensors, target_modules=[*LINEAR, *ENDS]), GEOMETRY)
    assert hf_shapes(read) == hf_shapes(geometry)
    counts = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    for rank in range(size):
        load(parameters := empty_parameters(geometry, Shard(rank, size)), read, reader)
        for parameter in parameters:
            for piece in pieces(parameter.name, geometry, parameter.shard):
                part = parameter.tensor.as_strided(piece.shape, piece.strides, piece.offset)
                assert torch.equal(part, tensors[piece.hf_name][piece.slices])
                counts[piece.hf_name][piece.slices] += 1
    assert all((count >= 1).all() for count in counts.values())


@pytest.mark.parametrize(("saved", "read"), [(1, 2), (2, 1), (2, 4)])
def test_state_is_read_in_another_layout_bit_for_bit(tmp_path: Path, saved: int, read: int) -> None:
    geometry = adapters(*LINEAR, *ENDS)
    write(tmp_path / "a", random_tensors(geometry), target_modules=[*LINEAR, *ENDS])
    reader, _ = open_adapters(tmp_path / "a", GEOMETRY)

    def shards(rank: int, size: int) -> list[StateShard]:
        """Return a rank's state, with the values of the matrices."""
        load(parameters := empty_parameters(geometry, Shard(rank, size)), geometry, reader)
        return [
            StateShard(p.name, p.shard, 0, p.tensor.numel(), {"exp_avg": p.tensor, "exp_avg_sq": p.tensor.abs()})
            for p in parameters
        ]

    (training := tmp_path / "training").mkdir()
    states = {rank: RankState(shards(rank, saved), geometry) for rank in range(saved)}
    for rank, state in states.items():
        state.write(training / state_file(rank))
    index = make_index({rank: state.described for rank, state in states.items()}, geometry, {})
    (training / STATE_INDEX).write_text(json.dumps(index))
    stored = StateReader(training, geometry)
    stored.check_whole()
    for rank in range(read):
        wanted, filled = shards(rank, read), shards(rank, read)
        for shard in filled:
            for tensor in shard.tensors.values():
                tensor.fill_(float("nan"))
        stored.read_into(filled)
        for one, other in zip(filled, wanted, strict=True):
            assert all(torch.equal(one.tensors[kind], other.tensors[kind]) for kind in other.tensors), one.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_weight_is_the_sum_that_peft_documents(tmp_path: Path, dtype: torch.dtype) -> None:
    """``W += (B @ A) * alpha / sqrt(r)``, with A and B in fp32, and transposed for an embedding.

    PEFT 0.21 gives the same bits.
    """
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    weights = {name: (tensor / 64).to(dtype) for name, tensor in hf_tensors(GEOMETRY).items()}
    save_file(weights, base / "model.safetensors")
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(adapters("q_proj", "v_proj", *ENDS)).items()}
    source = AdaptedSource(
        write(tmp_path / "adapter", tensors, target_modules=["q_proj", "v_proj", *ENDS]), base, GEOMETRY
    )
    for name, (stored, shape) in source.types.items():
        wanted, (a, b) = weights[name].clone(), hf_names(name.removesuffix(".weight"))
        if a in tensors:
            product = (
                tensors[b].float() @ tensors[a].float() if "embed" not in a else tensors[a].float() @ tensors[b].float()
            )
            wanted += (product.t() if "embed" in a else product) * (12 / 3**0.5)
            assert not torch.equal(wanted, weights[name])
        merged = torch.cat([source.read(name, 0, 3), source.read(name, 3, shape[0] - 3)])
        assert stored == merged.dtype == dtype and torch.equal(merged, wanted), name


def changed_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def changed_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    change(tensors := load_file(directory / ADAPTER_WEIGHTS))
    save_file(tensors, directory / ADAPTER_WEIGHTS)


def link_out(directory: Path) -> None:
    path = directory / ADAPTER_WEIGHTS
    os.rename(path, directory.parent / "elsewhere.safetensors")
    path.symlink_to(directory.parent / "elsewhere.safetensors")


def test_magnitudes_of_an_expert_are_refused(tmp_path: Path) -> None:
    base = replace(GEOMETRY, family="qwen3_moe", experts=ExpertSizes(2, 6, 1))
    geometry = replace(base, adapter=AdapterSizes(3, 12.0, ("up_proj",), use_rslora=True, use_dora=True))
    write(tmp_path / "adapter", random_tensors(geometry), use_dora=True, target_modules=["up_proj"])
    with pytest.raises(
        ConfigError, match=r"use_dora=true, which is not supported for .*experts\.0\.up_proj; train without it"
    ):
        open_adapters(tmp_path / "adapter", base)


HOSTILE_SETTINGS: list[tuple[dict[str, object], list[str]]] = [
    ({"peft_type": "IA3"}, ["peft_type", "IA3"]),
    ({"peft_type": None}, ["peft_type"]),
    ({"use_dora": True}, ["q_proj.lora_magnitude_vector", "missing"]),
    ({"use_dora": 1}, ["use_dora"]),
    ({"bias": "all"}, ["bias", "all"]),
    ({"lora_bias": True}, ["lora_bias"]),
    ({"fan_in_fan_out": True}, ["fan_in_fan_out"]),
    ({"init_lora_weights": "pissa"}, ["init_lora_weights", "path_initial_model_for_weight_conversion"]),
    ({"modules_to_save": ["lm_head"]}, ["modules_to_save"]),
    ({"rank_pattern": {"q_proj": 4}}, ["rank_pattern"]),
    ({"alpha_pattern": {"q_proj": 4}}, ["alpha_pattern"]),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, ["target_parameters"]),
    ({"layer_replication": [[0, 2]]}, ["layer_replication"]),
    ({"r": 0}, ["r=0", "from 1"]),
    ({"r": True}, ["r=True"]),
    ({"r": 2.0}, ["r=2.0"]),
    ({"r": MAX_INTEGER}, [f"r={MAX_INTEGER}"]),
    ({"r": 10**60}, ["r is an integer"]),
    ({"r": 4}, [QUERY.replace(".weight", ""), "[3, 8]", "[4, 8]"]),
    ({"lora_alpha": "16"}, ["lora_alpha='16'"]),
    ({"lora_alpha": -1}, ["lora_alpha=-1"]),
    ({"lora_alpha": float("inf")}, ["lora_alpha"]),
    ({"use_rslora": "yes"}, ["use_rslora='yes'"]),
    ({"target_modules": 5}, ["target_modules=5"]),
    ({"target_modules": ["q_proj"]}, ["target_modules", "v_proj"]),
    ({"base_model_name_or_path": ["a"]}, ["base_model_name_or_path"]),
]
HOSTILE_FILES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no json": (lambda d: (d / ADAPTER_CONFIG).write_text('{"r": 3,'), [ADAPTER_CONFIG, "not valid JSON"]),
    "a list": (lambda d: (d / ADAPTER_CONFIG).write_text("[]"), [ADAPTER_CONFIG, "not a JSON object"]),
    "twice": (lambda d: (d / ADAPTER_CONFIG).write_text('{"r": 1, "r": 2}'), [ADAPTER_CONFIG, "appears twice"]),
    "no config": (lambda d: (d / ADAPTER_CONFIG).unlink(), [ADAPTER_CONFIG, "no such file"]),
    "no tensors": (lambda d: (d / ADAPTER_WEIGHTS).unlink(), [ADAPTER_WEIGHTS, "safe_serialization"]),
    "pickle": (
        lambda d: os.rename(d / ADAPTER_WEIGHTS, d / "adapter_model.bin"),
        [ADAPTER_WEIGHTS, "pickle", "safe_serialization"],
    ),
    "empty": (lambda d: changed_file(d / ADAPTER_WEIGHTS, b""), [ADAPTER_WEIGHTS, "not a readable safetensors"]),
    "cut": (
        lambda d: changed_file(d / ADAPTER_WEIGHTS, (d / ADAPTER_WEIGHTS).read_bytes()[:-9]),
        [ADAPTER_WEIGHTS, "not a readable safetensors"],
    ),
    "huge header": (
        lambda d: changed_file(d / ADAPTER_WEIGHTS, b"\xff" * 8 + b"{}"),
        [ADAPTER_WEIGHTS, "not a readable safetensors"],
    ),
    "link": (link_out, ["a link to", "outside of the directory"]),
    "missing": (lambda d: changed_tensors(d, lambda t: t.pop(QUERY)), [ADAPTER_WEIGHTS, QUERY, "missing"]),
    "additional": (
        lambda d: changed_tensors(
            d, lambda t: t.update({"base_model.model.model.norm.lora_A.weight": torch.ones(3, 8)})
        ),
        [ADAPTER_WEIGHTS, "norm.lora_A", "no linear layer of the model"],
    ),
    "other vocabulary": (
        lambda d: changed_tensors(
            d, lambda t: t.update({"base_model.model.lm_head.base_layer.weight": torch.ones(14, 8)})
        ),
        [ADAPTER_WEIGHTS, "lm_head.base_layer", "[14, 8]", "lm_head.weight"],
    ),
    "dora": (
        lambda d: changed_tensors(
            d, lambda t: t.update({QUERY.replace("A.weight", "magnitude_vector"): torch.ones(8)})
        ),
        [ADAPTER_WEIGHTS, "lora_magnitude_vector"],
    ),
    "other shape": (
        lambda d: changed_tensors(d, lambda t: t.update({QUERY: torch.ones(3, 9)})),
        [ADAPTER_WEIGHTS, QUERY, "[3, 9]", "[3, 8]"],
    ),
    "other dtype": (
        lambda d: changed_tensors(d, lambda t: t.update({QUERY: torch.ones(3, 8, dtype=torch.int8)})),
        [ADAPTER_WEIGHTS, QUERY, "I8"],
    ),
    "nothing": (lambda d: changed_tensors(d, lambda t: t.clear()), [ADAPTER_WEIGHTS, "no tensor"]),
}


def test_settings_that_mean_something_else_are_refused(tmp_path: Path) -> None:
    for number, (changed, named) in enumerate(HOSTILE_SETTINGS):
        here = tmp_path / str(number)
        here.mkdir()
        check_refusal(write(here / "adapter", random_tensors(adapters("q_proj", "v_proj")), **changed), named)


def test_damaged_and_hostile_directories_are_refused(tmp_path: Path) -> None:
    for number, case in enumerate(HOSTILE_FILES):
        here = tmp_path / str(number)
        here.mkdir()
        change, named = HOSTILE_FILES[case]
        directory = write(here / "adapter", random_tensors(adapters("q_proj", "v_proj")))
        change(directory)
        check_refusal(directory, named)


def check_refusal(directory: Path, named: list[str]) -> None:
    """Check that one message names the file and all of ``named``."""
    with pytest.raises(ConfigError) as caught:
        open_adapters(directory, GEOMETRY)
    [message] = caught.value.problems
    assert str(directory) in message and all(text in message for text in named), message
    assert "\n" not in message and len(message) < 1000


def test_a_base_that_is_not_here_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "adapter", {}, base_model_name_or_path="/no/such/model")
    with pytest.raises(ConfigError, match="base_model_name_or_path='/no/such/model'"):
        base_model(directory)
    (tmp_path / "config.json").write_text("{}")
    assert base_model(directory, str(tmp_path)) == str(tmp_path)
