"""vLLM in the trainer's process: the colocated rollout engine."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema.rollout import truncates
from rlhf_mcore.platform import current_platform
from rlhf_mcore.platform.base import preserved_rng
from rlhf_mcore.platform.cpu_libraries import declare_image_operators
from rlhf_mcore.protocols import MEMORY, EngineRank
from rlhf_mcore.rollout.engine import AddsAdapters, EngineModel, ExpectedTensors, LiveEngine
from rlhf_mcore.rollout.vllm import adapters, cpu, images, reload, stages, token_records
from rlhf_mcore.rollout.vllm.adapters import base_layers, set_adapter
from rlhf_mcore.rollout.vllm.arguments import live_backends, quantised_options
from rlhf_mcore.rollout.vllm.drafts import Drafts
from rlhf_mcore.rollout.vllm.environment import (
    caches_by_engine_rank,
    engine_start,
    private_shared_memory,
    rank_and_world_size,
    remove_quantisation,
    unchanged_classes,
)
from rlhf_mcore.rollout.vllm.images import EngineImages
from rlhf_mcore.rollout.vllm.limits import problem_of
from rlhf_mcore.types import DRAFTS, ROUTES, Completion, Recorded, Request

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.rollout.vllm.token_records import RouteSource

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Default tokens per forward pass: the smallest number that vLLM chooses on any platform, and its choice on large GPUs.
_LEAST_BUDGET, _USUAL_BUDGET = 4096, 16384


class VLLMEngine(LiveEngine, AddsAdapters):
    """A vLLM engine inside the trainer's ranks. There are ``world_size / cfg.layout.num_ranks`` of them.

    vLLM's ``external_launcher`` joins the process group that the trainer has initialised. Consecutive ranks form an engine.
    All ranks construct it together. The ranks of one engine are called with the same arguments in the same order. Different
    engines may get different prompts and finish at different times. A process contains one engine.

    The engine starts with dummy weights, and refuses to generate with them.
    """

    _routes: RouteSource | None = None
    _drafts: Drafts | None = None
    _adapters: Sequence[Any] = ()  # vLLM's names of the adapters in requests
    _named: Mapping[str, Any] = {}  # the adapter for new requests
    _set_group_number: Any = nullcontext  # a context manager around the start

    def __init__(self, cfg: RolloutConfig, model: EngineModel) -> None:
        """Start the engine (seconds to a minute).

        ``kv_cache_gib`` applies on the CPU, ``gpu_memory_utilization`` and ``sleep_level`` on CUDA. On the CPU the engine
        always runs eagerly, because compiling costs more time than it saves.

        Raises:
            ConfigError: the layout does not divide the world size, a directory cannot be used, the cache is smaller than one
            response
                of ``model.max_model_len``, or vLLM rejects ``cfg.vllm``.
            RuntimeError: torch.distributed is not initialised.
        """
        rank, world_size, size = *rank_and_world_size(), cfg.layout.num_ranks
        if size < 1 or world_size % size:
            raise ConfigError(
                f"rollout.layout: an engine's {size} ranks do not divide the world size {world_size}; use a divisor of it"
            )
        super().__init__(model, EngineRank.of(rank, world_size, size), cfg.at_publish)
        shapes, expected = model.shapes, ExpectedTensors
        self._expected = expected.of_directory(model.model_dir) if shapes is None else expected.of_shapes(shapes)
        self._on_cuda = current_platform().name == "cuda"
        self._can_sleep = self._on_cuda and cfg.sleep_level > 0
        self._asleep: set[str] = set()  # subset of MEMORY
        self._num_ranks, self._records = size, truncates(cfg.sampling)
        self._adapter_shapes, self._num_adapters = model.adapters, model.num_adapters
        self._by_number: dict[int, int] = {}  # vLLM's request number -> request id, for requests in flight
        self._images: EngineImages | None = None
        if model.images is not None:
            declare_image_operators()
            self._images = EngineImages(model)
        if cfg.speculative.method != "off":
            self._drafts = Drafts(cfg, model, on_cuda=self._on_cuda)
        options = self._options(cfg, model)
        start = engine_start(rank, world_size, eager=not self._on_cuda)
        with start as warnings, private_shared_memory(), self._set_group_number(), caches_by_engine_rank(size):
            self._llm = _start(options, cfg, on_cuda=self._on_cuda)
            if self._drafts is not None:
                self._drafts.attach(self._worker(), self._llm.llm_engine.engine_core.engine_core)
        self.warnings = tuple(dict.fromkeys(warnings))
        self._count_preemptions()
        if model.adapters:
            self._open_slots()
            self.use_adapter(0)
        if self._records:
            token_records.record_masks(self._llm.llm_engine, self._worker().model_runner, on_cuda=self._on_cuda)
        if model.records_routes:
            self._routes = token_records.record_routes(
                self._llm.llm_engine, self._worker().model_runner, on_cuda=self._on_cuda
            )
        if not self._on_cuda:
            cpu.spare_generators_of_cut_prompts(self._worker().model_runner)
            cpu.rotate_every_head(self.model)
            if (layout := cfg.layout).ep > 1 or layout.num_ranks > layout.tp:
                cpu.complete_grid(self._worker().model_runner, layout)
            if model.dtype == "fp32":
                cpu.use_norm_kernels(self.model)

    def _options(self, cfg: RolloutConfig, model: EngineModel) -> dict[str, Any]:
        """Return the arguments of vllm.LLM."""
        options: dict[str, Any] = {
            "model": model.model_dir,
            "skip_tokenizer_init": True,  # tokens in, tokens out; text is decoded once, at the end
            "trust_remote_code": False,
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": cfg.layout.tp,
            "pipeline_parallel_size": cfg.layout.pp,
            "data_parallel_size": cfg.layout.dp,
            "enable_expert_parallel": cfg.layout.ep > 1,
            "load_format": "dummy",
            "hf_overrides": remove_quantisation,
            "dtype": _DTYPES[model.dtype],
            "max_model_len": model.max_model_len,
            "max_num_seqs": cfg.sequences,
            "enable_prefix_caching": True,
            "enforce_eager": cfg.enforce_eager or not self._on_cuda,
            "generation_config": "vllm",  # sampling comes from our configuration, never from the model's files
            "logprobs_mode": "processed_logprobs",
            "mamba_ssm_cache_dtype": "float32",  # gated delta net states, which are fp32 in the trainer too
            "disable_log_stats": True,
            "seed": model.seed,
        }
        if self._drafts is not None:
            options |= self._drafts.options
        if cfg.quantization is not None and self._on_cuda:
            options |= quantised_options(cfg.quantization, self._expected.shapes)
        if model.images is not None:
            options |= images.options(model)
        if model.adapters:
            options |= adapters.options(model.adapters, model.num_adapters)
        if cfg.max_num_batched_tokens is not None:
            options["max_num_batched_tokens"] = cfg.max_num_batched_tokens
            # Each sequence decodes one token per pass.
            options["max_num_seqs"] = min(cfg.sequences, cfg.max_num_batched_tokens)
        elif cfg.sequences > _LEAST_BUDGET:  # vLLM rejects more sequences than tokens
            options["max_num_batched_tokens"] = max(cfg.sequences, _USUAL_BUDGET)
        if self._on_cuda:
            options["gpu_memory_utilization"] = cfg.gpu_memory_utilization
            options["enable_sleep_mode"] = cfg.sleep_level > 0
            options["return_sampling_mask"] = self._records
            options["enable_return_routed_experts"] = model.records_routes
        else:
            options["kv_cache_memory_bytes"] = int(cfg.kv_cache_gib * 2**30)
            # With the default of 128, a short prompt would not fill a block for its samples to share.
            options["block_size"] = 32
        return options | (cfg.vllm or {})

    def _begin(self, requests: Sequence[Request], limits: Sequence[int]) -> list[str]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if self._asleep:
            raise RuntimeError("the rollout engine sleeps: call wake() before it generates")
        extra: list[dict[str, Any] | None] = [None] * len(requests)
        if self._records:
            extra = [token_records.extra_args(request) for request in requests]
        params = [
            SamplingParams(
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                top_k=request.sampling.top_k,
                max_tokens=limit,
                seed=request.seed,
                stop_token_ids=self._stops,
                logprobs=0,  # logprob of the sampled token only
                detokenize=False,
                extra_args=more,
            )
            for request, limit, more in zip(requests, limits, extra, strict=True)
        ]
        tokens = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        # The cache may contain prefixes from older weights. The salt prevents sharing them.
        if self._at_publish == "continue":
            for prompt in tokens:
                prompt["cache_salt"] = f"weights {self.policy_version}"
        first = self._llm.request_counter.counter  # vLLM numbers its requests from here, and returns these numbers
        if self._images is not None:
            handles = self._images.enqueue(
                self._llm, zip(requests, tokens, params, strict=True), self.policy_version, self._named
            )
        else:
            handles = self._llm.enqueue(tokens, params, use_tqdm=False, **self._named)
        self._by_number |= {first + place: request.request_id for place, request in enumerate(requests)}
        if self._routes is not None:
            self._routes.expect(handles, requests)
        return handles

    def _step(self) -> list[Completion]:
        if self._records and self._on_cuda:
            token_records.record_where_wanted(self._llm.llm_engine, self._worker().model_runner, self._in_flight)
        return [self._completion(output) for output in self._llm.llm_engine.step() if output.finished]

    def _completion(self, output: Any) -> Completion:
        """Convert a vllm.RequestOutput. Its ``outputs[0].logprobs[t]`` maps token ids to records.

        Raises:
            RuntimeError: the output belongs to no request in flight.
        """
        in_flight = self._in_flight.get(self._by_number.pop(int(output.request_id), -1))
        if in_flight is None or list(output.prompt_token_ids) != list(in_flight.request.prompt_ids):
            other = in_flight and f"a prompt that differs from {in_flight.request.name}"
            raise RuntimeError(f"the engine answered {other or 'an unknown request'}")
        [drawn], support = output.outputs, None
        if in_flight.request.sampling.records_support:
            support = token_records.support_of(drawn)
        token_ids = list(drawn.token_ids)
        logprobs = [record[token].logprob for token, record in zip(token_ids, drawn.logprobs or [], strict=False)]
        fields: dict[str, Recorded] = {}
        if self._routes is not None and in_flight.request.sampling.records_routes:
            fields[ROUTES] = self._routes.take(in_flight.handle, drawn, len(output.prompt_token_ids) + len(token_ids))
        if self._drafts is not None:
            drafts = self._drafts.record.take(in_flight.handle, len(token_ids))
            fields |= {DRAFTS: drafts} if in_flight.request.sampling.records_drafts else {}
        return Completion(
            in_flight.request.request_id,
            np.array(token_ids, np.int32),
            np.array(logprobs, np.float32),
            tuple(in_flight.versions),
            drawn.finish_reason,
            num_cached=output.num_cached_tokens or 0,
            support=support,
            fields=fields,
        )

    def _end(self, request_ids: Sequence[int]) -> None:
        dropped = {request_id: self._in_flight[request_id].handle for request_id in request_ids}
        self._llm.llm_engine.abort_request(list(dropped.values()), internal=True)
        recorders: tuple[Any, ...] = (self._routes, self._drafts and self._drafts.record)
        for recorder in filter(None, recorders):
            recorder.drop(dropped.values())
        self._by_number = {
            number: request_id for number, request_id in self._by_number.items() if request_id not in dropped
        }

    def _num_sampled(self) -> dict[int, int]:
        if not self._in_flight:
            return {}
        states = self._scheduler.requests
        return {request_id: states[each.handle].num_output_tokens for request_id, each in self._in_flight.items()}

    def sampled_tokens(self, request_ids: Collection[int]) -> dict[int, Sequence[int]]:
        """See :class:`Engine`."""
        states = self._scheduler.requests
        known = [request_id for request_id in request_ids if request_id in self._in_flight]
        return {known_id: states[self._in_flight[known_id].handle].output_token_ids for known_id in known}

    def kernels(self) -> dict[str, str]:
        """See :class:`Engine`."""
        return live_backends(self._worker().get_model(), self._worker().vllm_config)

    def _count_preemptions(self) -> None:
        """Count preempted responses. Responses that ``rollout.at_publish=resubmit`` computes again do not count."""
        usual = self._scheduler._preempt_request

        def preempt(request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
            self._preemptions += not drop_stale_output
            usual(request, timestamp, drop_stale_output)

        self._scheduler._preempt_request = preempt

    @property
    def _scheduler(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core.scheduler

    def _gather_digests(self, own: int) -> list[int]:
        import torch
        import torch.distributed as dist
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        digests = torch.tensor([own - 2**63])  # fits in int64
        for group in (get_tp_group(), get_pp_group()):
            parts = [torch.empty_like(digests) for _ in range(group.world_size)]
            dist.all_gather(parts, digests, group.cpu_group)
            digests = torch.cat(parts)
        return digests.tolist()

    @property
    def num_ranks(self) -> int:
        """Number of ranks of this engine."""
        return self._num_ranks

    @contextmanager
    def begin(self, version: int) -> Iterator[nn.Module]:
        """Yield the live model for writing. The engine is unusable until the block has ended without an error.

        Requests may be in flight unless ``rollout.at_publish`` is drain.

        Raises:
            RuntimeError: the engine sleeps, or requests are in flight that must not continue with new weights.
        """
        from vllm.config import set_current_vllm_config

        if "weights" in self._asleep:
            raise RuntimeError("the rollout engine sleeps: call wake() before a sync")
        self._settle()
        self.begin_load()
        worker = self._worker()
        with preserved_rng(), set_current_vllm_config(worker.vllm_config), self._base_layers():
            yield self.model
            _renew_sinks(self.model)
        self._reset_prefix_cache()
        self.commit_load(version)

    @property
    def model(self) -> nn.Module:
        """The live model on this rank, together with its MTP layers if they are trained."""
        return (self._drafts and self._drafts.model) or self._worker().get_model()

    def _base_layers(self) -> AbstractContextManager[None]:
        if not self._adapters:
            return nullcontext()
        return base_layers(self.model)

    def _worker(self) -> Any:
        [worker] = self._llm.collective_rpc(_self)
        return worker

    def _settle(self) -> None:
        """Finish the passes that vLLM may have started ahead (asynchronous scheduling), before the weights change."""
        if not self._in_flight:
            return
        from vllm.v1.core.sched.interface import PauseState

        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._llm.llm_engine.engine_core.engine_core.batch_queue:
                self._finished += self._drop_finished(self._step())
        finally:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def _reset_prefix_cache(self) -> None:
        """Discard the cache of the old weights. With ``continue``, running requests keep their cache, but do not share it."""
        if self._in_flight and self._at_publish == "continue":
            return
        if not self._llm.reset_prefix_cache(reset_running_requests=bool(self._in_flight)):
            raise RuntimeError("vLLM did not reset its prefix cache; were requests still running?")

    def forget_prefixes(self) -> None:
        """See :class:`Engine`."""
        self._reset_prefix_cache()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights by full tensors under Hugging Face names, through vLLM's own layerwise reload.

        The reload writes all of vLLM's layouts: fused, sharded or prepacked. The engine is unusable until a load has ended
        without an error. After a failed load, the next complete load restores it. Tied tensors may be given once. Afterwards
        all adapters are zero.

        Raises:
            ValueError: a tensor is unknown, repeated, missing, or has a wrong shape.
            RuntimeError: the engine sleeps, or vLLM left a parameter unwritten.
        """
        if "weights" in self._asleep:
            raise RuntimeError("the rollout engine sleeps: call wake() before load_weights()")
        self._settle()
        self.begin_load()
        with preserved_rng(), self._base_layers():
            checked, drafted = self._expected.check_each(weights), self._drafts and self._drafts.model
            [unwritten] = self._llm.collective_rpc(reload.reload, args=(checked, drafted))
        if self._adapter_shapes:
            self._open_slots()  # vLLM's reload has closed the slots
        if unwritten:
            raise RuntimeError(f"vLLM left parameters unwritten: {', '.join(unwritten)}")
        self._reset_prefix_cache()
        self.commit_load(version)

    def _open_slots(self) -> None:
        assert self._adapter_shapes is not None
        self._adapters = adapters.open_slots(self._worker().model_runner, self._adapter_shapes, self._num_adapters)

    def load_adapter(self, number: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        set_adapter(self.model, number, pairs)
        self._reset_prefix_cache()

    def use_adapter(self, number: int | None) -> None:
        self._named = {} if number is None else {"lora_request": self._adapters[number]}

    def sleep(self, level: int = 2) -> None:
        """Free the device memory of weights and cache. Do nothing on the CPU and with rollout.sleep_level=0."""
        if not self._can_sleep or self._asleep:
            return
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} requests are in flight: a sleep would lose their cache")
        if level == 2:
            self.abandon("its weights were discarded by sleep()")
        self._llm.sleep(level=level)
        self._asleep = set(MEMORY)

    def wake(self, tags: Sequence[str] = MEMORY) -> None:
        """Allocate the memory again. After a sleep at level 2 it contains no weights, so a sync must follow."""
        if due := self._asleep.intersection(tags):
            self._llm.wake_up(tags=sorted(due, key=MEMORY.index))
            self._asleep -= due
            if self._adapters:
                adapters.forget_batch(self._worker().model_runner)

    def close(self) -> None:
        """Free the engine. The trainer's process group stays. Another engine may start later, even in another process group."""
        from vllm.distributed import parallel_state

        self.abandon("it was closed")
        core = self._llm.llm_engine.engine_core.engine_core
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        parallel_state.destroy_model_parallel()
        if (world := parallel_state._WORLD) is not None:  # vLLM's own shutdown would also destroy the trainer's group
            world.destroy()
            parallel_state._WORLD = None
        del self._llm, core
        gc.unfreeze()  # vLLM froze the objects that existed at its start
        gc.collect()


def _renew_sinks(model: Any) -> None:
    """Pass the new sinks to attention kernels, because some keep a copy in another dtype."""
    for module in model.modules():
        if "sinks" in module._parameters:
            if hasattr(module.attn.impl, "_sinks_source"):
                module.attn.impl.process_weights_after_loading(module.sinks.dtype)
            else:
                module.attn.impl.sinks = module.sinks


def _start(options: dict[str, Any], cfg: RolloutConfig, *, on_cuda: bool) -> Any:
    """Start a vllm.LLM that does not touch the trainer's process group.

    vLLM's engine core destroys the default process group when it is garbage-collected or the interpreter ends. Here that
    group belongs to the trainer. This function therefore detaches the finalizer, and ``VLLMEngine.close`` frees the rest.

    Raises:
        ConfigError: the device has less free memory than the engine's share, the KV cache is smaller than one response of
        maximum
            length, no kernel supports the experts, or vLLM rejects arguments in ``rollout.vllm``.
    """
    # A vLLM module keeps an exception from its import, with all frames on the stack and the models in them. A separate thread
    # has no such frames.
    with ThreadPoolExecutor(1) as thread:
        llm_class = thread.submit(lambda: import_module("vllm").LLM).result()
    from vllm.distributed.parallel_state import destroy_model_parallel

    try:
        with ExitStack() as around:
            if not on_cuda:
                around.enter_context(unchanged_classes())
                around.enter_context(cpu.hide_llvmlite())
                if "limit_mm_per_prompt" in options:
                    around.enter_context(images.inspected_here())
            if cfg.layout.pp > 1:
                around.enter_context(stages.patch_pipeline_engine(cfg))
            if "enable_lora" in options:
                around.enter_context(adapters.experts_without_adapters())
            llm = llm_class(**options)
    except (ValueError, NotImplementedError) as error:
        if (problem := problem_of(str(error), options, cfg, on_cuda=on_cuda)) is None:
            raise
        destroy_model_parallel()  # otherwise its groups would block the next engine
        raise ConfigError(problem) from error
    llm.llm_engine.engine_core._finalizer.detach()
    return llm


def _self(worker: Any) -> Any:
    """Return vLLM's worker, which runs in this process."""
    return worker
