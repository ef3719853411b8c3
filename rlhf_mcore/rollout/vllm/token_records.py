"""Read vLLM's records per token: the experts of every layer (routes), and the tokens that top-k and top-p allow (supports).

vLLM calls a support its sampling mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rollout.engine import InFlight, ragged_ids

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_mcore.config.schema.rollout import SamplingConfig
    from rlhf_mcore.types import Ragged, Request

Routes = NDArray[np.int16]  # [tokens, layers with experts, experts per token]: expert number + 1; 0: unknown
_RECORDS = "records_support"  # key in the extra arguments of sampling parameters


def record_routes(engine: Any, runner: Any, *, on_cuda: bool) -> RouteSource:
    """Make an engine (vllm.v1.LLMEngine) record routes. On CUDA it must be started with ``enable_return_routed_experts``.

    Raises:
        ConfigError: vLLM's expert kernel routes tokens internally, and does not return the routes.
    """
    if on_cuda:
        return ReturnedRoutes(routed_layers(runner.model))
    return RecordedRoutes(runner, engine.vllm_config.cache_config.enable_prefix_caching)


def field_of_inputs(routes: Routes) -> Routes:
    """Build the field for n + 1 tokens from the routes of n inputs. An input's routes belong to the token that it predicts."""
    return np.concatenate([np.zeros_like(routes[:1]), routes])


def routed_layers(model: nn.Module) -> list[int]:
    """Return the numbers of the layers with experts."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource

    kinds = (MoERunner, RoutedExpertsCaptureSource)
    return sorted({module.layer_id for module in model.modules() if isinstance(module, kinds)})


class ReturnedRoutes:
    """Routes that vLLM's second model runner returns with a completion, for all requests."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = list(layers)

    def expect(self, handles: Sequence[str], requests: Sequence[Request]) -> None:
        """Do nothing, because vLLM returns the routes of every request."""

    def take(self, handle: str, drawn: Any, num_tokens: int) -> Routes:
        """Read [inputs, layers, k] uint8 or uint16 for all layers. Layers without experts contain zeros, and are dropped.

        Raises:
            RuntimeError: routes are missing for some or all inputs.
        """
        returned = drawn.routed_experts
        if returned is None or len(returned) < num_tokens - 1:
            count = 0 if returned is None else len(returned)
            raise RuntimeError(f"vLLM returned the experts of {count} tokens for a request with {num_tokens} tokens")
        return field_of_inputs(returned[: num_tokens - 1, self._layers].astype(np.int16) + np.int16(1))

    def drop(self, handles: Iterable[str]) -> None:
        """Do nothing, because vLLM itself drops aborted requests."""


class RecordedRoutes:
    """Routes recorded in this process, because vLLM's first model runner, which runs on CPUs, returns none.

    Tokens whose keys and values are cached are not routed again. Their routes are stored by their position in the cache. A
    token that is computed again, for example after a preemption, keeps the routes with which the next token was sampled.
    """

    def __init__(self, runner: Any, prefix_caching: bool) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        self._runner, self._execute = runner, runner.execute_model
        self._rows: dict[str, Routes | None] = {}  # routes of the inputs by request; None: the request has not started
        self._pass: dict[int, list[Tensor]] = {}
        self._cached: Routes | None = None  # by position in the cache
        self._shares = prefix_caching
        self._group, self._block_size = _whole_cache(runner.kv_cache_config.kv_cache_groups)
        try:
            bind_routed_experts_capturer(runner.get_model(), self)
        except ValueError as error:
            raise ConfigError(f"actor.router_replay=rollout: {error}; set it to old_logprobs or off") from error
        runner.execute_model = self._run

    def capture(self, layer: int, experts: Tensor) -> None:
        """Record the experts [n, k] of the tokens of a pass. vLLM calls it once per layer."""
        import torch

        self._pass.setdefault(layer, []).append(experts.to(torch.int16) + 1)

    def expect(self, handles: Sequence[str], requests: Sequence[Request]) -> None:
        """Record the routes of requests that need them. ``handles`` are vLLM's request names. Call it before their first pass."""
        asked = zip(handles, requests, strict=True)
        self._rows.update((handle, None) for handle, request in asked if request.sampling.records_routes)

    def take(self, handle: str, drawn: Any, num_tokens: int) -> Routes:
        """Return the field ``ROUTES`` of a finished request with ``num_tokens`` tokens."""
        rows = self._rows.pop(handle)
        assert rows is not None
        return field_of_inputs(rows[: num_tokens - 1])

    def drop(self, handles: Iterable[str]) -> None:
        """Drop the records of aborted requests."""
        for handle in handles:
            self._rows.pop(handle, None)

    def _run(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the runner's ``execute_model``."""
        self._pass.clear()
        output = self._execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            self._note(scheduled)
        self._pass.clear()
        return output

    def _note(self, scheduled: Any) -> None:
        """Store the routes of a pass. Its tokens are the tokens of its requests, concatenated."""
        import torch

        routes: Routes = torch.stack([torch.cat(self._pass[layer]) for layer in sorted(self._pass)], dim=1).numpy()
        if self._cached is None:
            num_places = self._runner.kv_cache_config.num_blocks * self._block_size if self._shares else 0
            self._cached = np.zeros((num_places, *routes.shape[1:]), np.int16)
        begun, going = scheduled.scheduled_new_reqs, scheduled.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in begun}
        starts |= dict(zip(going.req_ids, going.num_computed_tokens, strict=True))
        place = 0
        for name in self._runner.input_batch.req_ids:
            if count := scheduled.num_scheduled_tokens.get(name, 0):
                self._keep(name, starts[name], routes[place : place + count])
            place += count
        # This must come last, because a prompt may start with blocks that another request computes in the same pass.
        for name in [new.req_id for new in begun] + [name for name in going.req_ids if name in going.resumed_req_ids]:
            self._fill_cached(name, starts[name])

    def _keep(self, name: str, start: int, routes: Routes) -> None:
        assert self._cached is not None
        request, places = self._runner.requests[name], np.arange(start, start + len(routes))
        if self._shares:
            self._cached[self._in_cache(request, places)] = routes
        if name not in self._rows:
            return
        if (rows := self._rows[name]) is None:
            limit = request.num_prompt_tokens + request.sampling_params.max_tokens
            rows = self._rows[name] = np.zeros((limit, *routes.shape[1:]), np.int16)
        # Tokens after the last one are not sampled yet. Their inputs are drafts, and may be computed again as other tokens.
        is_open = (places >= request.num_tokens - 1) | (rows[places % len(rows), 0, 0] == 0)
        is_open &= places < len(rows)
        rows[places[is_open]] = routes[is_open]

    def _fill_cached(self, name: str, count: int) -> None:
        """Set the routes of the first ``count`` tokens of a request, which were found in the cache."""
        if count and (rows := self._rows.get(name)) is not None:
            assert self._cached is not None
            places = np.flatnonzero(rows[:count, 0, 0] == 0)
            rows[places] = self._cached[self._in_cache(self._runner.requests[name], places)]

    def _in_cache(self, request: Any, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cache positions of a request's tokens. An evicted block maps to the first block, which is never written."""
        blocks = np.array(request.block_ids[self._group], np.int64)
        return blocks[places // self._block_size] * self._block_size + places % self._block_size


def _whole_cache(groups: Sequence[Any]) -> tuple[int, int]:
    """Return the layer group whose cache contains all tokens of a request (the first if there is none), and its block size."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    number = next((k for k, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)), 0)
    return number, groups[number].kv_cache_spec.block_size


RouteSource: TypeAlias = ReturnedRoutes | RecordedRoutes


# -------------------------------------------------------------------------------------------------------------- supports
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
