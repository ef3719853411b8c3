"""Running a model over microbatches through Megatron's own schedules: forward only, and forward-backward.

A *head* turns the last stage's logits of one microbatch into per-token tensors; it runs on the last pipeline stage only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from rlhf_mcore.mcore.ambient import ambient
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.parallel.logprobs import vocab_parallel_logprobs
from rlhf_mcore.types import Microbatch

Metrics = dict[str, Tensor]
LossFunction = Callable[[Tensor, Tensor, Microbatch], tuple[Tensor, Metrics]]


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


def forward_logprobs(
    model: MegatronModel, microbatches: Sequence[Microbatch], temperature: float
) -> list[tuple[Tensor, Tensor]]:
    """Logprobs and entropy of each microbatch, on the host, without gradients. Empty except on the last pipeline stage."""

    def collect(microbatch: Microbatch, logits: Tensor, non_loss_data: bool = True) -> tuple[Tensor, Tensor]:
        logprobs, entropy = policy_head(model, temperature, logits, microbatch)
        return logprobs.cpu(), entropy.cpu()

    for chunk in model.chunks:
        chunk.eval()
    with torch.no_grad():
        return _run(model, microbatches, collect, forward_only=True)


def forward_backward(
    model: MegatronModel, microbatches: Sequence[Microbatch], temperature: float, loss_function: LossFunction
) -> list[Metrics]:
    """Accumulate gradients of the summed losses and reduce them over ranks.

    ``loss_function(logprobs, entropy, microbatch)`` returns a scalar that is already weighted by the global count, and
    detached metrics. Returns the metrics of each microbatch; empty except on the last pipeline stage.
    """

    def compute(microbatch: Microbatch, logits: Tensor) -> tuple[Tensor, Tensor, Metrics]:
        logprobs, entropy = policy_head(model, temperature, logits, microbatch)
        value, metrics = loss_function(logprobs, entropy, microbatch)
        # The schedule divides and scales the returned tensor in place, so what is recorded must be a copy.
        return value, torch.zeros([], dtype=torch.int), {"loss": value.detach().clone(), **metrics}

    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()  # type: ignore[operator]
    return _run(model, microbatches, compute, forward_only=False)


def _finalize(chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients. The losses are divided by the global count already, so the token count is not handed on."""
    finalize_model_grads(chunks, None, **kwargs)


def _run(
    model: MegatronModel, microbatches: Sequence[Microbatch], on_logits: Callable[..., Any], forward_only: bool
) -> list[Any]:
    layout, pgs = model.groups.layout, model.groups.collection
    model.config.finalize_model_grads_func = _finalize
    schedule = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp)
    communicator = P2PCommunicator(pp_group=pgs.pp, config=model.config) if layout.pp > 1 else None
    step = partial(_forward_step, model.platform.device(), on_logits)
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
    device: torch.device, on_logits: Callable[..., Any], iterator: Iterator[Microbatch], chunk: torch.nn.Module
) -> tuple[Tensor, Callable[..., Any]]:
    microbatch = next(iterator)
    output = chunk(
        input_ids=microbatch.token_ids.to(device),
        position_ids=microbatch.position_ids.to(device),
        attention_mask=None,
        packed_seq_params=_packed(microbatch, device),
    )
    return output, partial(on_logits, microbatch)


def _packed(microbatch: Microbatch, device: torch.device) -> PackedSeqParams | None:
    if microbatch.cu_seqlens is None:
        return None
    borders = microbatch.cu_seqlens.to(device)
    length = microbatch.max_seqlen
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=length, max_seqlen_kv=length
    )


def broadcast_from_last_stage(model: MegatronModel, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """A host tensor of the last pipeline stage, on every rank of its pipeline (fp32)."""
    if model.groups.layout.pp == 1:
        assert tensor is not None
        return tensor
    out = tensor if tensor is not None else torch.empty(shape, dtype=torch.float32)
    dist.broadcast(out, model.groups.last_stage_rank, group=model.groups.collection.pp)
    return out
