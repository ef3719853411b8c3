"""Derive from a configuration what is asked where it is needed: its roles, the longest row, what scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import ADVANTAGES, MTP_TRAINED, PREFERENCE_LOSSES, Estimator, PreferenceLoss
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.reward_sources import any_needs_truth, scores_alone
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.families.quantised import FP8_OF_TRAINING
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config, LayoutConfig, LoraConfig


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """A model that the run builds, as its group of the configuration cuts it."""

    name: str  # the group
    layout: LayoutConfig
    ranks: list[int] | None

    @property
    def model_size(self) -> int:
        """Ranks that one replica of the model needs; the role's number of ranks is a multiple of it."""
        cut = self.layout
        experts = (cut.tp if cut.etp is None else cut.etp) * cut.ep * cut.pp
        return math.lcm(cut.tp * cut.pp * cut.cp, experts)


def longest_example(cfg: Config) -> int:
    """Compute the most tokens of prompt and response that a supervised run takes."""
    if cfg.data.max_tokens is not None:
        return cfg.data.max_tokens
    room = cfg.trainer.max_tokens_per_microbatch // run_kind(cfg).rows_per_example
    multiple = padded_to(cfg.actor.layout, in_fp8(cfg.actor))
    return room // multiple * multiple


# Shorter beginnings of sequences are not shared: a further segment costs more than it saves.
SHORTEST_PREFIX = 32
FP8_TOKENS = 32  # Transformer Engine takes tokens of products in 8 bits by 16, with MXFP8 by 32


def in_fp8(group: Any) -> bool:
    """Tell whether the model of a group of the configuration multiplies in 8 bits."""
    return bool(getattr(group, "fp8", None) or (group.megatron or {}).get("fp8"))


def padded_to(layout: LayoutConfig, in_fp8: bool) -> int:
    """Return the number that the tokens of a microbatch are a multiple of."""
    return token_multiple(layout.tp, layout.cp, layout.sequence_parallel) * (FP8_TOKENS if in_fp8 else 1)


def token_multiple(tp: int, cp: int, sequence_parallel: bool) -> int:
    """Context-parallel ranks have two chunks of every sequence, and under sequence parallelism tensor-parallel ranks share those."""
    return cp * math.lcm(2 if cp > 1 else 1, tp if sequence_parallel else 1)


def role_layouts(cfg: Config) -> list[RoleLayout]:
    """List every role of the run that has a layout of its own."""
    roles = [RoleLayout("actor", cfg.actor.layout, cfg.actor.ranks)]
    if not run_kind(cfg).generates:
        return roles
    if needs_critic(cfg):
        roles.append(RoleLayout("critic", cfg.critic.layout, cfg.critic.ranks))
    if cfg.reward.model.path is not None:
        roles.append(RoleLayout("reward.model", cfg.reward.model.layout, cfg.reward.model.ranks))
    if cfg.teacher.path is not None:  # else it is the actor, or has its layout
        roles.append(RoleLayout("teacher", cfg.teacher.layout, cfg.teacher.ranks))
    return roles


def needs_critic(cfg: Config) -> bool:
    """Tell whether advantages are computed from values."""
    if not run_kind(cfg).generates:
        return False
    if cfg.algorithm.use_critic == "auto":
        return ADVANTAGES.get(cfg.algorithm.advantage, Estimator()).needs_values
    return cfg.algorithm.use_critic == "true"


def draws_greedy(cfg: Config) -> bool:
    """Tell whether each prompt has a greedy response beside those that are learned from."""
    return run_kind(cfg).generates and ADVANTAGES.get(cfg.algorithm.advantage, Estimator()).needs_greedy


def needs_reference(cfg: Config) -> bool:
    """Tell whether the policy is compared with a frozen one. Under adapters that is the actor without them."""
    kind = run_kind(cfg)
    if kind.compares:
        return PREFERENCE_LOSSES.get(cfg.algorithm.dpo.loss, PreferenceLoss()).needs_reference
    return kind.generates and bool(cfg.algorithm.kl.coef)


def has_teacher(cfg: Config) -> bool:
    """Tell whether the policy learns from a teacher, which may be itself."""
    return run_kind(cfg).generates and (cfg.teacher.path is not None or cfg.teacher.weights != "path")


def reads_scores(cfg: Config) -> bool:
    """Tell whether advantages are computed from scores. Else scores are metrics alone, and need not be there."""
    return ADVANTAGES.get(cfg.algorithm.advantage, Estimator()).reads_scores


def needs_answer(cfg: Config) -> bool:
    """Tell whether some grader compares a response with a ground truth from the data."""
    return grades(cfg) and not scores_alone(cfg.reward) and any_needs_truth(cfg.reward)


def grades(cfg: Config) -> bool:
    """Tell whether ``reward`` scores responses; else an environment alone does."""
    return cfg.environment.function is None or cfg.environment.score != "environment"


def max_new_tokens(cfg: Config) -> int:
    """Return the longest response that training or evaluation asks for."""
    return max(longest_response(cfg), cfg.evaluate.max_new_tokens or 0)


def longest_response(cfg: Config) -> int:
    """Compute the most tokens of a row of a step after its prompt."""
    episode = cfg.environment.max_tokens if cfg.environment.function is not None else None
    return episode or cfg.rollout.sampling.max_new_tokens


def offloaded_parts(choice: str) -> tuple[str, ...]:
    """List the parts of a trained model that leave the device, of a resolved ``offload`` (auto: none)."""
    return {"state": ("gradients", "optimizer"), "always": ("gradients", "optimizer", "weights")}.get(choice, ())


def adapter_sizes(cfg: LoraConfig) -> AdapterSizes | None:
    """Return the adapters that a group of the configuration asks for, or None where whole weights are trained."""
    if cfg.rank is None:
        return None
    alpha = 2.0 * cfg.rank if cfg.alpha is None else cfg.alpha
    # Beside what learns is what it began with, see ``contrib/pissa``: the scale stays as it is
    if cfg.init == "pissa":
        factor = 2**0.5 if cfg.use_rslora else 2
        return AdapterSizes(2 * cfg.rank, alpha * factor, tuple(cfg.targets), cfg.use_rslora, fixed=cfg.rank)
    return AdapterSizes(cfg.rank, alpha, tuple(cfg.targets), cfg.use_rslora, use_dora=cfg.use_dora)


def sent_geometry(cfg: Config, geometry: ModelGeometry) -> ModelGeometry:
    """Return the geometry of what engines are sent of a model: MTP layers where they are trained, and engines draft with them."""
    drafts = engine_kind(cfg.rollout.engine).reads("rollout.speculative") and cfg.rollout.speculative.method == "mtp"
    return geometry if drafts and cfg.actor.mtp.mode in MTP_TRAINED else geometry.trunk


def sent_quantisation(cfg: Config) -> str | None:
    """Name how weights are quantised for engines: where the policy is trained with those of 8 bits, as it computes them."""
    if cfg.rollout.quantization != "fp8" or cfg.actor.fp8 is None:
        return cfg.rollout.quantization
    return FP8_OF_TRAINING


def sends_adapters(cfg: Config, geometry: ModelGeometry) -> bool:
    """Tell whether engines get A and B and add them themselves. Otherwise they get weights, merged where there are adapters."""
    sizes = adapter_sizes(cfg.actor.lora)
    if sizes is None or cfg.actor.lora.sync == "merge":
        return False
    return not any(engine_kind(cfg.rollout.engine).adapter_problems(cfg, replace(geometry, adapter=sizes)))
