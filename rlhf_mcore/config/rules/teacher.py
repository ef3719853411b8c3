"""Rules among the keys of ``teacher``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.keys import DESCRIPTIONS, value_of, walk
from rlhf_mcore.config.questions import has_teacher, other_models, reads_scores
from rlhf_mcore.config.schema import Config, TeacherConfig
from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.readers.model_files import tokenizer_problems
from rlhf_mcore.readers.tokenizer_match import tokenizer_difference
from rlhf_mcore.readers.user_functions import function_problems


def teacher_problems(cfg: Config) -> Iterator[str]:
    """Check that a required teacher is set, and check its tokenizer and its other keys."""
    teacher, advantage = cfg.teacher, f"algorithm.advantage={cfg.algorithm.advantage}"
    if not has_teacher(cfg):
        if not reads_scores(cfg):
            yield f"teacher.path=null, but {advantage} learns only from a teacher; set it to a model directory"
        yield from _unused_keys(cfg, (), "teacher.path=null")
        return
    if not reads_scores(cfg) and cfg.algorithm.dynamic_sampling.enabled:
        yield (
            "algorithm.dynamic_sampling.enabled=True keeps prompts whose responses differ in score, but "
            f"{advantage} reads no scores; set it to false"
        )
    if (spec := teacher.context) is not None:
        yield from map(FileProblem, function_problems(spec, "teacher.context"))
    if spec is not None and (function := cfg.environment.function) is not None:
        unsupported = f"teacher.context={spec} is not supported with environment.function={function}"
        yield f"{unsupported}: the teacher would need its own answers of the environment too; set teacher.context=null"
    if teacher.weights != "path":
        yield from _own_problems(cfg)
        return
    for model in other_models(cfg):
        if model.role == "teacher":
            yield from map(FileProblem, _tokenizer_problems(cfg, model.key, model.path))


def _own_problems(cfg: Config) -> Iterator[str]:
    """Check ``teacher.weights=actor`` and ``average``: the policy is its own teacher."""
    weights = f"teacher.weights={cfg.teacher.weights}"
    if cfg.teacher.weights == "actor" and cfg.teacher.context is None:
        yield f"{weights} without teacher.context: teacher and student would be equal; set teacher.context, or teacher.weights=average"
    if cfg.teacher.weights == "average" and (rank := cfg.actor.lora.rank) is not None:
        yield (
            f"{weights} is not supported with actor.lora.rank={rank}: the average needs whole weights; set "
            "teacher.weights=actor, or name a teacher in teacher.path"
        )
    own = ("path", "sources", "layout", "ranks", "megatron")
    yield from _unused_keys(cfg, own if cfg.teacher.weights == "average" else (*own, "dtype", "offload"), weights)


def _tokenizer_problems(cfg: Config, field: str, path: str) -> Iterator[str]:
    problems = list(tokenizer_problems(path, field))
    yield from problems
    own = cfg.model.tokenizer_path or cfg.model.path
    if not problems and (difference := tokenizer_difference(path, own)):
        yield (
            f"{field}={path} has another tokenizer than the policy ({own}): {difference}. Choose a teacher with the same "
            "tokenizer, or set model.tokenizer_path to the tokenizer that both were trained with"
        )


def _unused_keys(cfg: Config, groups: Sequence[str], because: str) -> Iterator[str]:
    """List keys of ``teacher``, or of some of its ``groups``, that are set but have no effect."""
    default = Config()
    for name, _, _ in walk(TeacherConfig):
        key = f"teacher.{name}"
        if (value := value_of(cfg, key)) == value_of(default, key) or isinstance(value, Group):
            continue
        if (not groups or name.partition(".")[0] in groups) and not DESCRIPTIONS[key].only_with:  # see ``validate``
            yield f"{key}={value} has no effect with {because}; remove it, or name a teacher"
