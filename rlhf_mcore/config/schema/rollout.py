"""Groups of what generates and scores: ``rollout``, ``bridge`` and ``reward``."""

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
    """Set how an engine is cut."""

    tp: int = key(
        1, "tensor-parallel size of an engine; `colocated`: world size / (tp · pp · dp) engines run side by side", _SIZE
    )
    pp: int = key(1, "stages that an engine cuts its layers into, one after the other", _SIZE)
    dp: int = key(1, "groups of ranks of an engine that attend to requests of their own, and share the experts", _SIZE)
    ep: int = key(1, "tp · dp: each rank of a stage has some of the experts; 1: a part of each", _SIZE)

    @property
    def num_ranks(self) -> int:
        """Ranks of an engine."""
        return self.tp * self.pp * self.dp


class SamplingConfig(Group):
    """Set how responses are drawn."""

    n: int = key(8, "responses per prompt; group-relative advantages need 2 or more", AT_LEAST_1)
    # A greedy rollout has nothing to learn from.
    temperature: float = key(1.0, "logprobs of engine and trainer are both taken at this temperature", ABOVE_0)
    top_p: float = key(
        1.0,
        "share of probability of the likeliest tokens that are drawn from; 1: off",
        SHARE,
        more="The tokens that each one was drawn from are recorded, and policy ratios are taken within them "
        "([top_p and top_k](algorithms/off-policy.md#top_p-and-top_k)).",
    )
    top_k: int = key(
        -1,
        "number of the likeliest tokens that are drawn from, at most 512; -1: off, or 512 where `top_p` is below 1",
        Range(1, off=-1),
    )
    max_new_tokens: int = key(256, "longest response", AT_LEAST_1)


class RayConfig(Group):
    """Set where engines on devices of their own run."""

    address: Optional[str] = key(
        None,
        "`disaggregated`: of a running Ray cluster, as `10.0.0.1:6379`",
        null="one is started on this machine, and ends with the run",
        only_with=_APART,
    )
    cpus_per_rank: int = key(1, "`disaggregated`: cores of each process of an engine", AT_LEAST_1, only_with=_APART)


class SpeculativeConfig(Group):
    """Tokens that an engine drafts, and checks in one pass of the model: fewer passes where drafts are good."""

    method: str = key(
        "off",
        "`vllm`: how an engine drafts the next tokens",
        one_of(
            off="it does not",
            ngram="what has followed the last tokens before, in the prompt or the response",
            mtp="by the MTP layers of `model.path` (DeepSeek-V3, GLM-4.5), which are sent to it where they learn (`actor.mtp`)",
        ),
        more="A draft is taken with the probability that keeps the distribution of responses what it is (arXiv 2211.17192), and "
        "logprobs are those of the model. A response is another one than without, since random numbers are taken in another order.",
        only_with=engines_that_read("rollout.speculative.method"),
    )
    num_tokens: int = key(
        1, "tokens that are drafted at a time", Range(1, 32), only_with="rollout.speculative.method=ngram or mtp"
    )
    ngram_tokens: int = key(
        3,
        "`ngram`: so many tokens at the end have to be found again",
        Range(1, 32),
        only_with="rollout.speculative.method=ngram",
    )


_SERVED = engines_that_read("rollout.server")


class ServerConfig(Group):
    """Servers of vLLM that somebody else runs ([servers](scale/external-servers.md))."""

    urls: list[str] = key([], "`server`: their addresses, such as [http://10.0.0.7:8000]", only_with=_SERVED)
    weights_dir: Optional[str] = key(
        None,
        "`server`: directory that trainer and servers see at the same path; the weights of a step go through it",
        null="none",
        only_with=_SERVED,
    )
    token_env: Optional[str] = key(
        None, "`server`: environment variable that holds the servers' API key", null="none", only_with=_SERVED
    )


class RolloutConfig(Group):
    """The engines that generate responses."""

    engine: str = key("vllm", "", Choices({kind.name: kind.purpose for kind in ENGINES.values()}, adds=is_engine))
    placement: str = key(
        "colocated",
        "",
        one_of(colocated="in the trainer's processes", disaggregated="on devices of their own, under Ray"),
        is_fixed=True,
    )
    num_engines: int = key(
        1,
        "`disaggregated`: engines, each of `rollout.layout.tp` · `pp` · `dp` devices",
        Range(1, 4096),
        only_with=_APART,
    )
    layout: RolloutLayoutConfig = group(RolloutLayoutConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    max_model_len: Optional[int] = key(
        None,
        "longest prompt and response together",
        AT_LEAST_1,
        null="`data.max_prompt_tokens` plus the longest response",
    )
    max_num_seqs: Optional[int] = key(
        None,
        "most responses that each of the `rollout.layout.dp` groups of an engine decodes at once",
        AT_LEAST_1,
        null="256; `vllm`: 1024 on devices of 70 GiB or more except A100, as vLLM chooses",
    )
    max_num_batched_tokens: Optional[int] = key(
        None,
        "`vllm`: most tokens of one forward pass of an engine, those of prompts included",
        AT_LEAST_1,
        null="vLLM's choice",
        more="Longer prompts are computed in parts. It bounds `rollout.max_num_seqs`; vLLM's choice is no less than that.",
        only_with=engines_that_read("rollout.max_num_batched_tokens"),
    )
    quantization: Optional[str] = key(
        None,
        "weights of engines",
        one_of(fp8="8 bits, a scale for each block of 128x128", int8="8 bits, a scale for each row"),
        null="in `model.dtype`",
        more="The trainer's stay as they are: they are quantised on their way, and matrices of layers take half the bytes of bf16. "
        "See [8 bits](scale/low-precision.md#8-bit-engine-weights).",
        only_with=engines_that_read("rollout.quantization"),
    )
    vllm: Optional[dict[str, Any]] = key(
        None,
        "arguments of vLLM's engine, as `{kv_cache_dtype: fp8}`",
        null="none",
        more="Any field of EngineArgs of the installed vLLM, by its name. Names and types are checked before processes start. "
        "Arguments that other keys set are rejected. See [performance](scale/tuning.md#vllms-own-arguments).",
        only_with=engines_that_read("rollout.vllm"),
    )
    gpu_memory_utilization: float = key(0.5, "CUDA: share of a device's memory that an engine may use", SHARE)
    kv_cache_gib: float = key(0.5, "CPU: size of an engine's key-value cache", ABOVE_0)
    server: ServerConfig = group(ServerConfig)
    speculative: SpeculativeConfig = group(SpeculativeConfig)
    enforce_eager: bool = key(False, "CUDA: no graph capture", more="On a CPU the engine always runs eagerly.")
    sleep_level: int = key(
        2,
        "CUDA, `colocated`: how the engine frees device memory while the trainer learns; 0: it does not; 1: it keeps a copy of its "
        "weights in host memory; 2: it discards them, and the next sync writes them again",
        Range(0, 2),
        more="The cache is freed with 1 and 2. 1 takes as much pinned host memory as the engine's weights, and time to copy them. "
        "Only engines sleep: `offload` moves critic, reference and reward model, and a judge is a service elsewhere.",
        only_with="rollout.placement=colocated",
    )
    order: str = key(
        "in_order",
        "`colocated`: which engine draws the responses to which prompt of a step, and when",
        one_of(
            in_order="each engine every so-many-th prompt, as they come",
            longest_first="engines expect equally much, and begin with what takes longest",
            shared_queue="the same order, but an engine that has room takes the next prompt that waits",
        ),
        more="What takes longest is known from a prompt's last responses, or from those of its data source. Seeds do not depend on "
        "the order. With `shared_queue` which engine draws what depends on the time, so a resumed run equals the uninterrupted one "
        "only up to rounding; prompts wait where a step has more than `rollout.max_num_seqs` responses for an engine.",
        only_with="rollout.placement=colocated",
    )
    at_publish: Optional[str] = key(
        None,
        "`trainer.max_staleness`: responses that are not finished when new weights come",
        Choices(
            {
                "continue": "continue with them, and with the keys and values of the old ones",
                "resubmit": "continue with them; keys and values are computed again",
                "drain": "finish first",
            }
        ),
        null="`continue`, or `drain` with `rollout.deterministic_order`",
        more="With `drain` a `trainer.max_staleness` above 1 makes responses older and no step shorter.",
        only_with=_AHEAD,
    )
    oversample: float = key(
        1.0,
        "`disaggregated`: prompts that are started for each that a step trains on",
        Range(1, 8),
        more="A step takes those that finish first. The others continue as far as `trainer.max_staleness` allows, or are begun again.",
        only_with=_APART,
    )
    deterministic_order: bool = key(
        False,
        "`trainer.max_staleness`: a step trains on prompts in their order, not in that in which they finish",
        more="A run that was killed and resumed, or has lost engines, then equals the undisturbed one bit for bit. Each rank keeps a "
        "copy of the weights that it has published, in host memory.",
        only_with=_AHEAD,
    )
    engine_timeout_s: float = key(
        60.0,
        "`disaggregated`: an engine that answers nothing for so long is replaced, at most 3 times in a row; `server`: a server that "
        "has not answered a request for 60 times as long has failed",
        ABOVE_0,
    )
    ray: RayConfig = group(RayConfig)

    @property
    def sequences(self) -> int:
        """Responses that a group of an engine decodes at once; the default of small devices if none is set."""
        return self.max_num_seqs or SEQUENCES

    @property
    def slots(self) -> int:
        """Responses that an engine decodes at a time, in all its groups."""
        return self.sequences * self.layout.dp


class BridgeConfig(Group):
    """Set how the actor's weights reach the engines."""

    method: str = key(
        "planned",
        "",
        one_of(planned="every byte straight to its place", gather="full tensors, one at a time: the baseline"),
        more="The place is in the engine's parameters; a full tensor goes under its Hugging Face name, and the engine cuts it again.",
    )
    bucket_bytes: int = key(
        268435456,
        "`planned`: limit of what a rank sends, and of what it receives, at a time; two buckets are in flight",
        AT_LEAST_1,
        only_with="bridge.method=planned",
    )
    verify: str = key(
        "digest",
        "`planned`",
        one_of(off="", digest="hash every tensor on both sides after every sync"),
        more="The run ends at a difference.",
    )
    full_every: Optional[int] = key(
        None,
        "engines of their own: syncs of which one sends every element, and the others those that have changed",
        AT_LEAST_1,
        null="every sync sends everything",
        only_with="rollout.placement=disaggregated",
        more="Plug-in `rlhf_mcore_contrib.delta_sync`. "
        "For slow links, and models in bf16: at a learning rate of 1e-6 a step changes one element of a hundred. Messages are "
        "hashed; one that comes out as another makes its sync send everything. Trainer ranks keep their weights on the host too.",
    )
    transport: str = key(
        "group",
        "engines of their own: how messages reach them",
        one_of(
            group="through the process group: NCCL or gloo", nixl="read by NIXL out of memory that it has registered"
        ),
        more="NIXL (plug-in `rlhf_mcore_contrib.nixl`, package `nixl`) reads by RDMA where there is a network of that kind. "
        "Memory of messages then stays allocated.",
        only_with="rollout.placement=disaggregated",
    )
    canary: Optional[bool] = key(
        None,
        "after every sync, compare logprobs of a few tokens between engines and trainer",
        null="with colocated engines",
        more="Every engine draws them; one that disagrees with the trainer is not used. Where models leave the device between their "
        "uses, the trainer computes its own when the engines sleep, before it learns.",
    )
    live_cpu_weights: bool = key(
        False,
        "CPU: plain kernels on live weights instead of vLLM's packed copies",
        more="A sync is then written in place; generation is a little slower.",
    )


class RuleConfig(Item):
    """One rule grader and its weight in the sum. A grade g between 0 and 1 counts as incorrect + g * (correct - incorrect)."""

    name: str = key("???", "", one_of(*GRADERS))
    weight: float = key(1.0, "its weight in the sum", FINITE)
    correct: float = key(1.0, "what a right answer counts", FINITE)
    incorrect: float = key(0.0, "what a wrong one counts", FINITE)
    pattern: Optional[str] = key(
        None,
        "`regex`: an expression of RE2's syntax, found anywhere in the response",
        null="the ground truth is the expression",
    )
    min_chars: int = key(0, "`length`: from here on a response has the full mark", AT_LEAST_0)
    max_chars: Optional[int] = key(None, "`length`: and up to here", AT_LEAST_0, null="no limit")
    margin_chars: int = key(0, "`length`: outside of the two it falls to 0 over so many characters", AT_LEAST_0)
    scripts: list[str] = key(["Latin"], "`language`: Unicode's names, such as Latin, Han, Cyrillic")
    partial: bool = key(False, "`code`: the grade is the share of tests that are passed; false: all of them or nothing")
    max_tests: Optional[int] = key(None, "`code`: only so many tests of a prompt, its first", AT_LEAST_1, null="all")
    test_s: float = key(
        6.0, "`code`: seconds of the processor for a test; of the clock, three times as many and five more", ABOVE_0
    )
    total_s: float = key(30.0, "`code`: likewise for all tests of a response", ABOVE_0)


class FunctionConfig(Item):
    """A reward function beside others."""

    path: str = key("???", "`path/to/file.py:name`, called as `reward.function` is")
    weight: float = key(1.0, "factor of its score in the sum", FINITE)
    name: Optional[str] = key(None, "of its score in the metrics", null="the function's")


class SandboxConfig(Group):
    """Set where programs of the model run."""

    minimum: str = key(
        "filters",
        "isolation without which a run is refused",
        one_of(
            rlimits="limits of processor, memory, files and processes; files and network are yours",
            filters="and Landlock and seccomp: nothing of yours can be read, there is no network",
            namespaces="and a machine of its own: no other process, file or network is there",
        ),
        more="The strongest that the machine gives is used in any case; `rlhf-mcore doctor` names it.",
    )
    memory_gib: float = key(2.0, "memory of a program, with all processes that it starts", ABOVE_0)
    packages: bool = key(
        True, "whether programs can import the packages that are installed beside rlhf_mcore, such as numpy"
    )


class RewardConfig(Group):
    """Set where scores come from: a weighted sum of rules, or a function of your own, and a reward model."""

    @property
    def ray_address(self) -> str | None:
        """The address of a running cluster that workers join."""
        return None if self.pool in ("local", "ray") else self.pool

    rules: list[RuleConfig] = key(
        [RuleConfig(name="final_number")],
        "rule graders and their weights in the sum",
        more="See [rewards](guide/rewards/index.md). A grade g counts as `incorrect` + g · (`correct` - "
        "`incorrect`), which are 0 and 1 "
        "unless set.",
    )
    sources: Optional[dict[str, list[RuleConfig]]] = key(
        None,
        "rules by `data_source`, in the place of `reward.rules`: `{my_source: [{name: math}]}`",
        null="`reward.rules` for all",
        more="`aime*` is every source that begins so. Rules of well-known sources are there without it; `{}`: those alone.",
    )
    function: Optional[str] = key(
        None,
        "`path/to/file.py:name`, called as f(data_source, solution_str, ground_truth, extra_info); replaces the rules",
        more="It is called in worker processes ([functions](guide/rewards/functions.md)).",
    )
    functions: list[FunctionConfig] = key(
        [],
        "functions whose scores are added to that of the rules, as `[{path: my.py:polite, weight: 0.5}]`",
        more="`rules: []` leaves them alone. Each score is `reward/function.<name>_mean` in the metrics.",
    )
    pool: str = key(
        "local",
        "where workers run",
        Choices(
            {
                "local": "beside their rank",
                "ray": "under Ray, which is started on each machine and ends with the run",
            },
            adds=is_address,
            others="host:port",
        ),
        more="Or `host:port`, such as `10.0.0.1:6379`: under Ray, in a running cluster of which this machine is part. Its machines "
        "need no GPU.",
    )
    ray: RewardRayConfig = group(RewardRayConfig)
    workers: Optional[int] = key(
        None, "worker processes of a rank", AT_LEAST_1, null="its share of the cores, at most 8"
    )
    timeout_s: float = key(60.0, "`function`: for one response", ABOVE_0)
    memory_gib: float = key(8.0, "`function`: memory of a worker", ABOVE_0)
    env: list[str] = key(
        [], "environment variables that workers see beside `PATH`, `HOME`, `LANG`, `PYTHONPATH` and a few more"
    )
    on_error: str = key(
        "fail",
        "a response without a score",
        one_of(
            fail="ends the run",
            zero="is scored 0, and counted",
            drop="leaves the step with all responses to its prompt, and is counted",
        ),
    )
    max_error_share: float = key(
        1.0,
        "`on_error: zero` and `drop`: the run ends where a larger share of a step's responses has no score; 1: off",
        SHARE,
    )
    sandbox: SandboxConfig = group(SandboxConfig, "where the rule `code` runs programs of the model")
    model: RewardModelConfig = group(RewardModelConfig, "a reward model; its score is added")
    remote: RemoteRewardConfig = group(RemoteRewardConfig, "a server that scores responses; it replaces the rules")
    judge: JudgeConfig = group(JudgeConfig, "a language model that grades responses by a rubric; its grade is added")


# Most tokens that each token of a rollout is drawn from where top_p or top_k restrict them, but for ties of the last one.
MOST_SUPPORT = 512


def truncates(sampling: SamplingConfig) -> bool:
    """Tell whether tokens are drawn from a part of the vocabulary, which is then recorded for the updates."""
    return sampling.top_p < 1 or sampling.top_k > 0
