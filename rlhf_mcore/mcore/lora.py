"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) for Megatron's linear layers: y = W x + scale * B A x.

A layer's A and B are its parameters ``lora_a`` and ``lora_b``; W has no gradient. If ranks split W's outputs, each
rank stores the whole of A and its own rows of B. If ranks split W's inputs, each rank stores its own columns of A and
the whole of B. Ranks exchange A x, which is ``rank`` elements per token and matrix.

The embedding and the output layer work like layers with split outputs. Each rank stores the rows of B for its part of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import AdapterSizes
from rlhf_mcore.mcore.attention import WholeLinear
from rlhf_mcore.mcore.layers import HAVE_TE
from rlhf_mcore.plugins import load_plugin


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """A matrix that a layer stores as rows of a joined weight.

    ``a_row`` is the first row of its A. ``b_rows`` are the rows of B for the rows ``rows`` of the weight.
    """

    a_row: int
    rows: tuple[int, ...]
    b_rows: tuple[int, ...]


@dataclass(slots=True)
class Adapters:
    """The adapters of a model, which are turned on and off together."""

    sizes: AdapterSizes
    dropout: float = 0.0
    is_on: bool = True
    role: str = "actor"  # config group, for messages
    _dora: Any = field(init=False, default=None)  # the plug-in, if the adapters use DoRA magnitudes

    def __post_init__(self) -> None:
        if self.sizes.use_dora:
            self._dora = load_plugin("adapters", "dora", f"{self.role}.lora.use_dora=true")

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run the layers without adapters within this block."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def add(self, layer: Any, matrices: Sequence[MatrixRows], num_a: int, name: str, number: str = "") -> None:
        """Add parameters A and B for one weight of a layer. Their values are undefined.

        Args:
            layer: the linear layer.
            matrices: matrices with rows on this rank; equal for all weights of the layer.
            num_a: rows of A, over all matrices of the weight.
            name: name of the weight, for messages.
            number: number of the weight, if one layer contains the weights of several experts.

        Raises:
            ConfigError: this kind of layer does not support adapters.
        """
        form = _form_of(layer, name, self.role)
        path = form.path
        if self.dropout and path.is_expert and path.group.size() > 1:
            raise ConfigError(
                f"{self.role}.lora.dropout={self.dropout} is not supported if several ranks share an expert; set it to 0, or set "
                f"{self.role}.layout.etp to 1"
            )
        weight, rank = getattr(layer, f"weight{number}"), self.sizes.rank
        order = [row for matrix in matrices for row in matrix.b_rows]
        a = torch.nn.Parameter(weight.new_empty(num_a, weight.size(1)))
        b = torch.nn.Parameter(weight.new_empty(len(order), rank))
        layer.register_parameter(f"lora_a{number}", a)
        layer.register_parameter(f"lora_b{number}", b)
        self._fix(layer, a, b)
        path.mark(a, b, getattr(weight, "allreduce", True))
        magnitudes = None
        if self._dora is not None:
            assert not path.is_expert, "checked with the targets"
            split_group = path.group if isinstance(path, _RowPath) else None
            magnitudes = self._dora.build_magnitudes(layer, matrices, self.sizes, split_group)
        if hasattr(layer, "lora_rows"):  # already hooked for another expert's weight
            return
        layer.register_buffer("lora_b_order", torch.tensor(order, device=weight.device), persistent=False)
        rows = torch.tensor([row for matrix in matrices for row in matrix.rows], device=weight.device)
        layer.register_buffer("lora_rows", rows, persistent=False)
        spans = [(matrix.a_row, len(matrix.rows)) for matrix in matrices]
        covers = rows.tolist() == list(range(weight.size(0)))
        in_order = order == list(range(len(order)))

        def product(hidden: Tensor, b: Tensor) -> Tensor:
            rows = b if in_order else b.index_select(0, layer.lora_b_order)
            if num_a == rank:  # a single matrix: nothing to split or concatenate
                return F.linear(hidden, rows)
            each, parts = hidden.split(rank, dim=-1), rows.split([count for _, count in spans])
            return torch.cat(
                [F.linear(each[a // rank], part) for (a, _), part in zip(spans, parts, strict=True)], dim=-1
            )

        def add(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            x, y, bias, counts = form.parts_of(module, inputs, output)
            if not self.is_on:
                return y, bias
            x = path.prepare_input(self._drop_out(x, path, module.training))
            hidden = path.reduce_hidden(_by_expert(F.linear, x, module, "lora_a", counts)) * self.sizes.scale
            added = path.scale_output(_by_expert(product, hidden, module, "lora_b", counts))
            if magnitudes is not None:
                return magnitudes.scale(y, bias, added), bias
            return (y + added if covers else y.index_add(-1, module.lora_rows, added)), bias

        # Run before other hooks, which then process the layer's output including adapters.
        layer.register_forward_hook(add, prepend=True)

    def add_to_end(self, layer: Any) -> None:
        """Add parameters A and B to the embedding or the output layer. Their values are undefined.

        An output layer computes no logits itself: see :meth:`of_logits`. Like PEFT, an embedding uses no dropout.
        """
        weight, rank = layer.weight, self.sizes.rank
        layer.lora_a = torch.nn.Parameter(weight.new_empty(rank, weight.size(1)))
        layer.lora_b = torch.nn.Parameter(weight.new_empty(weight.size(0), rank))
        set_tensor_model_parallel_attributes(layer.lora_b, True, 0, 1)
        self._fix(layer, layer.lora_a, layer.lora_b)
        if not isinstance(layer, VocabParallelEmbedding):
            return
        # Each rank computes A's gradient for its own tokens.
        layer.lora_a.sequence_parallel = layer.reduce_scatter_embeddings

        def add(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            if not self.is_on:
                return output
            return output + F.linear(_rows_of(module, inputs[0], module.lora_b), module.lora_a.t()) * self.sizes.scale

        layer.register_forward_hook(add, prepend=True)

    def _fix(self, layer: Any, a: Tensor, b: Tensor) -> None:
        """Zero the gradients of the rows of A and columns of B that do not learn."""
        rank, fixed = self.sizes.rank, self.sizes.fixed
        if not fixed:
            return
        learns = torch.arange(a.size(0), device=a.device) % rank < rank - fixed
        layer.register_buffer("lora_learns", learns, persistent=False)
        a.register_hook(lambda gradient: gradient * layer.lora_learns[:, None])
        b.register_hook(lambda gradient: gradient * layer.lora_learns[:rank])

    def of_logits(self, layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return scale * A x [N, rank] and B [V_local, rank], or None if there is nothing to add.

        Their product is added to the logits of ``hidden`` [N, h].
        """
        if not self.is_on or not hasattr(layer, "lora_a"):
            return None
        whole = _Path(layer.tp_group, False, False)
        x = self._drop_out(hidden.to(layer.lora_a.dtype), whole, layer.training)
        return F.linear(x, layer.lora_a) * self.sizes.scale, layer.lora_b

    def _drop_out(self, x: Tensor, path: _Path, training: bool) -> Tensor:
        if not (self.dropout and training):
            return x
        if path.inputs_differ:
            with get_cuda_rng_tracker().fork():
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)


@dataclass(frozen=True, slots=True)
class _Path:
    """How a layer's input and A x pass between ranks.

    This base class: every rank has the whole layer, and some or all tokens.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool  # ranks hold different tokens before or after the layer
    is_expert: bool  # the token dispatcher gathers the inputs and sums the outputs

    @property
    def inputs_differ(self) -> bool:
        """Return whether tensor-parallel ranks have different inputs."""
        return self.sequence_parallel

    def prepare_input(self, x: Tensor) -> Tensor:
        """Return the input in the form that A needs."""
        return x

    def reduce_hidden(self, u: Tensor) -> Tensor:
        """Return A x in the form that B needs."""
        return u

    def scale_output(self, product: Tensor) -> Tensor:
        """Return this rank's part of the product, if the outputs of ranks are summed after the layer."""
        return product

    def mark(self, a: Any, b: Any, allreduce: bool) -> None:
        """Mark the parameters for gradient sums and the gradient norm. ``allreduce``: the mark of the weight."""
        for parameter in (a, b):
            parameter.sequence_parallel = self.sequence_parallel

    def _mark(self, split: Any, dim: int, whole: Any, allreduce: bool) -> None:
        """Mark one parameter as split over tensor-parallel ranks, and the other as whole.

        Each rank computes the whole gradient of the whole parameter.
        """
        set_tensor_model_parallel_attributes(split, True, dim, 1)
        whole.sequence_parallel = self.sequence_parallel and not self.is_expert
        for parameter in (split, whole):
            parameter.allreduce = allreduce
        if self.is_expert:
            # Tensor-parallel ranks can have different experts, so the norm counts all, except copies for the same
            # expert.
            set_tensor_model_parallel_attributes(whole, True, 0, 1)
            whole.shared = self.group.rank() > 0


class _ColumnPath(_Path):
    """Ranks have different rows of B and the same A."""

    def prepare_input(self, x: Tensor) -> Tensor:
        # The dispatcher sums the gradient of an expert's input over ranks.
        return _Scaled.apply(x, 1.0, 1.0 / self.group.size()) if self.is_expert else x

    def reduce_hidden(self, u: Tensor) -> Tensor:
        if self.sequence_parallel and not self.is_expert:
            return gather_from_sequence_parallel_region(u, tensor_parallel_output_grad=True, group=self.group)
        return copy_to_tensor_model_parallel_region(u, group=self.group)

    def mark(self, a: Any, b: Any, allreduce: bool) -> None:
        self._mark(b, 0, a, allreduce)


class _RowPath(_Path):
    """Ranks have different columns of A and the same B."""

    @property
    def inputs_differ(self) -> bool:
        return self.group.size() > 1

    def reduce_hidden(self, u: Tensor) -> Tensor:
        if self.sequence_parallel and not self.is_expert:
            return reduce_scatter_to_sequence_parallel_region(u, group=self.group)
        return reduce_from_tensor_model_parallel_region(u, group=self.group)

    def scale_output(self, product: Tensor) -> Tensor:
        return _Scaled.apply(product, 1.0 / self.group.size(), 1.0) if self.is_expert else product

    def mark(self, a: Any, b: Any, allreduce: bool) -> None:
        self._mark(a, 1, b, allreduce)


class _Scaled(torch.autograd.Function):
    """Multiply by one factor, and the gradient by another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, gradient_factor: float) -> Tensor:
        ctx.factor = gradient_factor
        return x * factor

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.factor, None, None  # type: ignore[attr-defined]


def _rows_of(layer: VocabParallelEmbedding, tokens: Tensor, table: Tensor) -> Tensor:
    """Look up tokens [b, T] in a table. Each rank stores the rows [V_local, n] for its part of the vocabulary.

    Returns:
        [b, T, n], or [T / tp, b, n] if the embedding leaves each rank only its own tokens.
    """
    local = tokens - layer.vocab_start_index
    here = (local >= 0) & (local < table.size(0))
    local = torch.where(here, local, 0)
    # Like the embedding itself: the backward pass of F.embedding is not deterministic on CUDA.
    rows = table[local] if layer.deterministic_mode else F.embedding(local, table)
    rows = rows * here.unsqueeze(-1)
    if layer.reduce_scatter_embeddings:
        return reduce_scatter_to_sequence_parallel_region(rows.transpose(0, 1).contiguous(), group=layer.tp_group)
    return reduce_from_tensor_model_parallel_region(rows, group=layer.tp_group)


# The layer's input, its output, its bias if that is added later, and the tokens per expert if it has several experts.
_Parts = tuple[Tensor, Tensor, Tensor | None, list[int] | None]


@dataclass(frozen=True, slots=True)
class _Form:
    """How to add adapters to layers of one class."""

    path: _Path
    parts_of: Callable[[Any, tuple[Any, ...], Any], _Parts]  # takes the layer, its inputs and its output


def _parts_of(layer: Any, inputs: tuple[Any, ...], output: Any) -> _Parts:
    """Return the parts for one of Megatron's own layers."""
    return inputs[0], *output, None


_TE_COLUMN = (TEColumnParallelLinear, TELayerNormColumnParallelLinear, TEColumnParallelGroupedLinear)
_TE_ROW = (TERowParallelLinear, TERowParallelGroupedLinear)


def _te_parts_of(layer: Any, inputs: tuple[Any, ...], output: Any) -> _Parts:
    """Return the parts for one of Transformer Engine's layers.

    A layer can include a norm. It then also returns its normed input, so the norm is computed once. The gradient of the
    norm is the sum over both products. The experts of a layer are one layer, whose input contains their tokens back to
    back.
    """
    x, (y, bias) = inputs[0], output[:2]
    if isinstance(layer, TELayerNormColumnParallelLinear):
        # Megatron returns Transformer Engine's tuple. A bias that is added later is in the middle.
        y, bias, x = output if layer.te_return_bias else (y[0], bias, y[1])
    if not isinstance(layer, (TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)):
        return x, y, bias, None
    return x, y, bias, [int(count) for count in inputs[1]]


def _by_expert(
    multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor, layer: Any, name: str, counts: list[int] | None
) -> Tensor:
    """Multiply x by the parameter ``name``.

    If ``counts`` is given, x contains tokens sorted by expert. They are multiplied by the parameter of their expert.
    """
    if counts is None:
        return multiply(x, getattr(layer, name))
    return torch.cat([multiply(part, getattr(layer, f"{name}{k}")) for k, part in enumerate(x.split(counts))])


def _form_of(layer: Any, name: str, role: str) -> _Form:
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        kind = _ColumnPath if isinstance(layer, ColumnParallelLinear) else _RowPath
        return _Form(kind(layer.tp_group, bool(layer.sequence_parallel), bool(layer.explicit_expert_comm)), _parts_of)
    if isinstance(layer, WholeLinear):
        return _Form(_Path(layer.tp_group, layer.sequence_parallel, False), _parts_of)
    if HAVE_TE:
        if isinstance(layer, TELayerNormColumnParallelLinear):
            layer.return_layernorm_output = True  # without adapters too, so that such runs match bit for bit
        if isinstance(layer, (*_TE_COLUMN, *_TE_ROW)):
            kind = _ColumnPath if isinstance(layer, _TE_COLUMN) else _RowPath
            # The token dispatcher or shared experts communicate for a layer without a mode.
            is_expert = layer.parallel_mode is None
            return _Form(kind(layer._tp_group, layer.sequence_parallel, is_expert), _te_parts_of)
        if isinstance(layer, TELinear):  # neither column nor row parallel: Megatron's "duplicated"
            return _Form(_Path(layer._tp_group, bool(layer.config.sequence_parallel), False), _te_parts_of)
    raise ConfigError(
        f"{role}.lora.rank: {name} is a {type(layer).__name__}, which does not support adapters; set model.layer_spec=local, "
        f"or remove it from {role}.lora.targets"
    )
