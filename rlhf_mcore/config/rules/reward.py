"""Rules for the keys of ``reward``: rules, functions and servers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from rlhf_mcore.config.choices import GRADERS
from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.questions import function_name, grades, reads_scores, rule_tables, scores_alone
from rlhf_mcore.config.schema import Config, RewardConfig, RuleConfig
from rlhf_mcore.readers.user_functions import function_problems


def reward_problems(cfg: Config) -> Iterator[str]:
    """List problems with functions, rules and servers that score responses."""
    reward, names = cfg.reward, [function_name(function) for function in cfg.reward.functions]
    if reward.function is not None:
        yield from map(FileProblem, function_problems(reward.function, "reward.function"))
    for index, function in enumerate(reward.functions):
        yield from map(FileProblem, function_problems(function.path, f"reward.functions[{index}].path"))
        if names[index] in names[:index]:
            yield f"reward.functions[{index}] has the name {names[index]!r} of an earlier function; set another name"
    if (reads_scores(cfg) and grades(cfg)) or reward.rules or reward.sources is not None:
        yield from rule_problems(reward)
    yield from service_problems(reward)
    for key, variables in {"reward.env": reward.env, "environment.env": cfg.environment.env}.items():
        for name in variables:
            if name not in os.environ:
                yield FileProblem(f"{key} names {name}, which is not set; export it, or remove it from the list")
    if not grades(cfg):
        default = RewardConfig()
        for key in ("function", "functions", "sources", "rules", "remote", "judge"):
            value, unset = getattr(reward, key), getattr(default, key)
            if value != unset and value and (key not in ("remote", "judge") or value.url):
                shown = f"reward.{key}{'.url' * (key in ('remote', 'judge'))}"
                because = "is set, but has no effect with environment.score=environment"
                yield f"{shown} {because}; remove it, or set environment.score=reward (its score alone) or sum (both)"


def service_problems(cfg: RewardConfig) -> Iterator[str]:
    """List problems with the keys of servers. No server is contacted."""
    remote, judge = cfg.remote, cfg.judge
    for key, url in {"reward.remote.url": remote.url, "reward.judge.url": judge.url}.items():
        if url is None:
            continue
        problem = url_problem(url, "name an environment variable with the token in token_env")
        if problem is None and ("?" in url or "#" in url):
            problem = "contains a query or a fragment; remove it"
        if problem is not None:
            yield f"{key}={without_login(url)!r} {problem}"
    if cfg.function is not None and remote.url is not None:
        yield f"reward.function={cfg.function!r} and reward.remote.url are both set, but each replaces the rules; remove one"
    if judge.url is not None and judge.model is None:
        yield "reward.judge.model is null; set it to the model of reward.judge.url"


def url_problem(url: str, instead: str) -> str | None:
    """Return why a text is not a URL that can be called, or None. ``instead`` says where a login belongs."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or "<" in url:
        return "is not a URL; write it as https://host:port/path, or as ${oc.env:NAME}"
    if "@" in parts.netloc:
        return f"contains a login; remove it, and {instead}"
    if any(not "!" <= letter <= "~" for letter in url):
        return "contains a space or a character outside ASCII; escape it, as in %20"
    return None


def without_login(url: str) -> str:
    """Return a URL without login, query and fragment, for messages."""
    scheme, separator, rest = re.split(r"[?#]", url)[0].rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def rule_problems(cfg: RewardConfig) -> Iterator[str]:
    """List problems with the rules. Graders report others later, such as an invalid regular expression.

    Rules that a function or a server replaces are checked too, but may be empty.
    """
    adds_scores = cfg.sources is None and (cfg.model.path or cfg.judge.url or cfg.functions)
    for key, rules in rule_tables(cfg).items():
        if not rules and not scores_alone(cfg) and not adds_scores:
            others = (
                ""
                if cfg.sources is not None
                else ", and reward.function, remote.url, judge.url and model.path are null"
            )
            yield f"{key} is empty{others}; name one of the rules: {', '.join(GRADERS)}"
        for index, rule in enumerate(rules):
            yield from (f"{key}[{index}].{problem}" for problem in _problems_of(rule))
            if any(rule.name == earlier.name for earlier in rules[:index]):
                yield f"{key}[{index}].name={rule.name!r} occurs twice; use one rule with the sum of the weights"


def _problems_of(rule: RuleConfig) -> Iterator[str]:
    default = RuleConfig(name=rule.name)
    for owner, grader in GRADERS.items():
        for key in grader.options:
            if rule.name != owner and getattr(rule, key) != getattr(default, key):
                yield f"{key}={getattr(rule, key)!r} is an option of the rule {owner!r}, not of {rule.name!r}; remove it"
    if rule.max_chars is not None and rule.max_chars < rule.min_chars:
        yield f"max_chars={rule.max_chars} is below min_chars={rule.min_chars}; raise it, or lower that"
    if rule.total_s < rule.test_s:
        yield f"total_s={rule.total_s:g} is below test_s={rule.test_s:g}, so no test can use its time; raise it"
    if not rule.scripts:
        yield "scripts=[] names no script; give at least one, such as [Latin] or [Han]"


def ray_problems(cfg: Config) -> Iterator[str]:
    """Check that workers and engines use one Ray cluster, because a process can join only one."""
    pool, engines = cfg.reward.pool, cfg.rollout.ray.address
    if pool not in ("local", engines) and cfg.rollout.placement == "disaggregated":
        yield (
            f"reward.pool={pool} and rollout.ray.address={engines}: with rollout.placement=disaggregated reward workers and "
            "engines must use the same Ray cluster; set both to its address"
        )
