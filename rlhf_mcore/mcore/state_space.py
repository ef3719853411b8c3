"""State-space layers of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): packed or padded, with tensor and context parallelism.

They run in plain torch, or on CUDA with the kernels of mamba-ssm and causal-conv1d if they are installed
(``kernels.py``).

Megatron's mixer requires these kernels and a GPU. The parameters here use its names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


@dataclass(frozen=True, slots=True)
class SpaceKernels:
    """Kernels of causal-conv1d and mamba-ssm under their own names.

    The input contains ``batch`` rows of equal length, or one row of sequences that ``numbers`` numbers.
    """

    causal_conv1d_fn: Callable[..., Tensor]
    mamba_chunk_scan_combined: Callable[..., Tensor]
    batch: int = 1
    numbers: Tensor | None = None  # [1, N] int32: the sequence of each token

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Compute ``causal_convolution`` with a bias, and apply SiLU."""
        rows = self._rows(x.contiguous()).transpose(1, 2)
        out = self.causal_conv1d_fn(rows, weight, bias, seq_idx=self.numbers, activation="silu")
        return out.transpose(1, 2).flatten(0, 1)

    def scan(self, x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor, skip: Tensor) -> Tensor:
        """Compute ``selective_scan`` plus ``skip`` [H] times x, in the dtype of ``x``."""
        rows = [self._rows(each) for each in (x, step)]
        states = [self._rows(each) for each in (b, c)]
        out = self.mamba_chunk_scan_combined(*rows, rate, *states, chunk_size=128, D=skip, seq_idx=self.numbers)
        return out.flatten(0, 1)

    def _rows(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.batch, -1))


class StateSpace(HeadMixer):
    """Mix tokens with a selective state space instead of attention.

    A convolution runs over the last tokens. Each head keeps a state that decays, and to which each token is added. A
    gate multiplies the output, which is then normalised by group.

    A tensor-parallel rank computes some of the groups, and the heads that use them. ``in_proj`` outputs gates and
    inputs of the heads, then the input and output projections of the groups' states (B and C), and a time step for
    each head.

    Under context parallelism each rank computes some of these heads for all tokens, because a state depends on all of
    them. Gates and norms are computed for the rank's own tokens.
    """

    kernels: SpaceKernels | None = None

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
        c, tp, self._cp = config, pg_collection.tp, pg_collection.cp
        assert c.mamba_num_heads
        self.groups, self.heads = c.mamba_num_groups // tp.size(), c.mamba_num_heads // tp.size()
        self.state_dim, self.head_dim, self.eps = c.mamba_state_dim, c.mamba_head_dim, c.layernorm_epsilon
        self._shares = share_heads(self.groups, self.heads, self._cp.size())
        self._mine = self._shares[self._cp.rank()]
        inner, states = c.mamba_num_heads * self.head_dim, c.mamba_num_groups * self.state_dim
        shared: dict[str, Any] = dict(config=c, bias=False, is_expert=False, tp_group=tp)
        self.in_proj = in_proj(
            c.hidden_size,
            2 * (inner + states) + c.mamba_num_heads,
            init_method=c.init_method,
            gather_output=False,
            skip_bias_add=False,
            **shared,
        )
        channels = (inner + 2 * states) // tp.size()
        self.conv1d = _Convolution(c, channels, 1, c.linear_conv_kernel_dim)
        self.norm = NamedWeight(c, inner // tp.size())
        self.dt_bias, self.A_log, self.D = (
            torch.nn.Parameter(torch.empty(self.heads, dtype=c.params_dtype)) for _ in range(3)
        )
        for split in (*self.conv1d.parameters(), *self.norm.parameters(), self.dt_bias, self.A_log, self.D):
            set_tensor_model_parallel_attributes(split, True, 0, 1)
        self.out_proj = out_proj(
            inner,
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
        inner = self.heads * self.head_dim
        mixed = self.in_proj(hidden_states)[0]  # [s, b, outputs of this rank]
        gate, mixed = mixed.tensor_split([inner], dim=-1)
        out = self.mix(mixed, self.head_dim, packed_seq_params)
        out = checkpoint(self._gate, out, gate, use_reentrant=False, preserve_rng_state=False)
        return self.out_proj(out.contiguous())

    def kinds_of(self, heads: Heads) -> tuple[tuple[int, range, int], ...]:
        """List inputs, B, C and time steps."""
        groups = (self.groups, heads.keys, self.state_dim)
        return (self.heads, heads.values, self.head_dim), groups, groups, (self.heads, heads.values, 1)

    def kernels_for(self, batch: int, packed: PackedSequences | None) -> SpaceKernels | None:
        if self.kernels is None:
            return None
        return replace(self.kernels, batch=batch, numbers=None if packed is None else _number(packed))

    def mix_heads(
        self, mixed: Tensor, lengths: NDArray[np.int64], kernels: SpaceKernels | None, tree: PrefixTree | None
    ) -> Tensor:
        """Map [N, inputs, B, C and time steps of this rank's heads] to [N, its heads * head_dim]."""
        mine, heads, groups = self._mine, len(self._mine.values), len(self._mine.keys)
        inner, states = heads * self.head_dim, groups * self.state_dim
        convolved, step = mixed.tensor_split([inner + 2 * states], dim=-1)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias.view(-1)
        if self._cp.size() > 1:
            channels = self.columns_of(mine, weight.device)[: convolved.size(-1)]
            weight, bias = (x.index_select(0, channels) for x in (weight, bias))
        local = slice(mine.values.start, mine.values.stop)
        dt_bias, rate, skip = (x[local].float() for x in (self.dt_bias, self.A_log, self.D))
        step, rate = F.softplus(step.float() + dt_bias), -rate.exp()
        if tree is not None:
            assert kernels is None, "such a model shares nothing"
            convolved = F.silu(convolve_paths(convolved, weight, tree) + bias)
        elif kernels is None:
            convolved = F.silu(causal_convolution(convolved, weight, lengths) + bias)
        else:
            convolved = kernels.convolve(convolved, weight, bias)
        x, b, c = convolved.split([inner, states, states], dim=-1)
        x = x.unflatten(-1, (heads, self.head_dim))
        b, c = (each.unflatten(-1, (groups, self.state_dim)) for each in (b, c))
        if len(set(mine.uses)) > 1:  # ranks share a group unevenly, so each head gets its own copy
            b, c = mine.repeat_keys(b), mine.repeat_keys(c)
        if kernels is not None:
            out = kernels.scan(x, step, rate, b, c, skip)
        else:
            out = skip[:, None] * x.float()
            if tree is None:
                out = out + selective_scan(rate, x, step, b, c, lengths)[0]
            else:
                scan = partial(selective_scan, rate)
                out = out + run_by_depth(scan, (x, step, b, c), torch.zeros_like(out), tree)
        return out.to(mixed.dtype).flatten(1)

    def _gate(self, out: Tensor, gate: Tensor) -> Tensor:
        """Multiply [s, b, inner] by gates, and normalise each group."""
        wide = (out.float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.norm.weight * normed.flatten(-2).to(out.dtype)


class _Convolution(NamedWeight):
    """A kernel [channels, 1, K] and a bias for each channel."""

    def __init__(self, config: TransformerConfig, channels: int, *kernel: int | None):
        super().__init__(config, channels, *kernel)
        self.bias = torch.nn.Parameter(torch.empty(channels, dtype=config.params_dtype))


def _number(packed: PackedSequences) -> Tensor:
    """Return the number of the sequence of each token, [1, N] int32 on the device."""
    counts = packed.cu_seqlens_q.diff()
    numbers = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
    return numbers.repeat_interleave(counts, output_size=sum(packed.sizes))[None]


def selective_scan(
    rate: Tensor,
    x: Tensor,
    step: Tensor,
    b: Tensor,
    c: Tensor,
    lengths: NDArray[np.int64],
    initial: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run the recurrence of Mamba-2 over sequences back to back, in fp32.

    This is section 6 of arXiv 2405.21060. The state S [S, P] of each head starts at zero in every sequence:
        S_t = exp(step_t rate) S_{t-1} + b_t (step_t x_t)^T,  y_t = S_t^T c_t.

    Within a chunk, token i reads token j <= i by c_i b_j exp(d_i - d_j). Here d is the sum of step * rate since the
    start of the chunk. The heads of a group share b and c.

    Args:
        rate: [H], negative.
        x: [N, H, P].
        step: [N, H], not negative.
        b, c: [N, G, S]; G divides H.
        lengths: lengths of the sequences.
        initial: [sequences, G, S, P of all heads of the group] initial states; None: zero.

    Returns:
        y [N, H, P] fp32, and the final states. Concatenated, these are in the order of ``rank_by_chunks``.
    """
    places, sizes = chunk_places(lengths)
    places, count = places.to(x.device), sum(sizes)
    groups, (heads, width) = b.size(1), x.shape[1:]

    def split_into_chunks(x: Tensor) -> Tensor:
        """Map [N, H, ...] to [chunks, H, CHUNK, ...]. Positions without a token are zero and have no effect."""
        rows = x.new_zeros(count * CHUNK, *x.shape[1:]).index_copy(0, places, x)
        return rows.unflatten(0, (count, CHUNK)).transpose(1, 2)

    def by_group(x: Tensor) -> Tensor:
        """Map [chunks, H, rows, P] to [chunks, G, rows, P of all heads of the group]."""
        return x.unflatten(1, (groups, heads // groups)).transpose(2, 3).flatten(3)

    added, b, c = (split_into_chunks(each.float()) for each in (x * step[..., None], b, c))
    total = split_into_chunks(step * rate).cumsum(dim=-1)  # sum since the start of the chunk
    before = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    faded = (total[..., :, None] - total[..., None, :]).masked_fill(~before, -torch.inf).exp()
    inside = ((c @ b.mT).repeat_interleave(heads // groups, dim=1) * faded) @ added
    writes = b.mT @ by_group(added * (total[..., -1:] - total).exp()[..., None])  # [chunks, G, S, P of all heads]
    ends = by_group(total[..., -1].exp()[..., None, None].expand(-1, -1, 1, width))
    state, states, ended, first = torch.zeros_like(writes[: sizes[0]]), list[Tensor](), list[Tensor](), 0
    if initial is not None:
        state = state.index_copy(0, torch.from_numpy(rank_by_chunks(lengths)).to(x.device), initial)
    for size in sizes:  # the first chunks of all sequences, then the second chunks of longer sequences, and so on
        now = slice(first, first + size)
        ended.append(state[size:])
        states.append(state := state[:size])
        state = state * ends[now] + writes[now]
        first += size
    read = (c @ torch.cat(states)).unflatten(3, (heads // groups, width)).transpose(2, 3).flatten(1, 2)
    out = inside + read * total.exp()[..., None]
    return out.transpose(1, 2).flatten(0, 1).index_select(0, places), [state, *ended[::-1]]
