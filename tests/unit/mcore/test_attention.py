"""Parts of attention go together: a made-up layer with all of them equals plain Megatron layers and a few lines by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.families.base import Family
from rlhf_mcore.families.gemma3_text import FAMILY as GEMMA
from rlhf_mcore.mcore.attention import set_window_frequencies
from rlhf_mcore.mcore.groups import ModelGroups, use_groups
from rlhf_mcore.mcore.layers import layer_spec
from rlhf_mcore.mcore.model_spec import load_spec, transformer_config
from rlhf_mcore.platform import current_platform
from tests.distributed.models import make
from tests.unit.mcore.test_model import groups

__all__ = ["groups"]
pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]
WINDOW, WHOLE = 1, 3  # numbers of layers of the model below: every third one attends to all tokens
TOKENS, HEADS, GROUPS, SIZE = 7, 4, 2, 32


@pytest.fixture
def config(groups: ModelGroups, tmp_path: Path) -> TransformerConfig:
    make("gemma3_text", tmp_path)
    current_platform().prepare_megatron()
    return transformer_config(
        load_spec(tmp_path),
        groups,
        current_platform(),
        dtype="fp32",
        recompute=RecomputeConfig(),
        fused=False,
        deterministic=False,
    )


@pytest.mark.parametrize(("gates", "norms_all", "layer"), product([False, True], [False, True], [WINDOW, WHOLE]))
def test_gates_windows_and_norms_of_projections_go_together(
    config: TransformerConfig, groups: ModelGroups, gates: bool, norms_all: bool, layer: int
) -> None:
    torch.manual_seed(layer)
    config.attention_output_gate = gates
    attention = build(config, replace(GEMMA, norm_of_projections=norms_all), layer, groups)
    hidden = torch.randn(TOKENS, 2, config.hidden_size)
    model, own = (1.0 / base ** (torch.arange(0, SIZE, 2) / SIZE) for base in (1e6, 1e4))
    angles = {freq: rotation(freq, groups) for freq in (model, own)}
    chunk = SimpleNamespace(
        config=config,
        rotary_pos_emb=angles[model],
        decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=layer, self_attention=attention)]),
    )
    set_window_frequencies(chunk, own)  # type: ignore[arg-type]
    found, _ = attention(hidden, None, rotary_pos_emb=angles[model](TOKENS))

    config.attention_output_gate = False
    rows = attention.linear_qkv.weight.view(GROUPS, -1, config.hidden_size)
    queries = HEADS // GROUPS * SIZE
    plain = build(config, replace(GEMMA, windows=None, norm_of_projections=norms_all), layer, groups)
    plain.linear_proj.weight.data = torch.eye(HEADS * SIZE)
    for name in ("q_layernorm", "k_layernorm"):
        getattr(plain, name).weight.data = getattr(attention, name).weight.data
    # A group of a gated layer has its queries, their gates, its key and its value.
    kept = torch.cat([rows[:, :queries], rows[:, queries * (1 + gates) :]], dim=1)
    plain.linear_qkv.weight.data = kept.flatten(0, 1)
    heads, _ = plain(hidden, None, rotary_pos_emb=angles[own if layer == WINDOW else model](TOKENS))
    if gates:
        heads = heads * (hidden @ rows[:, queries : 2 * queries].flatten(0, 1).mT).sigmoid()
    torch.testing.assert_close(found, heads @ attention.linear_proj.weight.mT)


@pytest.mark.parametrize("layer", [WINDOW, WHOLE])
def test_windows_sinks_and_gates_go_together(config: TransformerConfig, groups: ModelGroups, layer: int) -> None:
    torch.manual_seed(layer)
    config.attention_output_gate, config.softmax_type = True, "learnable"
    attention = build(config, GEMMA, layer, groups)
    tensors = [torch.randn(TOKENS, 2, config.hidden_size, requires_grad=True), *attention.parameters()]
    own, model = (rotation(1.0 / base ** (torch.arange(0, SIZE, 2) / SIZE), groups) for base in (1e4, 1e6))
    chunk = SimpleNamespace(
        config=config,
        rotary_pos_emb=model,
        decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=layer, self_attention=attention)]),
    )
    set_window_frequencies(chunk, own.inv_freq)  # type: ignore[arg-type]
    found, _ = attention(tensors[0], None, rotary_pos_emb=model(TOKENS))
    window = config.window_size[0] + 1 if layer == WINDOW else TOKENS
    expected = slow_attention(attention, config, tensors[0], 1e4 if layer == WINDOW else 1e6, window)
    assert window == TOKENS or window < TOKENS - 1, "the window hides tokens"
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weights).sum(), tensors) for out in (found, expected)]
    assert all(gradient.any() for gradient in gradients[0])
    torch.testing.assert_close(*gradients)


def slow_attention(layer: Any, config: TransformerConfig, hidden: Tensor, base: float, window: int) -> Tensor:
    """Attend one head of one sequence at a time, with a window, a sink and gates, from the layer's parameters."""
    angles = torch.arange(TOKENS)[:, None] / base ** (torch.arange(0, SIZE, 2) / SIZE)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    hidden_keys = (distance < 0) | (distance >= window)

    def normalise(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.layernorm_epsilon).sqrt() * (1 + weight)

    def rotate(x: Tensor) -> Tensor:
        left, right = x.split(SIZE // 2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    per_group = HEADS // GROUPS
    rows = layer.linear_qkv.weight.view(GROUPS, 2 * per_group + 2, SIZE, -1)  # queries, gates, key, value
    sequences = []
    for x in hidden.unbind(1):
        heads = []
        for head in range(HEADS):
            group, number = divmod(head, per_group)
            query = rotate(normalise(x @ rows[group, number].T, layer.q_layernorm.weight))
            key = rotate(normalise(x @ rows[group, -2].T, layer.k_layernorm.weight))
            scores = (query @ key.T * config.softmax_scale).masked_fill(hidden_keys, -torch.inf)
            sink = layer.core_attention.softmax_offset[head].expand(TOKENS, 1)
            shares = torch.cat([scores, sink], dim=1).softmax(1)[:, :-1]
            heads.append(shares @ (x @ rows[group, -1].T) * (x @ rows[group, per_group + number].T).sigmoid())
        sequences.append(torch.cat(heads, dim=1) @ layer.linear_proj.weight.T)
    return torch.stack(sequences, dim=1)


def rotation(inv_freq: Tensor, groups: ModelGroups) -> RotaryEmbedding:
    made = RotaryEmbedding(SIZE, 1.0, use_cpu_initialization=True, cp_group=groups.collection.cp)
    made.inv_freq = inv_freq
    return made


def build(config: TransformerConfig, family: Family, layer: int, groups: ModelGroups) -> torch.nn.Module:
    spec = layer_spec(config, "local", family, ("attention", "dense")).submodules.self_attention
    with use_groups(groups, current_platform()):
        model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
        made = build_module(spec, config=config, layer_number=layer, pg_collection=groups.collection)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made
