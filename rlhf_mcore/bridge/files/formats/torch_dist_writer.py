"""Write a ``torch_dist`` checkpoint that Megatron-LM and Megatron-Bridge load in any layout, a few rows at a time."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rlhf_mcore.bridge.files.formats.foreign_pickle import save_chunk, save_index, save_values
from rlhf_mcore.bridge.files.formats.tiles import expert_form
from rlhf_mcore.bridge.files.formats.torch_dist import BACKEND, INDEX
from rlhf_mcore.bridge.files.tensor_files import TensorTypes
from rlhf_mcore.bridge.map.rules import is_padded, parameter_names, row_runs
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.sizes import rope_type, rotary, size
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.model_files import read_config

VOCAB_MULTIPLE = 128  # Megatron-LM's default; the embedding may be loaded at any other padded size
# Transformer Engine modules with numerical state. Loading such a model requires the state, which may be empty.
_STATEFUL = re.compile(
    r"(.*(?:linear_qkv|linear_proj|linear_fc1|linear_fc2|layernorm))\.(?:weight\d*|layer_norm_weight)"
)

ReadRows = Callable[[str, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class Target:
    """The place of a Megatron parameter: ``key[lead]`` in a tensor whose stacked axes have the sizes ``stack``."""

    parameter: str
    key: str
    lead: tuple[int, ...]
    stack: tuple[int, ...]


def _alternates(geometry: ModelGeometry) -> bool:
    """Return whether dense and MoE layers alternate."""
    return geometry.experts is not None and bool(geometry.experts.dense_layers)


def targets(geometry: ModelGeometry) -> Iterator[Target]:
    """Yield every Megatron parameter with its place. Layers are stacked, unless dense and MoE layers alternate."""
    stacked = not _alternates(geometry)
    for name in parameter_names(geometry):
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+?)(?:(?:(?<=\.weight)|(?<=\.bias))(\d+))?", name)
        if not match:
            yield Target(name, name, (), ())
            continue
        layer, tail, expert = int(match.group(1)), match.group(2), match.group(3)
        lead, stack = ((layer,), (geometry.num_layers,)) if stacked else ((), ())
        key = f"decoder.layers.{tail}" if stacked else f"decoder.layers.{layer}.{tail}"
        if expert is not None:
            key = key.replace(".mlp.experts.", ".mlp.experts.experts.")
            lead, stack = (*lead, int(expert)), (*stack, geometry.num_experts)
        yield Target(name, key, lead, stack)


class TorchDistWriter:
    """Write a model's weights into a directory.

    Args:
        types: dtype and shape of the Hugging Face tensors to write.
        read: reads rows of a Hugging Face tensor, in that dtype.
        block_bytes: approximate size of the data in memory, and of one part of the checkpoint.
        file_bytes: approximate size of a file.
    """

    def __init__(
        self, directory: Path, geometry: ModelGeometry, types: TensorTypes, *, block_bytes: int, file_bytes: int
    ):
        self._directory, self._geometry, self._types = directory, geometry, types
        self._block_bytes, self._file_bytes = block_bytes, file_bytes
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._files: list[BinaryIO] = []

    def write(self, read: ReadRows) -> None:
        """Read and write all tensors, then write the index."""
        try:
            for target in targets(self._geometry):
                self._write_parameter(target, read)
                self._write_state(target)
        finally:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        save_index(Metadata(self._tensors, planner_data={}, storage_data=self._stored), self._directory / INDEX)
        description = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        description |= {"common_backend": "torch", "common_backend_version": 1}
        (self._directory / BACKEND).write_text(json.dumps(description))

    def _write_parameter(self, target: Target, read: ReadRows) -> None:
        runs, shape = row_runs(target.parameter, self._geometry)
        dtypes = {self._types[run.hf_name][0] for run in runs}
        if len(dtypes) > 1:
            raise ConfigError(
                f"{target.parameter}: its parts are of {len(dtypes)} dtypes; give --dtype to write them all alike"
            )
        dtype = dtypes.pop()
        if is_padded(target.parameter, self._geometry):
            shape = (padded_vocab(self._geometry), *shape[1:])
        form = expert_form(target.parameter, self._geometry)
        expert = None if form is None else form.to_megatron(read(runs[0].hf_name, runs[0].hf_row, 1))
        # ``read`` hashes a tensor's rows in order. Queries, keys and values of one tensor alternate in Megatron.
        starts = [run.hf_row for run in runs]
        is_joined = starts != sorted(starts) and len({run.hf_name for run in runs}) == 1
        joined = read(runs[0].hf_name, 0, shape[0]) if is_joined else None
        rest = shape[1:]
        step = max(self._block_bytes // max(torch.Size(rest).numel() * dtype.itemsize, 1), 1)
        stored = self._tensors.setdefault(
            target.key, TensorStorageMetadata(TensorProperties(dtype), torch.Size((*target.stack, *shape)), [])
        )
        assert isinstance(stored, TensorStorageMetadata)
        for first in range(0, shape[0], step):
            part = torch.zeros((min(step, shape[0] - first), *rest), dtype=dtype)
            if expert is not None:
                part.copy_(expert[first : first + len(part)])
            for run in runs if expert is None else ():
                low, high = max(run.row, first), min(run.row + run.count, first + len(part))
                if low < high:
                    begin, count = run.hf_row + low - run.row, high - low
                    rows = read(run.hf_name, begin, count) if joined is None else joined[begin : begin + count]
                    part[low - first : high - first] = rows
            offsets = torch.Size((*target.lead, first, *(0 for _ in rest)))
            sizes = torch.Size((*(1 for _ in target.lead), *part.shape))
            self._append(MetadataIndex(target.key, offsets), part.view(sizes))
            stored.chunks.append(ChunkStorageMetadata(offsets, sizes))

    def _write_state(self, target: Target) -> None:
        match = _STATEFUL.fullmatch(target.key)
        if not match:
            return
        at, of = ".".join(map(str, target.lead or (0,))), ".".join(map(str, target.stack or (1,)))
        modules = [match.group(1)]
        if modules[0].endswith("linear_proj"):
            modules.append(modules[0].replace("linear_proj", "core_attention"))
        for module in modules:
            key = f"{module}._extra_state/shard_{at}_{of}"
            if key not in self._tensors:
                self._tensors[key] = BytesStorageMetadata()
                self._append(MetadataIndex(key), [None])

    def _append(self, index: MetadataIndex, value: Tensor | list[None]) -> None:
        if not self._files or self._files[-1].tell() >= self._file_bytes:
            self._files.append((self._directory / f"__0_{len(self._files)}.distcp").open("wb"))
        file = self._files[-1]
        offset = file.tell()
        save_chunk(value, file)
        self._stored[index] = _StorageInfo(os.path.basename(file.name), offset, file.tell() - offset)


def padded_vocab(geometry: ModelGeometry) -> int:
    """Return the number of embedding rows in the checkpoint."""
    return -(-geometry.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def write_common(directory: Path, companions: Path, geometry: ModelGeometry, dtype: torch.dtype) -> None:
    """Write ``common.pt``. Megatron-LM and Megatron-Bridge build the model from its arguments.

    ``companions`` contains config.json.
    """
    settings = _common_settings(dtype) | _sizes(geometry, read_config(companions, str(companions)))
    if FAMILIES[geometry.family].rotates_partly:
        settings["rotary_percent"] = _rotated_share(companions)
    values = {
        "args": Namespace(**settings),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {
            "singleton_local_shards": False,
            "non_homogeneous_layers": _alternates(geometry),
        },
    }
    save_values(values, directory / "common.pt")


def _rotated_share(companions: Path) -> float:
    """Return the rotated share of a head, with transformers' defaults and names of this key."""
    from transformers import AutoConfig

    rope = AutoConfig.from_pretrained(companions, local_files_only=True).rope_parameters
    return float(rope.get("partial_rotary_factor", 1.0))


def _sizes(geometry: ModelGeometry, hf_config: Fields) -> dict[str, Any]:
    g, family = geometry, FAMILIES[geometry.family]
    settings = family.megatron_settings(hf_config)
    has_offset = "glu_linear_offset" in settings
    rope, positions = rotary(hf_config), size(hf_config, "max_position_embeddings")
    return (
        dict(
            num_layers=g.num_layers,
            hidden_size=g.hidden_size,
            ffn_hidden_size=g.ffn_size,
            num_attention_heads=g.num_heads,
            group_query_attention=True,
            num_query_groups=g.num_kv_heads,
            kv_channels=g.head_dim,
            padded_vocab_size=padded_vocab(g),
            make_vocab_size_divisible_by=VOCAB_MULTIPLE,
            vocab_size=g.vocab_size,
            max_position_embeddings=positions,
            seq_length=positions,
            norm_epsilon=hf_config.number("rms_norm_eps", 0.0, 1.0),
            rotary_base=int(rope.number("rope_theta", default=hf_config.number("rope_theta", default=10000.0))),
            use_rope_scaling=rope_type(hf_config) == "llama3",
            rope_scaling_factor=rope.number("factor", default=8.0),
            untie_embeddings_and_output_weights=not g.tied_embeddings,
            add_qkv_bias=False,
            qk_layernorm=False,
            **_experts(g),
            moe_router_pre_softmax=False,
            swiglu=family.activation == "silu" and not has_offset,
            quick_geglu=has_offset,
        )
        | settings
    )


def _common_settings(dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings that all families share. The loaders read some of them without checking that they exist."""
    off = dict.fromkeys(
        (
            "add_bias_linear",
            "apply_layernorm_1p",
            "bias_gelu_fusion",
            "fp16_lm_cross_entropy",
            "fp8_param_gather",
            "init_method_xavier_uniform",
            "init_model_with_meta_device",
            "is_hybrid_model",
            "multi_latent_attention",
            "no_persist_layer_norm",
            "overlap_p2p_comm",
            "qk_l2_norm",
            "rotary_interleaved",
            "squared_relu",
        ),
        False,
    )
    none = dict.fromkeys(
        (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "heterogeneous_layers_config_path",
            "mtp_num_layers",
            "virtual_pipeline_model_parallel_size",
        )
    )
    return dict(
        **off,
        **none,
        add_position_embedding=True,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        bias_swiglu_fusion=True,
        ckpt_format="torch_dist",
        config_logger_dir="",
        context_parallel_size=1,
        cp_comm_type=["p2p"],
        expert_model_parallel_size=1,
        fp16=dtype == torch.float16,
        hidden_dropout=0.0,
        no_save_optim=True,
        no_save_rng=True,
        normalization="RMSNorm",
        params_dtype=dtype,
        pipeline_model_parallel_size=1,
        position_embedding_type="rope",
        rotary_percent=1.0,
        tensor_model_parallel_size=1,
        tokenizer_type="HuggingFaceTokenizer",
        transformer_impl="transformer_engine",
    )


def _experts(g: ModelGeometry) -> dict[str, Any]:
    """Return the arguments that describe MoE layers. A dense model gets Megatron-LM's defaults."""
    if (experts := g.experts) is None:
        return dict(
            num_experts=None,
            moe_ffn_hidden_size=None,
            moe_layer_freq=1,
            moe_router_topk=2,
            moe_grouped_gemm=False,
            moe_shared_expert_intermediate_size=None,
        )
    return dict(
        num_experts=experts.count,
        moe_ffn_hidden_size=experts.ffn_size,
        moe_layer_freq=[int(g.is_moe_layer(i)) for i in range(g.num_layers)] if experts.dense_layers else 1,
        moe_router_topk=experts.per_token,
        moe_grouped_gemm=True,
        moe_shared_expert_intermediate_size=experts.shared_ffn_size or None,
    )
