"""Choose the rules that score a prompt: the rules of its data source, or of the run. Also the rules of well-known data sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_mcore.config.choices import GRADERS, Grader
from rlhf_mcore.config.schema.reward import FunctionConfig, RewardConfig, RuleConfig

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
