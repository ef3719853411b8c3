"""Rules among the keys of ``teacher``."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.generator_files import tokenizer_problems
from rlhf_mcore.config.implied import reads_scores
from rlhf_mcore.config.keys import DESCRIPTIONS, value_of, walk
from rlhf_mcore.config.model_files import inspect_model
from rlhf_mcore.config.rules.layouts import cut_problems
from rlhf_mcore.config.schema import Config, TeacherConfig
from rlhf_mcore.config.tokenizer_match import tokenizer_difference
from rlhf_mcore.geometry import ModelGeometry


def teacher_problems(cfg: Config, actor: ModelGeometry | None) -> Iterator[str]:
    """Check that there is a teacher where one is needed, its files, its layout, and that it reads the student's tokens.

    ``actor`` is None where sizes cannot be compared.
    """
    teacher = cfg.teacher
    if teacher.path is None:
        if not reads_scores(cfg):
            yield (
                f"teacher.path=null, but algorithm.advantage={cfg.algorithm.advantage} learns from a teacher alone; "
                "give the directory of one, or choose an algorithm that learns from scores"
            )
        yield from _unused_keys(cfg)
        return
    if not reads_scores(cfg) and cfg.algorithm.dynamic_sampling.enabled:
        yield (
            "algorithm.dynamic_sampling.enabled=True keeps prompts whose responses differ in score, but "
            f"algorithm.advantage={cfg.algorithm.advantage} reads no score; set it to false"
        )
    geometry, problems = inspect_model(teacher.path, "teacher.path", ("lm",))
    yield from problems
    yield from map(FileProblem, _tokenizer_problems(cfg, teacher.path))
    if geometry is None or actor is None:
        return
    if geometry.vocab_size < actor.vocab_size:
        yield (
            f"teacher.path={teacher.path}: its vocab_size={geometry.vocab_size} is less than model.path's {actor.vocab_size}, so "
            "it has no probability for every token; choose a model with the same vocabulary"
        )
    yield from cut_problems("teacher", teacher.layout, geometry, "teacher.path")


def _tokenizer_problems(cfg: Config, path: str) -> Iterator[str]:
    problems = list(tokenizer_problems(path, "teacher.path"))
    yield from problems
    own = cfg.model.tokenizer_path or cfg.model.path
    if not problems and (difference := tokenizer_difference(path, own)):
        yield (
            f"teacher.path={path} has another tokenizer than the policy ({own}): {difference}. Its probabilities would be of other "
            "texts; choose a teacher with the same tokenizer, or set model.tokenizer_path to what both of them were trained with"
        )


def _unused_keys(cfg: Config) -> Iterator[str]:
    default = Config()
    for name in (f"teacher.{name}" for name, _, _ in walk(TeacherConfig)):
        value, allowed = value_of(cfg, name), DESCRIPTIONS[name].allowed if name in DESCRIPTIONS else None
        if value != value_of(default, name) and (allowed is None or allowed.holds(value)):  # else that is the problem
            yield f"{name}={value} has no effect with teacher.path=null; remove it, or name a teacher"
