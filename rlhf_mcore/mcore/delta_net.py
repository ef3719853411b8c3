"""Gated delta nets (Yang et al. 2024, arXiv 2412.06464): packed or padded, with tensor and context parallelism.

They run in plain torch, or on CUDA with the kernels of flash-linear-attention if it is installed (``kernels.py``).

Megatron's own layer requires kernels from other packages. In Megatron 0.16 it does not support packed sequences. The
parameters here use its names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.data.prefixes import PrefixTree
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.mcore.recurrence import (
    CHUNK,
    HeadMixer,
    Heads,
    NamedWeight,
    causal_convolution,
    chunk_places,
    convolve_paths,
    rank_by_chunks,
    run_by_depth,
    share_heads,
)
from rlhf_mcore.parallel.context import SummedGradient


@dataclass(frozen=True, slots=True)
class DeltaKernels:
    """Kernels of flash-linear-attention under their own names.

    The input contains ``batch`` rows of equal length, or one row that ``borders`` divides into sequences.
    """

    causal_conv1d: Callable[..., tuple[Tensor, None]]
    chunk_gated_delta_rule: Callable[..., tuple[Tensor, None]]
    batch: int = 1
    borders: Tensor | None = None  # [num_sequences + 1] int32

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute ``causal_convolution`` and apply SiLU."""
        out = self.causal_conv1d(self._rows(x), weight, activation="silu", cu_seqlens=self.borders)[0]
        return out.flatten(0, 1)

    def apply_rule(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Compute ``gated_delta_rule`` in the dtype of ``q``. Queries and keys can have any norm."""
        rows = map(self._rows, (q, k, v, decay, beta))
        out = self.chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=self.borders)[0]
        return out.flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.batch, -1))


class GatedDeltaNet(HeadMixer):
    """Mix tokens with a gated delta net instead of attention.

    A convolution runs over the last tokens. Each head keeps a state that decays and is corrected. A gate multiplies
    the output.

    A tensor-parallel rank computes some of the key heads, and the value heads that use them. ``in_proj`` outputs
    queries, keys, values and output gates. For each value head it also outputs the strength of corrections (beta) and
    the rate of decay (alpha).

    Under context parallelism each rank computes some of these heads for all tokens, because a state depends on all of
    them.
    """

    fla: DeltaKernels | None = None

    def __init__(
        self,
        config: TransformerConfig,
        in_proj: type[torch.nn.Module],
        out_proj: type[torch.nn.Module],
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **kwargs: Any,
    ):
        super().__init__()
        c, self._tp, self._cp = config, pg_collection.tp, pg_collection.cp
        assert c.linear_num_key_heads and c.linear_num_value_heads and c.linear_key_head_dim and c.linear_value_head_dim
        ranks = self._tp.size()
        self.keys, self.values = c.linear_num_key_heads // ranks, c.linear_num_value_heads // ranks
        self.key_dim, self.value_dim = c.linear_key_head_dim, c.linear_value_head_dim
        self.eps = c.layernorm_epsilon
        self._shares = share_heads(self.keys, self.values, self._cp.size())
        self._mine = self._shares[self._cp.rank()]
        all_values = c.linear_num_value_heads * c.linear_value_head_dim
        outputs = 2 * (c.linear_num_key_heads * c.linear_key_head_dim + all_values + c.linear_num_value_heads)
        shared: dict[str, Any] = dict(config=c, bias=False, is_expert=False, tp_group=self._tp)
        self.in_proj = in_proj(
            c.hidden_size, outputs, init_method=c.init_method, gather_output=False, skip_bias_add=False, **shared
        )
        channels = 2 * self.keys * self.key_dim + self.values * self.value_dim
        self.conv1d = NamedWeight(c, channels, 1, c.linear_conv_kernel_dim)
        self.dt_bias = torch.nn.Parameter(torch.empty(self.values, dtype=c.params_dtype))
        self.A_log = torch.nn.Parameter(torch.empty(self.values, dtype=c.params_dtype))
        for split in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(split, True, 0, 1)
        self.out_norm = NamedWeight(c, self.value_dim)
        self.out_proj = out_proj(
            all_values,
            c.hidden_size,
            init_method=c.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **shared,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [s, b, hidden] to the same shape, and return no bias. Packed input has b = 1.

        Under sequence parallelism, s counts this rank's part of the tokens.
        """
        mixed = self.in_proj(hidden_states)[0]  # [s, b, outputs of this rank]
        return self.out_proj(self.mix(mixed, self.value_dim, packed_seq_params).contiguous())

    def kinds_of(self, heads: Heads) -> tuple[tuple[int, range, int], ...]:
        """List queries, keys, values, gates, betas and alphas."""
        keys, values = (self.keys, heads.keys, self.key_dim), (self.values, heads.values, self.value_dim)
        scalars = (self.values, heads.values, 1)
        return keys, keys, values, values, scalars, scalars

    def kernels_for(self, batch: int, packed: PackedSequences | None) -> DeltaKernels | None:
        borders = None if packed is None else packed.cu_seqlens_q
        return None if self.fla is None else replace(self.fla, batch=batch, borders=borders)

    def mix_heads(
        self, mixed: Tensor, lengths: NDArray[np.int64], fla: DeltaKernels | None, tree: PrefixTree | None
    ) -> Tensor:
        """Map [N, ``in_proj`` outputs of this rank's heads] to [N, its value heads * value_dim]."""
        mine, keys, values = self._mine, len(self._mine.keys), len(self._mine.values)
        key_size, value_size = keys * self.key_dim, values * self.value_dim
        channels = 2 * key_size + value_size
        qkv, gate, beta, alpha = mixed.split([channels, value_size, values, values], dim=-1)
        kernels, local = self.conv1d.weight.squeeze(1), slice(mine.values.start, mine.values.stop)
        if self._cp.size() > 1:
            kernels = kernels.index_select(0, self.columns_of(mine, kernels.device)[:channels])
        if tree is not None:
            assert fla is None, "such a model shares nothing"
            qkv = F.silu(convolve_paths(qkv, kernels, tree))
        else:
            qkv = F.silu(causal_convolution(qkv, kernels, lengths)) if fla is None else fla.convolve(qkv, kernels)
        query, key, value = qkv.split([key_size, key_size, value_size], dim=-1)
        q, k = (x.unflatten(-1, (keys, self.key_dim)) for x in (query, key))
        decay = -self.A_log[local].float().exp() * F.softplus(alpha.float() + self.dt_bias[local].float())
        v, beta = value.unflatten(-1, by_head := (values, self.value_dim)), beta.float().sigmoid()
        if fla is None:
            q, k = (mine.repeat_keys(_unit(x)) for x in (q, k))
            if tree is None:
                out, _ = gated_delta_rule(q, k, v, decay, beta, lengths)
            else:
                out = delta_rule_of_paths(q, k, v, decay, beta, tree)
        else:
            out = fla.apply_rule(mine.repeat_keys(q), mine.repeat_keys(k), v, decay, beta)
        out = self._norm_heads(out.to(value.dtype)) * F.silu(gate.float()).unflatten(-1, by_head)
        return out.to(value.dtype).flatten(1)

    def _norm_heads(self, x: Tensor) -> Tensor:
        """Normalise each head. The heads of all ranks share one weight."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return SummedGradient.apply(self.out_norm.weight, self._tp) * normed.to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """Scale each head to norm one, in fp32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)


def delta_rule_of_paths(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, tree: PrefixTree) -> Tensor:
    """Apply the gated delta rule to a tree."""
    out = q.new_zeros(len(q), q.size(1), v.size(-1), dtype=torch.float32)
    return run_by_depth(gated_delta_rule, (q, k, v, decay, beta), out, tree)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: NDArray[np.int64],
    initial: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Apply the gated delta rule to sequences back to back, in fp32.

    This is equation 10 of arXiv 2412.06464, in the chunks of section 3.3. The state S [K, V] of each head starts at
    zero in every sequence:
        S' = exp(decay_t) S_{t-1},  S_t = S' + k_t beta_t (v_t - S'^T k_t)^T,  o_t = S_t^T q_t / sqrt(K).

    Within a chunk, the corrections u of all tokens solve
        (1 + L) u = beta (v - exp(d) S^T k),  L_ij = beta_i exp(d_i - d_j) k_i k_j for j < i.
    Here d is the sum of decays since the start of the chunk, and S is the state at the start.

    Args:
        q, k: [N, H, K] with norm one.
        v: [N, H, V].
        decay, beta: [N, H]; decays are not positive.
        lengths: lengths of the sequences.
        initial: [sequences, H, K, V] initial states; None: zero.

    Returns:
        o [N, H, V] fp32, and the final states. Concatenated, these are in the order of ``rank_by_chunks``.
    """
    places, sizes = chunk_places(lengths)
    places, count = places.to(q.device), sum(sizes)

    def split_into_chunks(x: Tensor) -> Tensor:
        """Map [N, H, ...] to [chunks, H, CHUNK, ...]. Positions without a token are zero and have no effect."""
        rows = x.new_zeros(count * CHUNK, *x.shape[1:]).index_copy(0, places, x)
        return rows.unflatten(0, (count, CHUNK)).transpose(1, 2)

    q, k, v, beta = (split_into_chunks(x.float()) for x in (q * q.size(-1) ** -0.5, k, v, beta[..., None]))
    total = split_into_chunks(decay).cumsum(dim=-1)  # sum since the start of the chunk
    before = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    faded = (total[..., :, None] - total[..., None, :]).masked_fill(~before, -torch.inf).exp()
    since = total.exp()[..., None]
    system = beta * (k @ k.mT) * faded
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * since * k], dim=-1), upper=False, unitriangular=True
    )
    own, of_state = solved.split([v.size(-1), k.size(-1)], dim=-1)
    reads, inside = q * since, (q @ k.mT) * faded
    writes, ends = k * (total[..., -1:] - total).exp()[..., None], since[..., -1:, :]
    state, parts, first, ended = q.new_zeros(0), [], 0, list[Tensor]()
    if initial is not None:
        state = torch.empty_like(initial).index_copy(0, torch.from_numpy(rank_by_chunks(lengths)).to(q.device), initial)
    for size in sizes:  # the first chunks of all sequences, then the second chunks of longer sequences, and so on
        now = slice(first, first + size)
        if first == 0 and initial is None:
            corrections, out = own[now], inside[now] @ own[now]
            state = writes[now].mT @ corrections
        else:
            ended.append(state[size:])
            state = state[:size]
            corrections = own[now] - of_state[now] @ state
            out = reads[now] @ state + inside[now] @ corrections
            state = state * ends[now] + writes[now].mT @ corrections
        parts.append(out)
        first += size
    return torch.cat(parts).transpose(1, 2).flatten(0, 1).index_select(0, places), [state, *ended[::-1]]
