"""The tokens that vLLM samples each token from, after top-k and top-p. vLLM calls them its sampling mask."""

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

_RECORDS = "records_support"  # key in the extra arguments of sampling parameters


def extra_args(request: Request) -> dict[str, Any] | None:
    """Return the extra arguments for the sampling parameters of a request."""
    return {_RECORDS: True} if request.sampling.records_support else None


def support_of(drawn: Any) -> Ragged[NDArray[np.int32]] | None:
    """Return the supports of a vllm.CompletionOutput, or None if vLLM has recorded none."""
    if drawn.sampling_mask is None:
        return None
    return ragged_ids(drawn.sampling_mask.token_ids[: len(drawn.token_ids)])


def not_recorded(sampling: SamplingConfig, model: str) -> str:
    """Return the error message for a vLLM model runner that cannot record supports."""
    return (
        f"rollout.sampling.top_p={sampling.top_p:g}, top_k={sampling.top_k}: updates need the candidate set of each sampled token, "
        f"but vLLM's model runner for {model} does not record it; set top_p=1 and top_k=-1, or rollout.engine=hf"
    )


def record_masks(engine: Any, runner: Any, *, on_cuda: bool) -> None:
    """Make an engine (vllm.v1.LLMEngine) return supports. On CUDA it must be started with ``return_sampling_mask``."""
    if on_cuda:
        # From now on vLLM only uses it to reject requests without top_k, which evaluations may contain.
        engine.model_config.return_sampling_mask = False
    else:
        _return_masks_on_cpu(runner, engine.engine_core.engine_core.scheduler)


def record_where_wanted(engine: Any, runner: Any, in_flight: Mapping[int, InFlight]) -> None:
    """Record supports only if a request in flight needs them. On CUDA, vLLM records all requests, which costs time and memory."""
    records = {each.handle: each.request.sampling.records_support for each in in_flight.values()}
    runner.sampler.return_sampling_mask = any(records.values())
    for handle, state in engine.output_processor.request_states.items():
        if not records.get(handle):
            state.sampling_mask_chunks.clear()


def _return_masks_on_cpu(runner: Any, scheduler: Any) -> None:
    """Return the supports of sampled tokens with completions, as vLLM's ``return_sampling_mask`` does.

    vLLM 0.32 finds supports only in its second model runner, which does not run on CPUs. The path from a runner to the
    completions works for both runners. vLLM gathers logprobs from the sampling distributions, including for verified drafts,
    so they are read there.
    """
    gather, sample, sample_tokens = runner.sampler.gather_logprobs, runner._sample, runner.sample_tokens
    distributions: list[Tensor] = []  # [rows, V], for the current pass
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
    """Build vLLM's record of the supports of ``sampled`` [requests, drafts + 1]; empty for requests that do not need them."""
    from vllm.v1.outputs import SamplingMaskLists

    drawn = (sampled >= 0) & (sampled < distributions.size(1))  # -1 marks a rejected draft and all positions after it
    requests = (runner.requests[name] for name in runner.input_batch.req_ids)
    records = drawn.new_tensor([bool((r.sampling_params.extra_args or {}).get(_RECORDS)) for r in requests])
    inside = distributions.isfinite() & records.repeat_interleave(sampled.size(1))[:, None]
    inside = inside[drawn.flatten()]
    offsets = [0, *inside.sum(1).cumsum(0).tolist()]
    ends = [0, *drawn.sum(1).cumsum(0).tolist()]
    return SamplingMaskLists(inside.nonzero()[:, 1].int().numpy(), np.array(offsets), ends)
