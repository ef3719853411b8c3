"""The tokens that vLLM draws each token from, after top-k and top-p: vLLM calls them its sampling mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_mcore.rollout.engine import InFlight, ragged_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from rlhf_mcore.config.schema.rollout import SamplingConfig
    from rlhf_mcore.types import Ragged, Request

_RECORDS = "records_support"  # among the extra arguments of a request's sampling parameters


def extra_args(request: Request) -> dict[str, Any] | None:
    """Return the extra arguments of a request's sampling parameters."""
    return {_RECORDS: True} if request.sampling.records_support else None


def support_of(drawn: Any) -> Ragged[NDArray[np.int32]] | None:
    """Return the supports of a vllm.CompletionOutput, or None where vLLM has recorded nothing."""
    if drawn.sampling_mask is None:
        return None
    return ragged_ids(drawn.sampling_mask.token_ids[: len(drawn.token_ids)])


def not_recorded(sampling: SamplingConfig, model: str) -> str:
    """Say that vLLM's model runner cannot record them."""
    return (
        f"rollout.sampling.top_p={sampling.top_p:g}, top_k={sampling.top_k}: updates need the tokens that each was drawn from, which "
        f"vLLM does not record with the model runner that it has for {model}; set top_p=1 and top_k=-1, or rollout.engine=hf"
    )


def record_masks(engine: Any, runner: Any, *, on_cuda: bool) -> None:
    """Let the completions of an engine (vllm.v1.LLMEngine) have them. On CUDA it was started with ``return_sampling_mask``."""
    if on_cuda:
        # It is looked at again only to refuse requests without top_k, which evaluations may be.
        engine.model_config.return_sampling_mask = False
    else:
        _return_masks_on_cpu(runner, engine.engine_core.engine_core.scheduler)


def record_where_wanted(engine: Any, runner: Any, in_flight: Mapping[int, InFlight]) -> None:
    """Record nothing where nobody asks for it: on CUDA vLLM records for all requests or none, at a cost in time and memory."""
    records = {each.handle: each.request.sampling.records_support for each in in_flight.values()}
    runner.sampler.return_sampling_mask = any(records.values())
    for handle, state in engine.output_processor.request_states.items():
        if not records.get(handle):
            state.sampling_mask_chunks.clear()


def _return_masks_on_cpu(runner: Any, scheduler: Any) -> None:
    """Let completions have the tokens that each of theirs was drawn from, as with vLLM's ``return_sampling_mask``.

    vLLM 0.32 finds them in its second model runner alone, which is not for CPUs; the way from a runner to the completions is for both.
    Logprobs are gathered from the distributions of the draws, also where drafts were verified.
    """
    gather, sample, sample_tokens = runner.sampler.gather_logprobs, runner._sample, runner.sample_tokens
    distributions: list[Tensor] = []  # [rows, V], of the pass
    masks: list[Any] = []

    def gather_logprobs(logprobs: Tensor, *args: Any, **kwargs: Any) -> Any:
        distributions[:] = [logprobs]
        return gather(logprobs, *args, **kwargs)

    def sample_and_look(*args: Any, **kwargs: Any) -> Any:
        distributions.clear()
        output = sample(*args, **kwargs)
        if distributions:
            masks[:] = [_masks(runner, output.sampled_token_ids, distributions.pop())]
        return output

    def sample_tokens_with_masks(*args: Any, **kwargs: Any) -> Any:
        masks.clear()
        output = sample_tokens(*args, **kwargs)
        if masks:
            output.sampling_masks = masks[0]
        return output

    runner.sampler.gather_logprobs = gather_logprobs
    runner._sample, runner.sample_tokens = sample_and_look, sample_tokens_with_masks
    scheduler.return_sampling_mask = True


def _masks(runner: Any, sampled: Tensor, distributions: Tensor) -> Any:
    """Make vLLM's record of the supports of ``sampled`` [requests, drafts + 1], of requests that want them; others have none."""
    from vllm.v1.outputs import SamplingMaskLists

    drawn = (sampled >= 0) & (sampled < distributions.size(1))  # a draft that was rejected, and all after it, are -1
    requests = (runner.requests[name] for name in runner.input_batch.req_ids)
    records = drawn.new_tensor([bool((r.sampling_params.extra_args or {}).get(_RECORDS)) for r in requests])
    inside = distributions.isfinite() & records.repeat_interleave(sampled.size(1))[:, None]
    inside = inside[drawn.flatten()]
    offsets = [0, *inside.sum(1).cumsum(0).tolist()]
    ends = [0, *drawn.sum(1).cumsum(0).tolist()]
    return SamplingMaskLists(inside.nonzero()[:, 1].int().numpy(), np.array(offsets), ends)
