"""The group ``reward``: scores of responses."""

from __future__ import annotations

from typing import Annotated, Literal, Optional

from rlhf_mcore.config.choices import GRADERS
from rlhf_mcore.config.schema.group import (
    Choices,
    Group,
    Item,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    group,
    is_address,
    key,
)
from rlhf_mcore.config.schema.models import RewardModelConfig

SCORE = r"(?i)score[\s:=*_]{0,6}(-?[0-9]+(?:\.[0-9]+)?)"
RESPONSE = "{response}"


class RuleConfig(Item):
    """A rule grader and its weight. A grade g between 0 and 1 scores incorrect + g * (correct - incorrect)."""

    name: Annotated[str, Choices(tuple(GRADERS))] = key("???", "name of the rule")
    weight: float = key(1.0, "weight of its score in the sum")
    correct: float = key(1.0, "score of a correct response")
    incorrect: float = key(0.0, "score of an incorrect response")
    pattern: Optional[str] = key(None, "`regex`: an RE2 expression that must match anywhere in the response")
    """`null`: the ground truth is the expression."""
    min_chars: NonNegativeInt = key(0, "`length`: minimum number of characters for the full grade")
    max_chars: Optional[NonNegativeInt] = key(None, "`length`: maximum number of characters for the full grade")
    margin_chars: NonNegativeInt = key(0, "`length`: characters outside the limits over which the grade falls to 0")
    scripts: list[str] = key(["Latin"], "`language`: allowed Unicode scripts, such as Latin, Han, Cyrillic")
    partial: bool = key(False, "`code`: the grade is the share of passed tests; false: 1 if all tests pass, else 0")
    max_tests: Optional[PositiveInt] = key(None, "`code`: number of first tests that are used; null: all")
    test_s: PositiveFloat = key(6.0, "`code`: CPU seconds per test; the wall-clock limit is three times this plus 5 s")
    total_s: PositiveFloat = key(30.0, "`code`: CPU seconds for all tests of a response; wall clock as for `test_s`")


class FunctionConfig(Item):
    """An additional reward function."""

    path: str = key("???", "`path/to/file.py:name`, called like `reward.function`")
    weight: float = key(1.0, "weight of its score in the sum")
    name: Optional[str] = key(None, "name of its score in the metrics; null: the name of the function")


class SandboxConfig(Group):
    """Set the isolation and limits of programs that the model writes."""

    minimum: Literal["rlimits", "filters", "namespaces"] = key("filters", "weakest isolation with which a run starts")
    """`rlimits`: limits for CPU, memory, files and processes; programs can read your files and use the network. `filters`:
    also Landlock and seccomp; programs can do neither. `namespaces`: also separate Linux namespaces. The strongest
    isolation of the machine is always used; `rlhf-mcore doctor` shows it."""
    memory_gib: PositiveFloat = key(2.0, "memory of a program with all its child processes, in GiB")
    packages: bool = key(True, "allow imports of packages that are installed with rlhf_mcore, such as numpy")


class RemoteRewardConfig(Group):
    """A server that scores responses; it replaces the rules."""

    url: Optional[str] = key(None, "URL to which responses are posted, such as `http://127.0.0.1:8900/score`")
    """`rlhf-mcore serve-reward` is such a server; [rewards](guide/rewards/services.md) defines the protocol for other
    servers."""
    token_env: Optional[str] = key(None, "environment variable that contains the server's token")
    batch_size: PositiveInt = key(32, "responses per request")
    concurrency: PositiveInt = key(8, "concurrent requests per rank")
    timeout_s: PositiveFloat = key(60.0, "time limit per attempt of a request in seconds")
    """A request has at most 5 attempts within 5 times this limit."""


class JudgeConfig(Group):
    """A language model that grades responses with a rubric; its grade is added."""

    url: Optional[str] = key(None, "base URL of an OpenAI-compatible API, such as `http://127.0.0.1:8000/v1`")
    model: Optional[str] = key(None, "name of the model at that URL; required with `url`")
    weight: float = key(1.0, "weight of its grade (between 0 and 1) in the sum")
    rubric: Optional[str] = key(None, "prompt for the judge, or the path of a file with it; null: the built-in rubric")
    """It contains `{response}` and optionally `{prompt}`, `{ground_truth}` and `{data_source}`. A text without
    `{response}` is a path."""
    images: bool = key(False, "send the images of the prompt to the judge, before the rubric")
    parse: str = key(SCORE, "RE2 expression whose first group is the score; the last match in the answer is used")
    max_score: PositiveFloat = key(10.0, "highest score; scores from 0 to this value become grades from 0 to 1")
    max_tokens: PositiveInt = key(1024, "maximum length of the judge's answer in tokens")
    token_env: Optional[str] = key(None, "environment variable that contains the API key")
    concurrency: PositiveInt = key(16, "concurrent requests per rank")
    timeout_s: PositiveFloat = key(120.0, "time limit per attempt of a request in seconds, as in `reward.remote`")

    @property
    def rubric_file(self) -> str | None:
        """The path of the rubric file, or None if the configuration contains the rubric."""
        return None if self.rubric is None or RESPONSE in self.rubric else self.rubric


class RewardRayConfig(Group):
    """Set the resources of workers in a Ray cluster."""

    cpus_per_worker: PositiveFloat = key(1.0, "cores per worker; use 0.1 for workers that wait for a service")


class RewardConfig(Group):
    """Set how responses are scored: a weighted sum of rules or your function, and a reward model."""

    rules: list[RuleConfig] = key([RuleConfig(name="final_number")], "rule graders and their weights in the sum")
    """See [rewards](guide/rewards/index.md)."""
    sources: Optional[dict[str, list[RuleConfig]]] = key(None, "rules per `data_source`, which replace `reward.rules`")
    """`{my_source: [{name: math}], aime*: ...}`; the second name matches every source that starts with aime. `{}`: only
    the built-in rules of well-known sources. `null`: `reward.rules` for all sources."""
    function: Optional[str] = key(None, "`path/to/file.py:name` of a function that replaces the rules")
    """Called as f(data_source, solution_str, ground_truth, extra_info) in worker processes
    ([functions](guide/rewards/functions.md))."""
    functions: list[FunctionConfig] = key([], "functions whose scores are added: `[{path: my.py:polite, weight: 0.5}]`")
    """With `rules: []` only these functions score. Each score is reported as `reward/function.<name>_mean`."""
    pool: Annotated[str, Choices(("local", "ray"), is_address, "host:port")] = key("local", "location of the workers")
    """`local`: on the machine of their rank. `ray`: under Ray, which is started on each machine and ends with the run.
    `host:port`, such as `10.0.0.1:6379`: a running Ray cluster that includes this machine. Its machines need no GPU."""
    ray: RewardRayConfig = group(RewardRayConfig, "Ray resources of the workers")
    workers: Optional[PositiveInt] = key(None, "worker processes per rank; null: its share of the cores, at most 8")
    timeout_s: PositiveFloat = key(60.0, "`function`: time limit per response in seconds")
    memory_gib: PositiveFloat = key(8.0, "`function`: memory of a worker in GiB")
    env: list[str] = key([], "environment variables that workers see")
    """`PATH`, `HOME`, `LANG`, `PYTHONPATH` and a few others are always visible."""
    on_error: Literal["fail", "zero", "drop"] = key("fail", "handling of a response without a score")
    """`fail`: the run ends. `zero`: it scores 0 and is counted. `drop`: its prompt is dropped from the step with all
    its responses, and counted."""
    max_error_share: Share = key(1.0, "share of a step's responses without a score above which the run ends; 1: off")
    sandbox: SandboxConfig = group(SandboxConfig, "sandbox in which the rule `code` runs programs of the model")
    model: RewardModelConfig = group(RewardModelConfig, "a reward model; its score is added")
    remote: RemoteRewardConfig = group(RemoteRewardConfig, "a server that scores responses; replaces the rules")
    judge: JudgeConfig = group(JudgeConfig, "a language model that grades responses with a rubric; its grade is added")

    @property
    def ray_address(self) -> str | None:
        """The address of a running Ray cluster that workers join, or None."""
        return None if self.pool in ("local", "ray") else self.pool
