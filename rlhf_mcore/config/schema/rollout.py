"""The groups ``rollout`` and ``bridge``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

from annotated_types import Ge, Le, Predicate

from rlhf_mcore.config.engine_kinds import ENGINES, SEQUENCES, is_engine
from rlhf_mcore.config.schema.group import (
    ENGINE,
    Choices,
    Group,
    PositiveFloat,
    PositiveInt,
    Share,
    Size,
    group,
    is_address,
    key,
)

_APART, _COLOCATED = "rollout.placement=disaggregated", "rollout.placement=colocated"
_AHEAD = "trainer.max_staleness"
# Maximum number of candidates of a sampled token if top_p or top_k restrict them. Ties of the last candidate may exceed it.
MOST_SUPPORT = 512

SupportedTopK = Annotated[int, Ge(-1), Le(MOST_SUPPORT), Predicate(bool)]
Address = Annotated[str, Choices(allows=is_address, form="host:port")]
DraftTokens = Annotated[int, Ge(1), Le(32)]
SleepLevel = Annotated[int, Ge(0), Le(2)]
Order = Literal["in_order", "longest_first", "shared_queue"]
AtPublish = Literal["continue", "resubmit", "drain"]


class RolloutLayoutConfig(Group):
    """Set how an engine is split over ranks."""

    tp: Size = key(1, "tensor-parallel size; `colocated`: there are world size / (tp · pp · dp) engines")
    pp: Size = key(1, "pipeline-parallel size (number of stages)")
    dp: Size = key(1, "data-parallel size: rank groups that attend to separate requests and share the experts")
    ep: Size = key(1, "expert-parallel size: 1 splits each expert over the ranks; tp · dp: each rank has whole experts")

    @property
    def num_ranks(self) -> int:
        """The number of ranks of an engine."""
        return self.tp * self.pp * self.dp


class SamplingConfig(Group):
    """Set how responses are sampled."""

    n: PositiveInt = key(8, "responses per prompt; group-relative advantages need at least 2")
    # Greedy responses to a prompt are equal, so there is nothing to learn from them.
    temperature: PositiveFloat = key(1.0, "sampling temperature, also for the trainer's logprobs")
    top_p: Share = key(1.0, "nucleus sampling: total probability of the most likely tokens to sample from; 1: off")
    """The candidates of each sampled token are recorded, and policy ratios are normalised over them ([top_p and
    top_k](algorithms/off-policy.md#top_p-and-top_k))."""
    top_k: SupportedTopK = key(-1, "number of most likely tokens to sample from; -1: off")
    """With `top_p` below 1, off means 512."""
    max_new_tokens: PositiveInt = key(256, "maximum length of a response in tokens")


class RayConfig(Group):
    """Set where disaggregated engines run."""

    address: Optional[Address] = key(None, "address of a running Ray cluster", only_with=_APART)
    """For example `10.0.0.1:6379`. `null`: Ray is started on this machine and ends with the run."""


class SpeculativeConfig(Group):
    """Speculative decoding: an engine drafts tokens and verifies them in one forward pass."""

    method: Literal["off", "ngram", "mtp"] = key("off", "source of draft tokens", only_with=ENGINE)
    """`ngram`: tokens that followed the same n-gram earlier in the prompt or response. `mtp`: the MTP layers of
    `model.path` (`actor.mtp`). The policy's distribution and logprobs stay the same, but other responses are sampled.
    See [speculative decoding](scale/speculative.md)."""
    num_tokens: DraftTokens = key(1, "draft tokens per forward pass", only_with=".method=ngram or mtp")
    ngram_tokens: DraftTokens = key(3, "last tokens that must occur earlier", only_with=".method=ngram")


class ServerConfig(Group):
    """External vLLM servers ([servers](scale/external-servers.md))."""

    urls: list[str] = key([], "addresses of the servers, such as [http://10.0.0.7:8000]", only_with=ENGINE)
    weights_dir: Optional[str] = key(None, "directory through which weights are sent", only_with=ENGINE)
    """Trainer and servers need the same path."""
    token_env: Optional[str] = key(None, "environment variable with the servers' API key", only_with=ENGINE)


class RolloutConfig(Group):
    """The engines that generate responses."""

    engine: Annotated[str, Choices(tuple(ENGINES), is_engine)] = key("vllm", "inference engine")
    """`hf`: Hugging Face generate, slow, for comparison. `server`: external vLLM servers."""
    placement: Literal["colocated", "disaggregated"] = key("colocated", "placement of engines", is_fixed=True)
    """`colocated`: in the trainer's processes. `disaggregated`: on separate devices, under Ray."""
    num_engines: Size = key(1, "number of engines; each needs `layout.tp` · `pp` · `dp` devices", only_with=_APART)
    layout: RolloutLayoutConfig = group(RolloutLayoutConfig, "parallel layout of an engine")
    sampling: SamplingConfig = group(SamplingConfig, "sampling of training responses")
    function: Optional[str] = key(None, "`file.py:name` of a coroutine (policy, prompt, ctx) that samples turns")
    """It may also return the score. It runs in worker processes, with the limits of `environment`
    ([rollout functions](guide/environments/rollout-functions.md)). `null`: a rollout is one response, or an episode of
    `environment.function`."""
    max_model_len: Optional[PositiveInt] = key(None, "maximum number of tokens of prompt and response together")
    """`null`: `data.max_prompt_tokens` plus the maximum response length."""
    max_num_seqs: Optional[PositiveInt] = key(None, "maximum concurrent responses per data-parallel group of an engine")
    """`null`: 256; `vllm`: 1024 on devices with at least 70 GiB except A100, as vLLM chooses."""
    max_num_batched_tokens: Optional[PositiveInt] = key(None, "maximum tokens per forward pass", only_with=ENGINE)
    """Prompt tokens are included, and longer prompts are processed in chunks. At least `rollout.max_num_seqs`. `null`:
    vLLM's choice."""
    quantization: Optional[Literal["fp8", "int8"]] = key(None, "8-bit weights in engines", only_with=ENGINE)
    """`fp8`: 8-bit floats, one scale per block of 128x128. `int8`: 8-bit integers, one scale per row. The trainer's
    weights do not change. See [8-bit engine weights](scale/low-precision.md#8-bit-engine-weights)."""
    vllm: Optional[dict[str, Any]] = key(None, "engine arguments of vLLM", only_with=ENGINE)
    """For example `{kv_cache_dtype: fp8}`: fields of EngineArgs of the installed vLLM. Arguments that other keys set are
    rejected. See [performance](scale/tuning.md#vllms-own-arguments)."""
    gpu_memory_utilization: Share = key(0.5, "CUDA: share of a device's memory that an engine may use")
    kv_cache_gib: PositiveFloat = key(0.5, "CPU: size of an engine's KV cache in GiB")
    server: ServerConfig = group(ServerConfig, "external vLLM servers")
    speculative: SpeculativeConfig = group(SpeculativeConfig, "speculative decoding")
    enforce_eager: bool = key(False, "CUDA: disable CUDA graphs; on a CPU engines always run eagerly")
    sleep_level: SleepLevel = key(2, "CUDA: memory that a sleeping engine frees; 0: none", only_with=_COLOCATED)
    """1: the KV cache and the weights, with a copy of the weights in pinned host memory. 2: the KV cache and the weights,
    which the next sync writes again."""
    order: Order = key("in_order", "assignment of a step's prompts to engines, and their order", only_with=_COLOCATED)
    """`in_order`: each of N engines takes every N-th prompt. `longest_first`: engines get equal expected tokens and start
    with the longest. `shared_queue`: the same order, but a free engine takes the next waiting prompt; a resumed run
    then equals an uninterrupted run only up to rounding. See [order](scale/tuning.md#order-of-generation)."""
    at_publish: Optional[AtPublish] = key(None, "unfinished responses when weights arrive", only_with=_AHEAD)
    """`continue`: continue with the old keys and values. `resubmit`: recompute keys and values with the new weights.
    `drain`: finish before the weights are sent. `null`: `continue`, or `drain` with `rollout.deterministic_order`. See
    [publishes](scale/async.md#what-a-publish-does)."""
    oversample: Annotated[float, Ge(1), Le(8)] = key(1.0, "started prompts per trained prompt", only_with=_APART)
    """A step uses the prompts that finish first. The others continue within `trainer.max_staleness`, or restart."""
    deterministic_order: bool = key(False, "train on prompts in data order, not as they finish", only_with=_AHEAD)
    """A run that was killed and resumed, or that lost engines, then equals an undisturbed run, bit for bit. Each rank
    keeps a copy of its published weights in host memory."""
    engine_timeout_s: PositiveFloat = key(60.0, "seconds without an answer after which an engine is restarted")
    """`disaggregated`: at most 3 times in a row. `server`: a server has failed if a request takes 60 times as long."""
    ray: RayConfig = group(RayConfig, "Ray cluster of disaggregated engines")

    @property
    def sequences(self) -> int:
        """Responses that a data-parallel group of an engine decodes concurrently; by default as on small devices."""
        return self.max_num_seqs or SEQUENCES

    @property
    def slots(self) -> int:
        """Responses that an engine decodes concurrently, over all its data-parallel groups."""
        return self.sequences * self.layout.dp


class BridgeConfig(Group):
    """Set how the actor's weights are sent to the engines."""

    method: Literal["planned", "gather"] = key("planned", "weight sync")
    """`planned`: every byte goes from its trainer shard directly to its place in the engine. `gather`, a baseline: full
    tensors are sent one at a time under their Hugging Face names, and the engine splits them again."""
    bucket_bytes: PositiveInt = key(268435456, "bytes that a rank sends at a time", only_with=".method=planned")
    """Two buckets are in flight. A rank receives as many."""
    verify: Literal["off", "digest"] = key("digest", "`planned`: check of the weights after every sync")
    """`digest`: every tensor is hashed on both sides, and the run ends if a hash differs."""
    full_every: Optional[PositiveInt] = key(None, "interval between syncs that send all elements", only_with=_APART)
    """The others send only changed elements, for slow links and models in bf16. `null`: every sync sends all elements. It
    needs the plug-in `rlhf_mcore_contrib.delta_sync`, and keeps the weights of trainer ranks in host memory. See [slow
    links](scale/weight-sync.md#slow-links)."""
    transport: Literal["group", "nixl"] = key("group", "transport of weight messages", only_with=_APART)
    """`group`: the process group, NCCL or gloo. `nixl`: engines read registered memory (plug-in `rlhf_mcore_contrib.nixl`,
    package `nixl`); message buffers stay allocated."""
    canary: Optional[bool] = key(None, "after every sync, compare the logprobs of a few tokens of engines and trainer")
    """`null`: true with colocated engines, else false. An engine that disagrees with the trainer is not used. See [weight
    sync](scale/weight-sync.md)."""
    live_cpu_weights: bool = key(False, "CPU: use plain kernels on live weights instead of vLLM's packed copies")
    """A sync then writes in place; generation is a little slower."""


def truncates(sampling: SamplingConfig) -> bool:
    """Return whether tokens are sampled from a part of the vocabulary. Updates then need the recorded candidates."""
    return sampling.top_p < 1 or sampling.top_k > 0
