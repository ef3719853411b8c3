"""Running a model over microbatches through Megatron's own schedules: forward only, and forward-backward.

A *head* turns the last stage's outputs for one microbatch into per-token tensors; it runs on the last pipeline stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from rlhf_mcore.mcore.ambient import ambient
from rlhf_mcore.mcore.model import MegatronModel, unwrap
from rlhf_mcore.mcore.moe import routers
from rlhf_mcore.parallel.collectives import reduce_sums
from rlhf_mcore.parallel.logprobs import vocab_parallel_logprobs
from rlhf_mcore.types import Microbatch

Metrics = dict[str, Tensor]
Head = Callable[[Tensor, Microbatch], tuple[Tensor, ...]]
LossFunction = Callable[[Tensor, Microbatch], tuple[Tensor, Metrics]]


def policy_head(
    model: MegatronModel, temperature: float, logits: Tensor, microbatch: Microbatch
) -> tuple[Tensor, Tensor]:
    """Logprobs of the next tokens and entropy, in the model layout: shapes of ``microbatch.token_ids``, fp32."""
    labels = microbatch.fields["labels"].to(logits.device)
    return vocab_parallel_logprobs(
        logits,
        labels,
        vocab_size=model.spec.geometry.vocab_size,
        temperature=temperature,
        group=model.groups.collection.tp,
    )


def scalar_head(outputs: Tensor, microbatch: Microbatch) -> tuple[Tensor]:
    """The number that a scalar head gives at each position: shape of ``microbatch.token_ids``, fp32."""
    return (outputs.squeeze(-1),)


def forward(model: MegatronModel, microbatches: Sequence[Microbatch], head: Head) -> list[tuple[Tensor, ...]]:
    """What ``head`` makes of each microbatch, on the host, without gradients. Empty except on the last pipeline stage."""

    def collect(microbatch: Microbatch, outputs: Tensor, non_loss_data: bool = True) -> tuple[Tensor, ...]:
        return tuple(tensor.cpu() for tensor in head(outputs, microbatch))

    for chunk in model.chunks:
        chunk.eval()
    with torch.no_grad():
        return _run(model, microbatches, collect, forward_only=True)


def forward_backward(model: MegatronModel, microbatches: Sequence[Microbatch], loss: LossFunction) -> list[Metrics]:
    """Accumulate gradients of the summed losses and reduce them over ranks.

    ``loss(outputs, microbatch)`` returns a scalar that is already weighted by the global count, and detached metrics. Returns the
    metrics of each microbatch; empty except on the last pipeline stage.
    """

    def compute(microbatch: Microbatch, outputs: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        value, metrics = loss(outputs, microbatch)
        # The schedule divides and scales the returned tensor in place, so what is recorded must be a copy.
        return value, torch.zeros([], dtype=torch.int), {"loss": value.detach().clone(), **metrics}

    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()  # type: ignore[operator]
    if model.aux_loss_coef:
        _weigh_balance(model, microbatches)
    return _run(model, microbatches, compute, forward_only=False)


def _weigh_balance(model: MegatronModel, microbatches: Sequence[Microbatch]) -> None:
    """Start an update: the load-balancing loss is a mean over its tokens, and its sums begin at zero."""
    num_tokens = reduce_sums({"tokens": float(sum(sum(m.lengths) for m in microbatches))}, model.groups.collection.dp)
    for router in routers(model.chunks):
        router.balance_weight = model.aux_loss_coef / max(num_tokens["tokens"], 1.0)
        router.balance_sum = 0.0


def load_balance(model: MegatronModel) -> float:
    """The load-balancing loss of the last update: the sum over layers of the mean over tokens, times its coefficient.

    Collective over the model's ranks.
    """
    local = sum(router.balance_weight * float(router.balance_sum) for router in routers(model.chunks))
    return reduce_sums({"balance": local}, model.groups.collection.intra_dist_opt)["balance"]


def _finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients. The losses are divided by the global count already, so the token count is not passed to Megatron."""
    finalize_model_grads(chunks, None, **kwargs)


def _run(
    model: MegatronModel, microbatches: Sequence[Microbatch], on_logits: Callable[..., Any], forward_only: bool
) -> list[Any]:
    layout, pgs = model.groups.layout, model.groups.collection
    model.config.finalize_model_grads_func = _finalize
    schedule = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp)
    communicator = P2PCommunicator(pp_group=pgs.pp, config=model.config) if layout.pp > 1 else None
    step = partial(_forward_step, model, on_logits)
    with ambient(model.groups, model.platform):
        return schedule(
            forward_step_func=step,
            data_iterator=[iter(microbatches) for _ in model.chunks],
            model=list(model.chunks),
            num_microbatches=len(microbatches),
            seq_length=max(m.token_ids.size(1) for m in microbatches),
            micro_batch_size=microbatches[0].token_ids.size(0),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=communicator,
            pg_collection=pgs,
        )


def _forward_step(
    model: MegatronModel, on_logits: Callable[..., Any], iterator: Iterator[Microbatch], chunk: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    microbatch, device = next(iterator), model.platform.device()
    output = chunk(
        input_ids=microbatch.token_ids.to(device),
        position_ids=microbatch.position_ids.to(device),
        attention_mask=None,
        packed_seq_params=_packed(microbatch, device),
        padding_mask=_padding(model, microbatch, unwrap(chunk)).to(device) if model.aux_loss_coef else None,
    )
    return output, partial(on_logits, microbatch)


def _padding(model: MegatronModel, microbatch: Microbatch, chunk: GPTModel) -> Tensor:
    """True at the tokens that routers leave out of the load-balancing loss, as this chunk wants it."""
    height, width = microbatch.token_ids.shape
    lengths = [sum(microbatch.lengths)] if microbatch.cu_seqlens is not None else microbatch.lengths
    real = torch.tensor(lengths + [0] * (height - len(lengths)))
    mask = torch.arange(width) >= real[:, None]
    if model.config.sequence_parallel and not chunk.pre_process:
        # The first stage cuts the mask as it cuts the embeddings; on the later ones Megatron forgets to.
        mask = mask.chunk(model.groups.layout.tp, dim=1)[model.groups.tp_rank]
    return mask.contiguous()


def _packed(microbatch: Microbatch, device: torch.device) -> PackedSeqParams | None:
    if microbatch.cu_seqlens is None:
        return None
    borders = microbatch.cu_seqlens.to(device)
    length = microbatch.max_seqlen
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=length, max_seqlen_kv=length
    )
