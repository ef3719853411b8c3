"""Derived properties of a configuration: roles, scores, lengths, and the rules that score a data source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import (
    ADVANTAGES,
    GRADERS,
    PREFERENCE_LOSSES,
    ROLLOUT,
    Estimator,
    Grader,
    PreferenceLoss,
    run_kind,
)
from rlhf_mcore.config.schema.reward import FunctionConfig, RewardConfig, RuleConfig
from rlhf_mcore.geometry import AdapterSizes

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config, LayoutConfig, LoraConfig

SHORTEST_PREFIX = 32  # tokens; sharing a shorter prefix costs more than it saves
FP8_TOKENS = 32  # FP8 products need a multiple of 16 tokens, MXFP8 of 32


# --------------------------------------------------------------------------------------------------------------- roles
@dataclass(frozen=True, slots=True)
class RoleLayout:
    """A model of the run with its own layout."""

    name: str  # its group in the configuration
    layout: LayoutConfig
    ranks: list[int] | None

    @property
    def model_size(self) -> int:
        """The number of ranks of one replica. The role's number of ranks must be a multiple of it."""
        cut = self.layout
        experts = (cut.tp if cut.etp is None else cut.etp) * cut.ep * cut.pp
        return math.lcm(cut.tp * cut.pp * cut.cp, experts)


def role_layouts(cfg: Config) -> list[RoleLayout]:
    """List every role of the run that has its own layout."""
    roles: dict[str, Any] = {"actor": cfg.actor}
    if run_kind(cfg).generates:
        roles |= {"critic": cfg.critic} if needs_critic(cfg) else {}
        roles |= {"reward.model": cfg.reward.model} if cfg.reward.model.path is not None else {}
        roles |= {"teacher": cfg.teacher} if cfg.teacher.path is not None else {}  # others have the actor's layout
    return [RoleLayout(name, role.layout, role.ranks) for name, role in roles.items()]


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model of the run besides the actor, which reads the same rows. ``key`` names its directory ``path``."""

    role: str  # the group with its layout
    key: str
    path: str
    layout: LayoutConfig
    heads: tuple[str, ...] = ("lm",)  # heads that the model may have


def other_models(cfg: Config) -> Iterator[OtherModel]:
    """List the models of the run besides the actor that are read from a directory."""
    if cfg.reference.path is not None and needs_reference(cfg):
        yield OtherModel("actor", "reference.path", cfg.reference.path, cfg.actor.layout)
    if not run_kind(cfg).generates:
        return
    critic, reward, teacher = cfg.critic, cfg.reward.model, cfg.teacher
    if needs_critic(cfg):
        key = "model.path" if critic.path is None else "critic.path"
        yield OtherModel("critic", key, critic.path or cfg.model.path, critic.layout, ("lm", "token"))
    if reward.path is not None:
        yield OtherModel("reward.model", "reward.model.path", reward.path, reward.layout, ("sequence",))
    if teacher.path is not None and teacher.weights == "path":
        yield OtherModel("teacher", "teacher.path", teacher.path, teacher.layout)
        for source, path in (teacher.sources or {}).items():
            yield OtherModel("teacher", f"teacher.sources[{source}]", path, teacher.layout)


def balanced_stages(num_layers: int, num_stages: int) -> list[int]:
    """Divide layers among pipeline stages as equally as possible."""
    borders = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [high - low for low, high in pairwise(borders)]


def offloaded_parts(choice: str) -> tuple[str, ...]:
    """List the parts of a trained model that leave the device, for a value of ``offload`` (auto: none)."""
    return {"state": ("gradients", "optimizer"), "always": ("gradients", "optimizer", "weights")}.get(choice, ())


def is_offloaded(choice: str) -> bool:
    """Return whether the weights of a frozen model leave the device, by its resolved ``offload`` (auto: no)."""
    return choice in ("always", "by_layer")


def adapter_sizes(cfg: LoraConfig) -> AdapterSizes | None:
    """Return the sizes of a role's adapters, or None if it trains whole weights."""
    if cfg.rank is None:
        return None
    alpha = 2.0 * cfg.rank if cfg.alpha is None else cfg.alpha
    if (
        cfg.init == "pissa"
    ):  # the rank doubles by a fixed copy of the initial adapters (contrib/pissa); the scale is unchanged
        factor = 2**0.5 if cfg.use_rslora else 2
        return AdapterSizes(2 * cfg.rank, alpha * factor, tuple(cfg.targets), cfg.use_rslora, fixed=cfg.rank)
    return AdapterSizes(cfg.rank, alpha, tuple(cfg.targets), cfg.use_rslora, use_dora=cfg.use_dora)


# ----------------------------------------------------------------------------------------------------------- algorithm
def _estimator(cfg: Config) -> Estimator:
    return ADVANTAGES.get(cfg.algorithm.advantage, Estimator())


def needs_critic(cfg: Config) -> bool:
    """Return whether the run builds a critic."""
    if not run_kind(cfg).generates:
        return False
    if cfg.algorithm.use_critic == "auto":
        return _estimator(cfg).needs_values
    return cfg.algorithm.use_critic == "true"


def needs_reference(cfg: Config) -> bool:
    """Return whether the policy is compared with a frozen reference. With adapters, it is the actor without them."""
    kind = run_kind(cfg)
    if kind.compares:
        return PREFERENCE_LOSSES.get(cfg.algorithm.dpo.loss, PreferenceLoss()).needs_reference
    return kind.generates and bool(cfg.algorithm.kl.coef)


def has_teacher(cfg: Config) -> bool:
    """Return whether the policy learns from a teacher, which may be itself."""
    return run_kind(cfg).generates and (cfg.teacher.path is not None or cfg.teacher.weights != "path")


def draws_greedy(cfg: Config) -> bool:
    """Return whether each prompt gets a greedy response in addition to the trained responses."""
    return run_kind(cfg).generates and _estimator(cfg).needs_greedy


# -------------------------------------------------------------------------------------------------------------- scores
def reads_scores(cfg: Config) -> bool:
    """Return whether advantages are computed from scores. Otherwise scores are only metrics, and may be absent."""
    return _estimator(cfg).reads_scores


def grades(cfg: Config) -> bool:
    """Return whether the keys of ``reward`` score responses. Otherwise only the environment or the rollout function does."""
    if cfg.environment.function == ROLLOUT:
        return has_graders(cfg.reward)
    return cfg.environment.function is None or cfg.environment.score != "environment"


def needs_answer(cfg: Config) -> bool:
    """Return whether some grader compares a response with a ground truth from the data."""
    return grades(cfg) and not scores_alone(cfg.reward) and any_needs_truth(cfg.reward)


# ------------------------------------------------------------------------------------------------------------- lengths
def longest_response(cfg: Config) -> int:
    """Return the maximum number of tokens of a training row after its prompt."""
    episode = cfg.environment.max_tokens if cfg.environment.function is not None else None
    return episode or cfg.rollout.sampling.max_new_tokens


def max_new_tokens(cfg: Config) -> int:
    """Return the maximum length of a response, in training or evaluation."""
    return max(longest_response(cfg), cfg.evaluate.max_new_tokens or 0)


def longest_example(cfg: Config) -> int:
    """Return the maximum number of tokens of prompt and response in a supervised run."""
    if cfg.data.max_tokens is not None:
        return cfg.data.max_tokens
    most = cfg.trainer.max_tokens_per_microbatch // run_kind(cfg).rows_per_example
    multiple = padded_to(cfg.actor.layout, in_fp8(cfg.actor))
    return most // multiple * multiple


def in_fp8(group: Any) -> bool:
    """Return whether a role's model computes matrix products in FP8."""
    return bool(getattr(group, "fp8", None) or (group.megatron or {}).get("fp8"))


def padded_to(layout: LayoutConfig, in_fp8: bool) -> int:
    """Return the number that must divide the tokens of a microbatch."""
    return token_multiple(layout.tp, layout.cp, layout.sequence_parallel) * (FP8_TOKENS if in_fp8 else 1)


def token_multiple(tp: int, cp: int, sequence_parallel: bool) -> int:
    """Return the number that must divide the tokens of a sequence.

    A context-parallel rank holds two chunks of every sequence. Sequence parallelism splits them over the tensor-parallel ranks.
    """
    return cp * math.lcm(2 if cp > 1 else 1, tp if sequence_parallel else 1)


# ---------------------------------------------------------------------------------------------- rules of data sources
_NUMBER, _MATH = [RuleConfig(name="final_number")], [RuleConfig(name="math")]
_DAPO = [RuleConfig(name="answer_line", incorrect=-1.0)]
_CODE = [RuleConfig(name="code")]
_TENTHS = [RuleConfig(name="code", partial=True, max_tests=10)]  # the grade is the share of the first ten tests
_THINK_AND_BOX = r"^.*<think>.*</think>.*\\boxed\{.*\}.*$"
# Names in the data sets themselves and in verl's data preparation, graded as in verl.
SOURCES: dict[str, list[RuleConfig]] = {
    **dict.fromkeys(("openai/gsm8k", "gsm8k"), _NUMBER),
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math"), _MATH),
    **dict.fromkeys(("math_dapo", "math_dapo_reasoning", "BytedTsinghua-SIA/DAPO-Math-17k", "aime*"), _DAPO),
    **dict.fromkeys(("HuggingFaceH4/aime_2024", "Maxwell-Jia/AIME_2024", "math-ai/aime24", "math-ai/aime25"), _MATH),
    **dict.fromkeys(("opencompass/AIME2025", "yentinglin/aime_2025", "math-ai/amc23", "math-ai/minervamath"), _MATH),
    "numina_*": _MATH,
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _TENTHS),
    **dict.fromkeys(("openai_humaneval", "mbpp", "livecodebench*"), _CODE),
    "hiyouga/geometry3k": [
        RuleConfig(name="math", weight=0.9),
        RuleConfig(name="regex", weight=0.1, pattern=_THINK_AND_BOX),
    ],
}


def rules_of(source: str, sources: Mapping[str, Sequence[RuleConfig]] | None) -> Sequence[RuleConfig] | None:
    """Return the rules of a data source by its name, else by its longest known prefix ("aime*"), else None.

    The user's table wins over the built-in one.
    """
    table = {**SOURCES, **(sources or {})}
    if source in table:
        return table[source]
    beginnings = [name for name in table if name.endswith("*") and source.startswith(name[:-1])]
    return table[max(beginnings, key=len)] if beginnings else None


def rules_for(
    source: str, rules: Sequence[RuleConfig], sources: Mapping[str, Sequence[RuleConfig]] | None
) -> Sequence[RuleConfig]:
    """Return the rules that score a prompt of a data source: ``rules`` without a table, else the source's rules or an empty list."""
    return rules if sources is None else rules_of(source, sources) or ()


def rule_tables(cfg: RewardConfig) -> dict[str, Sequence[RuleConfig]]:
    """Return every list of rules in the configuration, by its key."""
    if cfg.sources is None:
        return {"reward.rules": cfg.rules}
    return {f"reward.sources[{source}]": rules for source, rules in cfg.sources.items()}


def needs_truth(rule: RuleConfig) -> bool:
    """Return whether a rule compares a response with a ground truth."""
    grader = GRADERS.get(rule.name, Grader())
    return grader.needs_answer and not (rule.name == "regex" and rule.pattern is not None)


def any_needs_truth(cfg: RewardConfig) -> bool:
    """Return whether any rule needs a ground truth. With a table of sources, the built-in rules do."""
    return cfg.sources is not None or any(map(needs_truth, cfg.rules))


def scores_alone(cfg: RewardConfig) -> bool:
    """Return whether a function or a server replaces the rules."""
    return cfg.function is not None or cfg.remote.url is not None


def has_graders(cfg: RewardConfig) -> bool:
    """Return whether rules, functions, a server or a judge score responses."""
    return bool(cfg.rules or cfg.sources or cfg.functions) or scores_alone(cfg) or cfg.judge.url is not None


def unused_rules(cfg: RewardConfig) -> dict[str, str]:
    """Return the keys of rules that are set but unused, each with the key that replaces it."""
    replacing = {"reward.function": cfg.function, "reward.remote.url": cfg.remote.url, "reward.sources": cfg.sources}
    key = next((key for key, value in replacing.items() if value is not None), None)
    if key is None:
        return {}
    given = {"reward.rules": cfg.rules != RewardConfig().rules, "reward.sources": cfg.sources is not None}
    return {unused: key for unused, is_given in given.items() if is_given and unused != key}


def function_name(function: FunctionConfig) -> str:
    """Return the name of a function in the metrics."""
    return function.name or function.path.rpartition(":")[2].rpartition(".")[2]
