"""What has to hold for reward rules, and the rules of well-known data sources."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from urllib.parse import urlsplit

from rlhf_mcore.config.choices import GRADERS, Grader
from rlhf_mcore.config.keys import walk
from rlhf_mcore.config.schema import FunctionConfig, RewardConfig, RuleConfig
from rlhf_mcore.config.schema.key import Range

_NUMBER, _MATH = [RuleConfig("final_number")], [RuleConfig("math")]
_DAPO = [RuleConfig("answer_line", incorrect=-1.0)]
_CODE, _TENTHS = (
    [RuleConfig("code")],
    [RuleConfig("code", partial=True, max_tests=10)],
)  # the share of the first ten tests
_THINK_AND_BOX = r"^.*<think>.*</think>.*\\boxed\{.*\}.*$"
# Names as verl's data preparation and the data sets themselves write them, graded as verl grades them.
SOURCES: dict[str, list[RuleConfig]] = {
    **dict.fromkeys(("openai/gsm8k", "gsm8k"), _NUMBER),
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math"), _MATH),
    **dict.fromkeys(("math_dapo", "math_dapo_reasoning", "BytedTsinghua-SIA/DAPO-Math-17k", "aime*"), _DAPO),
    **dict.fromkeys(("HuggingFaceH4/aime_2024", "Maxwell-Jia/AIME_2024", "math-ai/aime24", "math-ai/aime25"), _MATH),
    **dict.fromkeys(("opencompass/AIME2025", "yentinglin/aime_2025", "math-ai/amc23", "math-ai/minervamath"), _MATH),
    "numina_*": _MATH,
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _TENTHS),
    **dict.fromkeys(("openai_humaneval", "mbpp", "livecodebench*"), _CODE),
    "hiyouga/geometry3k": [RuleConfig("math", 0.9), RuleConfig("regex", 0.1, pattern=_THINK_AND_BOX)],
}


def rules_of(source: str, sources: Mapping[str, Sequence[RuleConfig]] | None) -> Sequence[RuleConfig] | None:
    """The rules of a data source, or None: those of its own name, else of the longest beginning ("aime*"). The user's table wins."""
    table = {**SOURCES, **(sources or {})}
    if source in table:
        return table[source]
    beginnings = [name for name in table if name.endswith("*") and source.startswith(name[:-1])]
    return table[max(beginnings, key=len)] if beginnings else None


def rules_for(
    source: str, rules: Sequence[RuleConfig], sources: Mapping[str, Sequence[RuleConfig]] | None
) -> Sequence[RuleConfig]:
    """The rules that score a prompt of a data source: with a table those of the source, maybe none, else ``rules``."""
    return rules if sources is None else rules_of(source, sources) or ()


def rule_tables(cfg: RewardConfig) -> dict[str, Sequence[RuleConfig]]:
    """Every list of rules that a user wrote, by its key."""
    if cfg.sources is None:
        return {"reward.rules": cfg.rules}
    return {f"reward.sources[{source}]": rules for source, rules in cfg.sources.items()}


def needs_truth(rule: RuleConfig) -> bool:
    """Whether a rule compares a response with a ground truth."""
    grader = GRADERS.get(rule.name, Grader())
    return grader.needs_answer and not (rule.name == "regex" and rule.pattern is not None)


def any_needs_truth(cfg: RewardConfig) -> bool:
    """Whether some rule of the configuration does; with a table, the built-in sources do."""
    return cfg.sources is not None or any(map(needs_truth, cfg.rules))


def scores_alone(cfg: RewardConfig) -> bool:
    """Whether something scores in the place of the rules."""
    return cfg.function is not None or cfg.remote.url is not None


def function_name(function: FunctionConfig) -> str:
    """What a function among several is called."""
    return function.name or function.path.rpartition(":")[2].rpartition(".")[2]


def functions_problems(cfg: RewardConfig) -> Iterator[str]:
    """What is wrong with the functions, but for their files."""
    names = [function_name(function) for function in cfg.functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"reward.functions[{index}] is the second that is called {name!r}; give it another name"


def service_problems(cfg: RewardConfig) -> Iterator[str]:
    """What is wrong with the servers that a configuration names, as far as no file and no server is needed to tell."""
    remote, judge = cfg.remote, cfg.judge
    for key, url in {"reward.remote.url": remote.url, "reward.judge.url": judge.url}.items():
        if url is not None and (problem := _url_problem(url)):
            yield f"{key}={without_login(url)!r} {problem}"
    if cfg.function is not None and remote.url is not None:
        yield f"reward.function={cfg.function!r} and reward.remote.url are both set, and both would give the score; remove one"
    if cfg.pool != "ray" and cfg.ray.address is not None:
        yield f"reward.ray.address={cfg.ray.address!r} is of reward.pool=ray, found {cfg.pool!r}; set reward.pool=ray"
    if judge.url is not None and judge.model is None:
        yield "reward.judge.model is null; name the model that reward.judge.url is to judge with"
    if judge.rubric is not None and judge.rubric_file is not None:
        yield f"reward.judge.rubric and reward.judge.rubric_file={judge.rubric_file!r} are both set; remove one"


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"is no address ({error}); write it as http://host:port/path"
    if parts.scheme not in ("http", "https") or not host:
        return "is no address of a server; write it as http://host:port/path"
    if parts.username or parts.password:
        return "has a login in it; remove it, and name an environment variable with the token in token_env"
    if parts.query or parts.fragment or any(letter.isspace() or not letter.isprintable() for letter in url):
        return "has a query, a fragment or a space in it; remove it"
    return None


def without_login(url: str) -> str:
    """An address for a message, without what stands before an @ or behind a question mark."""
    scheme, separator, rest = re.split(r"[?#]", url)[0].rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def rule_problems(cfg: RewardConfig) -> Iterator[str]:
    """What is wrong with the rules, but for what only a grader can tell, such as a broken regular expression.

    Also of those that a function or a server replaces, but these may be empty.
    """
    for key, rules in rule_tables(cfg).items():
        if (
            not rules
            and not scores_alone(cfg)
            and (cfg.sources is not None or (cfg.model.path is None and cfg.judge.url is None and not cfg.functions))
        ):
            others = (
                ""
                if cfg.sources is not None
                else ", and reward.function, remote.url, judge.url and model.path are null"
            )
            yield f"{key} is empty{others}; name one of the rules: {', '.join(GRADERS)}"
        for index, rule in enumerate(rules):
            yield from (f"{key}[{index}].{problem}" for problem in _problems_of(rule))
            if any(rule.name == earlier.name for earlier in rules[:index]):
                yield f"{key}[{index}].name={rule.name!r} is there for the second time; add up the weights in one rule"


def _problems_of(rule: RuleConfig) -> Iterator[str]:
    if rule.name not in GRADERS:
        close = get_close_matches(rule.name, GRADERS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        yield f"name={rule.name!r} is not a choice; {hint}choose one of: {', '.join(GRADERS)}"
        return
    for key, _, description in walk(RuleConfig):
        value = getattr(rule, key)
        if isinstance(description.allowed, Range) and value is not None and not description.allowed.holds(value):
            yield f"{key}={value} is out of range; it must be {description.allowed}"
    default = RuleConfig(rule.name)
    for owner, grader in GRADERS.items():
        for key in grader.options:
            if rule.name != owner and getattr(rule, key) != getattr(default, key):
                yield f"{key}={getattr(rule, key)!r} is an option of the rule {owner!r}, not of {rule.name!r}; remove it"
    if rule.max_chars is not None and rule.max_chars < rule.min_chars:
        yield f"max_chars={rule.max_chars} is below min_chars={rule.min_chars}; no response is that long"
    if rule.total_s < rule.test_s:
        yield f"total_s={rule.total_s:g} is below test_s={rule.test_s:g}, which no test can use then; raise it"
    if not rule.scripts:
        yield "scripts=[] names no script; give some, such as [Latin] or [Han]"
