"""The groups ``rollout``, ``bridge`` and ``reward``."""

from __future__ import annotations

from typing import Any, Optional

from rlhf_mcore.config.choices import GRADERS
from rlhf_mcore.config.engine_kinds import ENGINES, SEQUENCES, engines_that_read, is_engine
from rlhf_mcore.config.schema.group import Group, Item
from rlhf_mcore.config.schema.key import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE,
    SHARE,
    Choices,
    Range,
    group,
    key,
    one_of,
)
from rlhf_mcore.config.schema.models import RewardModelConfig
from rlhf_mcore.config.schema.services import JudgeConfig, RemoteRewardConfig, RewardRayConfig, is_address

_APART = "rollout.placement=disaggregated"
_AHEAD = "trainer.max_staleness"
_SIZE = Range(1, 4096)


class RolloutLayoutConfig(Group):
    """Set how an engine is split over ranks."""

    tp: int = key(
        1, "tensor-parallel size of an engine; `colocated`: there are world size / (tp · pp · dp) engines", _SIZE
    )
    pp: int = key(1, "pipeline-parallel size of an engine (number of stages)", _SIZE)
    dp: int = key(
        1, "data-parallel size of an engine: rank groups that attend to separate requests and share the experts", _SIZE
    )
    ep: int = key(
        1, "expert-parallel size: 1 splits each expert over the ranks; tp · dp gives each rank whole experts", _SIZE
    )

    @property
    def num_ranks(self) -> int:
        """The number of ranks of an engine."""
        return self.tp * self.pp * self.dp


class SamplingConfig(Group):
    """Set how responses are sampled."""

    n: int = key(8, "responses per prompt; group-relative advantages need at least 2", AT_LEAST_1)
    # Greedy responses to a prompt are equal, so there is nothing to learn from them.
    temperature: float = key(
        1.0, "sampling temperature; engine and trainer compute logprobs at this temperature", ABOVE_0
    )
    top_p: float = key(
        1.0,
        "nucleus sampling: total probability of the most likely tokens that are sampled from; 1: off",
        SHARE,
        more="The candidates of each sampled token are recorded, and policy ratios are normalised over them ([top_p and "
        "top_k](algorithms/off-policy.md#top_p-and-top_k)).",
    )
    top_k: int = key(
        -1,
        "number of most likely tokens that are sampled from, at most 512; -1: off, or 512 if `top_p` is below 1",
        Range(1, off=-1),
    )
    max_new_tokens: int = key(256, "maximum length of a response in tokens", AT_LEAST_1)


class RayConfig(Group):
    """Set where disaggregated engines run."""

    address: Optional[str] = key(
        None,
        "`disaggregated`: address of a running Ray cluster, such as `10.0.0.1:6379`",
        null="Ray is started on this machine and ends with the run",
        only_with=_APART,
    )
    cpus_per_rank: int = key(1, "`disaggregated`: CPU cores per engine process", AT_LEAST_1, only_with=_APART)


class SpeculativeConfig(Group):
    """Speculative decoding: an engine drafts tokens and verifies them in one forward pass."""

    method: str = key(
        "off",
        "`vllm`: source of draft tokens",
        one_of(
            off="no drafts",
            ngram="tokens that followed the same n-gram earlier in the prompt or response",
            mtp="the MTP layers of `model.path` (DeepSeek-V3, GLM-4.5); trained layers (`actor.mtp`) are sent with each sync",
        ),
        more="Drafts are accepted with the probability that preserves the policy's distribution (arXiv 2211.17192), and "
        "logprobs are the policy's own. Sampled responses differ from a run without drafts, because random numbers are "
        "used in another order.",
        only_with=engines_that_read("rollout.speculative.method"),
    )
    num_tokens: int = key(
        1, "draft tokens per forward pass", Range(1, 32), only_with="rollout.speculative.method=ngram or mtp"
    )
    ngram_tokens: int = key(
        3,
        "`ngram`: number of last tokens that must occur earlier",
        Range(1, 32),
        only_with="rollout.speculative.method=ngram",
    )


_SERVED = engines_that_read("rollout.server")


class ServerConfig(Group):
    """External vLLM servers ([servers](scale/external-servers.md))."""

    urls: list[str] = key([], "`server`: addresses of the servers, such as [http://10.0.0.7:8000]", only_with=_SERVED)
    weights_dir: Optional[str] = key(
        None,
        "`server`: directory at the same path for trainer and servers, through which weights are sent",
        null="none",
        only_with=_SERVED,
    )
    token_env: Optional[str] = key(
        None, "`server`: environment variable that contains the servers' API key", null="none", only_with=_SERVED
    )


class RolloutConfig(Group):
    """The engines that generate responses."""

    engine: str = key(
        "vllm", "inference engine", Choices({kind.name: kind.purpose for kind in ENGINES.values()}, adds=is_engine)
    )
    placement: str = key(
        "colocated",
        "placement of engines",
        one_of(colocated="in the trainer's processes", disaggregated="on separate devices, under Ray"),
        is_fixed=True,
    )
    num_engines: int = key(
        1,
        "`disaggregated`: number of engines; each needs `rollout.layout.tp` · `pp` · `dp` devices",
        Range(1, 4096),
        only_with=_APART,
    )
    layout: RolloutLayoutConfig = group(RolloutLayoutConfig, help="parallel layout of an engine")
    sampling: SamplingConfig = group(SamplingConfig, help="sampling of training responses")
    max_model_len: Optional[int] = key(
        None,
        "maximum number of tokens of prompt and response together",
        AT_LEAST_1,
        null="`data.max_prompt_tokens` plus the maximum response length",
    )
    max_num_seqs: Optional[int] = key(
        None,
        "maximum number of responses that each of the `rollout.layout.dp` groups of an engine decodes concurrently",
        AT_LEAST_1,
        null="256; `vllm`: 1024 on devices with at least 70 GiB except A100, as vLLM chooses",
    )
    max_num_batched_tokens: Optional[int] = key(
        None,
        "`vllm`: maximum number of tokens per forward pass of an engine, including prompt tokens",
        AT_LEAST_1,
        null="vLLM's choice",
        more="Longer prompts are processed in chunks. It must be at least `rollout.max_num_seqs`; vLLM's choice always is.",
        only_with=engines_that_read("rollout.max_num_batched_tokens"),
    )
    quantization: Optional[str] = key(
        None,
        "8-bit weights in engines",
        one_of(fp8="8-bit floats, one scale per block of 128x128", int8="8-bit integers, one scale per row"),
        null="weights in `model.dtype`",
        more="The trainer's weights do not change. The sender quantises the matrices of the layers, which halves their bytes "
        "compared to bf16. See [8-bit engine weights](scale/low-precision.md#8-bit-engine-weights).",
        only_with=engines_that_read("rollout.quantization"),
    )
    vllm: Optional[dict[str, Any]] = key(
        None,
        "engine arguments of vLLM, such as `{kv_cache_dtype: fp8}`",
        null="none",
        more="Any field of EngineArgs of the installed vLLM, by name. Names and types are checked before processes start. "
        "Arguments that other keys set are rejected. See [performance](scale/tuning.md#vllms-own-arguments).",
        only_with=engines_that_read("rollout.vllm"),
    )
    gpu_memory_utilization: float = key(0.5, "CUDA: share of a device's memory that an engine may use", SHARE)
    kv_cache_gib: float = key(0.5, "CPU: size of an engine's KV cache in GiB", ABOVE_0)
    server: ServerConfig = group(ServerConfig, help="external vLLM servers")
    speculative: SpeculativeConfig = group(SpeculativeConfig, help="speculative decoding")
    enforce_eager: bool = key(False, "CUDA: disable CUDA graphs", more="On a CPU engines always run eagerly.")
    sleep_level: int = key(
        2,
        "CUDA, `colocated`: memory that the engine frees while the trainer learns; 0: none; 1: the KV cache and the "
        "weights, with a copy of the weights in host memory; 2: the KV cache and the weights, which the next sync writes "
        "again",
        Range(0, 2),
        more="1 needs as much pinned host memory as the engine's weights, and time for the copies. Only engines sleep: "
        "`offload` moves critic, reference and reward model.",
        only_with="rollout.placement=colocated",
    )
    order: str = key(
        "in_order",
        "`colocated`: assignment of a step's prompts to engines, and their order",
        one_of(
            in_order="each of N engines takes every N-th prompt, in data order",
            longest_first="engines get equal expected tokens and start with the longest",
            shared_queue="the same order, but a free engine takes the next waiting prompt",
        ),
        more="The expected length is the length of the prompt's longest response last time, otherwise the mean of its data "
        "source. Seeds do not depend on the order. With `shared_queue` the batches depend on timing, so a resumed run "
        "equals an uninterrupted run only up to rounding. Prompts wait if a step has more than `rollout.max_num_seqs` "
        "responses per engine.",
        only_with="rollout.placement=colocated",
    )
    at_publish: Optional[str] = key(
        None,
        "`trainer.max_staleness`: unfinished responses when engines receive new weights",
        Choices(
            {
                "continue": "continue with the old keys and values",
                "resubmit": "continue; keys and values are recomputed with the new weights",
                "drain": "finish before the weights are sent",
            }
        ),
        null="`continue`, or `drain` with `rollout.deterministic_order`",
        more="With `drain`, a `trainer.max_staleness` above 1 makes responses staler without making steps shorter.",
        only_with=_AHEAD,
    )
    oversample: float = key(
        1.0,
        "`disaggregated`: started prompts per prompt that a step trains on",
        Range(1, 8),
        more="A step uses the prompts that finish first. The others continue within `trainer.max_staleness`, or restart.",
        only_with=_APART,
    )
    deterministic_order: bool = key(
        False,
        "`trainer.max_staleness`: train on prompts in data order, not in the order in which they finish",
        more="A run that was killed and resumed, or that lost engines, then equals an undisturbed run, bit for bit. Each rank "
        "keeps a copy of its published weights in host memory.",
        only_with=_AHEAD,
    )
    engine_timeout_s: float = key(
        60.0,
        "`disaggregated`: an engine without an answer for this time is restarted, at most 3 times in a row; `server`: a "
        "server has failed if a request takes 60 times as long",
        ABOVE_0,
    )
    ray: RayConfig = group(RayConfig, help="Ray cluster of disaggregated engines")

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

    method: str = key(
        "planned",
        "weight sync",
        one_of(
            planned="every byte goes from its trainer shard directly to its place in the engine",
            gather="full tensors, one at a time, as a baseline",
        ),
        more="With `gather` a full tensor is sent under its Hugging Face name, and the engine splits it again.",
    )
    bucket_bytes: int = key(
        268435456,
        "`planned`: maximum number of bytes that a rank sends, or receives, at a time; two buckets are in flight",
        AT_LEAST_1,
        only_with="bridge.method=planned",
    )
    verify: str = key(
        "digest",
        "`planned`: check of the weights after every sync",
        one_of(off="", digest="hash every tensor on both sides"),
        more="The run ends if a hash differs.",
    )
    full_every: Optional[int] = key(
        None,
        "`disaggregated`: one in this number of syncs sends all elements, the others only changed elements",
        AT_LEAST_1,
        null="every sync sends all elements",
        only_with="rollout.placement=disaggregated",
        more="Plug-in `rlhf_mcore_contrib.delta_sync`. Use it for slow links and models in bf16: at a learning rate of 1e-6, "
        "a step changes about one percent of the elements. Messages are hashed; if a hash differs, that sync sends "
        "everything. Trainer ranks also keep their weights in host memory.",
    )
    transport: str = key(
        "group",
        "`disaggregated`: transport of weight messages",
        one_of(group="the process group: NCCL or gloo", nixl="engines read registered memory through NIXL"),
        more="NIXL (plug-in `rlhf_mcore_contrib.nixl`, package `nixl`) uses RDMA if the network supports it. Message buffers "
        "then stay allocated.",
        only_with="rollout.placement=disaggregated",
    )
    canary: Optional[bool] = key(
        None,
        "after every sync, compare the logprobs of a few tokens between engines and trainer",
        null="true with colocated engines, else false",
        more="Every engine generates these tokens. An engine that disagrees with the trainer is not used. If models are "
        "offloaded between uses, the trainer computes its logprobs while the engines sleep, before it learns.",
    )
    live_cpu_weights: bool = key(
        False,
        "CPU: use plain kernels on live weights instead of vLLM's packed copies",
        more="A sync then writes in place; generation is a little slower.",
    )


class RuleConfig(Item):
    """One rule grader and its weight. A grade g between 0 and 1 scores incorrect + g * (correct - incorrect)."""

    name: str = key("???", "name of the rule", one_of(*GRADERS))
    weight: float = key(1.0, "weight of its score in the sum", FINITE)
    correct: float = key(1.0, "score of a correct response", FINITE)
    incorrect: float = key(0.0, "score of an incorrect response", FINITE)
    pattern: Optional[str] = key(
        None,
        "`regex`: an RE2 expression that must match anywhere in the response",
        null="the ground truth is the expression",
    )
    min_chars: int = key(0, "`length`: minimum number of characters for the full grade", AT_LEAST_0)
    max_chars: Optional[int] = key(
        None, "`length`: maximum number of characters for the full grade", AT_LEAST_0, null="no limit"
    )
    margin_chars: int = key(
        0, "`length`: number of characters over which the grade falls to 0 outside these limits", AT_LEAST_0
    )
    scripts: list[str] = key(["Latin"], "`language`: allowed Unicode scripts, such as Latin, Han, Cyrillic")
    partial: bool = key(False, "`code`: the grade is the share of passed tests; false: 1 if all tests pass, else 0")
    max_tests: Optional[int] = key(
        None, "`code`: maximum number of tests per prompt; the first tests are used", AT_LEAST_1, null="all"
    )
    test_s: float = key(
        6.0, "`code`: CPU seconds per test; the wall-clock limit is three times as long plus 5 s", ABOVE_0
    )
    total_s: float = key(
        30.0,
        "`code`: CPU seconds for all tests of a response; the wall-clock limit is three times as long plus 5 s",
        ABOVE_0,
    )


class FunctionConfig(Item):
    """An additional reward function."""

    path: str = key("???", "`path/to/file.py:name`, called like `reward.function`")
    weight: float = key(1.0, "weight of its score in the sum", FINITE)
    name: Optional[str] = key(None, "name of its score in the metrics", null="the name of the function")


class SandboxConfig(Group):
    """Set the isolation and limits of programs that the model writes."""

    minimum: str = key(
        "filters",
        "weakest isolation with which a run may start",
        one_of(
            rlimits="limits for CPU, memory, files and processes; programs can read your files and use the network",
            filters="also Landlock and seccomp; programs cannot read your files or use the network",
            namespaces="also separate Linux namespaces; programs see no other processes, files or networks",
        ),
        more="The strongest isolation of the machine is always used; `rlhf-mcore doctor` shows it.",
    )
    memory_gib: float = key(2.0, "memory of a program with all its child processes, in GiB", ABOVE_0)
    packages: bool = key(True, "allow imports of packages that are installed with rlhf_mcore, such as numpy")


class RewardConfig(Group):
    """Set how responses are scored: a weighted sum of rules or your function, and a reward model."""

    @property
    def ray_address(self) -> str | None:
        """The address of a running Ray cluster that workers join, or None."""
        return None if self.pool in ("local", "ray") else self.pool

    rules: list[RuleConfig] = key(
        [RuleConfig(name="final_number")],
        "rule graders and their weights in the sum",
        more="See [rewards](guide/rewards/index.md). A grade g scores `incorrect` + g · (`correct` - `incorrect`); by default "
        "these are 0 and 1.",
    )
    sources: Optional[dict[str, list[RuleConfig]]] = key(
        None,
        "rules per `data_source`, which replace `reward.rules`: `{my_source: [{name: math}]}`",
        null="`reward.rules` for all sources",
        more="`aime*` matches every source that starts with aime. Well-known sources have built-in rules; `{}` uses only "
        "these.",
    )
    function: Optional[str] = key(
        None,
        "`path/to/file.py:name`, called as f(data_source, solution_str, ground_truth, extra_info); replaces the rules",
        more="It runs in worker processes ([functions](guide/rewards/functions.md)).",
    )
    functions: list[FunctionConfig] = key(
        [],
        "functions whose scores are added, such as `[{path: my.py:polite, weight: 0.5}]`",
        more="With `rules: []` only these functions score. Each score is reported as `reward/function.<name>_mean`.",
    )
    pool: str = key(
        "local",
        "location of the worker processes",
        Choices(
            {
                "local": "on the machine of their rank",
                "ray": "under Ray, which is started on each machine and ends with the run",
            },
            adds=is_address,
            others="host:port",
        ),
        more="`host:port`, such as `10.0.0.1:6379`, selects a running Ray cluster that includes this machine. Its machines "
        "need no GPU.",
    )
    ray: RewardRayConfig = group(RewardRayConfig, help="Ray resources of the workers")
    workers: Optional[int] = key(
        None, "worker processes per rank", AT_LEAST_1, null="the rank's share of the cores, at most 8"
    )
    timeout_s: float = key(60.0, "`function`: time limit per response in seconds", ABOVE_0)
    memory_gib: float = key(8.0, "`function`: memory of a worker in GiB", ABOVE_0)
    env: list[str] = key(
        [],
        "environment variables that workers see, in addition to `PATH`, `HOME`, `LANG`, `PYTHONPATH` and a few others",
    )
    on_error: str = key(
        "fail",
        "handling of a response without a score",
        one_of(
            fail="the run ends",
            zero="it scores 0 and is counted",
            drop="its prompt is dropped from the step with all its responses, and counted",
        ),
    )
    max_error_share: float = key(
        1.0,
        "`on_error: zero` and `drop`: maximum share of a step's responses without a score; above it the run ends; 1: off",
        SHARE,
    )
    sandbox: SandboxConfig = group(SandboxConfig, "sandbox in which the rule `code` runs programs of the model")
    model: RewardModelConfig = group(RewardModelConfig, "a reward model; its score is added")
    remote: RemoteRewardConfig = group(RemoteRewardConfig, "a server that scores responses; replaces the rules")
    judge: JudgeConfig = group(JudgeConfig, "a language model that grades responses with a rubric; its grade is added")


# Maximum number of candidates of a sampled token if top_p or top_k restrict them. Ties of the last candidate may exceed it.
MOST_SUPPORT = 512


def truncates(sampling: SamplingConfig) -> bool:
    """Return whether tokens are sampled from a part of the vocabulary. Updates then need the recorded candidates."""
    return sampling.top_p < 1 or sampling.top_k > 0
