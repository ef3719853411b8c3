"""Derived properties of a configuration: roles, scores, lengths, and the weights that engines receive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import ADVANTAGES, PREFERENCE_LOSSES, ROLLOUT, Estimator, PreferenceLoss
from rlhf_mcore.config.reward_sources import any_needs_truth, has_graders, scores_alone
from rlhf_mcore.config.run_kinds import run_kind
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
