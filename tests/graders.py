"""The graders of all rules, with the default options of each rule."""

from __future__ import annotations

from rlhf_mcore.config import choices
from rlhf_mcore.config.schema import RuleConfig
from rlhf_mcore.rewards.code import CodeGrader
from rlhf_mcore.rewards.graders import Grader, build_grader


def _default_grader(name: str) -> Grader:
    return CodeGrader() if name == "code" else build_grader(RuleConfig(name=name))  # the sandbox is not needed yet


GRADERS = {name: _default_grader(name) for name in choices.GRADERS}
