"""The group ``algorithm``: the training objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

from annotated_types import Ge, Gt, Lt

from rlhf_mcore.config.choices import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, PRESETS, RUN_KINDS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema.group import (
    Choices,
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    group,
    key,
)
from rlhf_mcore.readers.user_functions import is_file_spec

FILE_SPEC = "path/to/file.py:name"


def _estimators(flag: str) -> str:
    """Return the condition that the estimator has a flag of ``choices.Estimator``."""
    return f"algorithm.advantage={' or '.join(name for name, kind in ADVANTAGES.items() if getattr(kind, flag))}"


Advantage = Annotated[str, Choices(tuple(ADVANTAGES), is_file_spec, FILE_SPEC)]
PolicyLoss = Annotated[str, Choices(POLICY_LOSSES, is_file_spec, FILE_SPEC)]
_VALUES, _PARTS = _estimators("needs_values"), _estimators("compares_parts")
_TURNS, _WHITENS = _estimators("credits_turns"), _estimators("whitens")
_KL, _AHEAD = "algorithm.kl.coef", "trainer.max_staleness"
_CLIP, _SAPO, _COVARIANCE = (f"algorithm.policy_loss={names}" for names in ("ppo_clip", "sapo", "kl_cov or clip_cov"))


class KLControllerConfig(Group):
    """Set how the KL weight changes during a run. It starts at ``kl.coef``."""

    target: Optional[PositiveFloat] = key(None, "adaptive controller: target for `kl/mean` in nats", only_with=_KL)
    gain: PositiveFloat = key(0.1, "with `target`: gain; a step changes `coef` by at most a fifth of this share")
    final: Optional[NonNegativeFloat] = key(None, "linear controller: `coef` after `steps` steps", only_with=_KL)
    steps: Optional[PositiveInt] = key(None, "with `final`: steps until `coef` reaches it; null: `trainer.num_steps`")

    @property
    def name(self) -> str:
        """The kind of the controller: fixed, adaptive or linear."""
        return "adaptive" if self.target is not None else "linear" if self.final is not None else "fixed"


class KLConfig(Group):
    """KL divergence to the reference policy."""

    coef: NonNegativeFloat = key(0.0, "weight of the KL to the reference policy; 0: no reference model is built")
    estimator: Annotated[str, Choices(KL_ESTIMATORS)] = key("k3", "estimator of the KL per token")
    """`k1` is allowed only in the reward."""
    placement: Literal["loss", "reward"] = key("loss", "part of the objective that contains the KL")
    """`reward`: the KL is subtracted from the reward per token, before advantages are computed."""
    clip: Optional[PositiveFloat] = key(10.0, "`k2`, `k3`: maximum KL of a token, in nats; null: no limit")
    """It applies in the loss and in the reward; a token above it has no gradient."""
    controller: KLControllerConfig = group(KLControllerConfig, "schedule of `coef` during the run")


class RolloutCorrectionConfig(Group):
    """Off-policy correction: the trainer's probabilities of tokens differ from the engine's.

    Weights and masks apply only to the policy term of the loss.
    """

    mode: Optional[Literal["off", "token", "sequence", "geometric"]] = key(None, "weights of the policy term")
    """Weights are ratios of the trainer's to the engine's probability. `token`: of each token. `sequence`: of each
    response, the product over its tokens. `geometric`: no weights; masks use the geometric mean of a response's ratios.
    `null`: `token` with `trainer.max_staleness` or `rollout.quantization`, else `off`. See [asynchronous
    runs](algorithms/off-policy.md#asynchronous-runs)."""
    cap: PositiveFloat = key(2.0, "maximum weight")
    mask_low: Optional[NonNegativeFloat] = key(None, "mask tokens or responses with a lower ratio; null: off")
    mask_high: Optional[PositiveFloat] = key(None, "mask tokens or responses with a higher ratio; null: off")
    veto: Optional[Annotated[float, Gt(0), Lt(1)]] = key(None, "mask responses with a token of lower ratio; null: off")
    """A usual value is 1e-4."""
    max_binary_kl: Optional[PositiveFloat] = key(None, "`token`: mask tokens with a larger binary KL in nats")
    """The KL between both probabilities of the token, in either direction. KPop sets it to 0.1."""
    max_token_staleness: Optional[NonNegativeInt] = key(None, "mask tokens above this staleness", only_with=_AHEAD)
    """Unit: policy versions. It applies in every `mode`. No token is staler than `trainer.max_staleness`."""
    max_response_staleness: Optional[NonNegativeInt] = key(None, "the same for whole responses", only_with=_AHEAD)


class SapoConfig(Group):
    """Set how fast a token's gradient decays with the distance of its ratio from 1."""

    tau_positive: PositiveFloat = key(1.0, "temperature for positive advantages", only_with=_SAPO)
    tau_negative: PositiveFloat = key(1.05, "temperature for negative advantages", only_with=_SAPO)


class CovarianceConfig(Group):
    """Select the tokens that `kl_cov` and `clip_cov` restrain, by the covariance of logprob and advantage."""

    share: Share = key(2e-4, "share of a minibatch's tokens, at least one token", only_with=_COVARIANCE)
    """Use 2e-3 for small models."""
    kl_coef: NonNegativeFloat = key(1.0, "`kl_cov`: weight of their absolute log ratio", only_with=_COVARIANCE)
    low: NonNegativeFloat = key(1.0, "`clip_cov`: minimum covariance of the selected tokens", only_with=_COVARIANCE)
    high: PositiveFloat = key(5.0, "`clip_cov`: maximum covariance of the selected tokens", only_with=_COVARIANCE)


_PAIRS = "algorithm.kind=dpo"


class DpoConfig(Group):
    """Set how a policy learns from pairs of responses."""

    loss: Annotated[str, Choices(tuple(PREFERENCE_LOSSES))] = key("dpo", "loss", is_fixed=True, only_with=_PAIRS)
    """`simpo` and `orpo` use no reference model. See [preferences](algorithms/preferences.md)."""
    beta: PositiveFloat = key(0.1, "scale of the rewards; smaller: further from the reference", only_with=_PAIRS)
    """`ipo`: tau in the paper; `orpo`: lambda in the paper, the weight of the odds ratio."""
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = key(
        0.0, "share of pairs with swapped labels (cDPO)", only_with=".loss=dpo"
    )
    gamma: NonNegativeFloat = key(1.0, "target margin between the rewards of a pair", only_with=".loss=simpo")
    nll_coef: NonNegativeFloat = key(
        0.0, "weight of the NLL of chosen responses", only_with=".loss=dpo or ipo or simpo or kto"
    )
    """It is averaged over the tokens of each response, and keeps chosen responses likely. `orpo` always includes it."""
    desirable_weight: PositiveFloat = key(1.0, "weight of chosen responses", only_with=".loss=kto")
    undesirable_weight: PositiveFloat = key(1.0, "weight of rejected responses", only_with=".loss=kto")


class OverlongConfig(Group):
    """A length penalty for responses that come close to the token limit."""

    enabled: bool = key(False, "subtract a penalty from the score of responses that come close to the token limit")
    max_tokens: Optional[PositiveInt] = key(None, "length from which on a response gets the full penalty")
    """`null`: `rollout.sampling.max_new_tokens`."""
    cache_tokens: Optional[PositiveInt] = key(None, "number of tokens before `max_tokens` over which the penalty grows")
    """`null`: a fifth of `max_tokens`."""
    penalty: NonNegativeFloat = key(1.0, "full penalty")


class DynamicSamplingConfig(Group):
    """Replace prompts whose responses all have the same score. A group-relative advantage learns nothing from them."""

    enabled: bool = key(False, "replace prompts whose responses all have the same score")
    max_batches: PositiveInt = key(10, "maximum number of prompt batches that a step generates")


class AlgorithmConfig(Group):
    """Set the training objective. A preset fills in only keys that are not set."""

    preset: Annotated[str, Choices(tuple(PRESETS))] = key("grpo", "values for keys that are not set")
    """See [choose an algorithm](algorithms/choose.md)."""
    kind: Annotated[str, Choices(tuple(RUN_KINDS))] = key("rl", "kind of training", is_fixed=True)
    """`sft`: supervised fine-tuning on given responses. `reward_model`: score chosen above rejected responses. `dpo`:
    train the policy to prefer chosen responses. These three ignore `rollout`, `bridge`, `reward`, `critic` and
    `teacher`, and only `dpo` reads `reference`."""
    advantage: Advantage = key("grpo", "advantage estimator", is_fixed=True)
    policy_loss: PolicyLoss = key("ppo_clip", "policy loss", is_fixed=True)
    use_critic: Literal["auto", "true", "false"] = key("auto", "train a critic; auto: with `gae`", is_fixed=True)
    """Your own estimator needs `true` if it reads values."""
    reward_weights: Optional[dict[str, float]] = key(None, "weight of each part of a score, by name", only_with=_PARTS)
    """Each rule is a part, reported as `reward/<name>_mean`. A part that a score lacks counts as 0. `null`: the weights
    of `reward.rules` and `reward.sources`."""
    normalize_std: bool = key(True, "`grpo`, `gdpo`: divide by the group's standard deviation")
    gamma: Fraction = key(1.0, "`gae`, `reinforce`: discount of later rewards, per token")
    lam: Fraction = key(0.95, "`gae`: weight of later rewards against values, from 0 (only values) to 1 (only rewards)")
    critic_lam: Optional[Fraction] = key(None, "lam for the critic's targets; null: `lam`", only_with=_VALUES)
    """VAPO sets it to 1."""
    lam_alpha: Optional[PositiveFloat] = key(None, "lam is 1 - 1 / (`lam_alpha` · response tokens)", only_with=_VALUES)
    """It sets the policy's lam. `null`: `lam`. VAPO sets it to 0.05."""
    turn_gamma: Fraction = key(1.0, "discount of later rewards, per policy turn")
    """It needs an environment. See [turns](algorithms/multi-turn.md)."""
    turn_credit: bool = key(False, "assign advantages to policy turns: a turn is one action", only_with=_TURNS)
    """See [turns](algorithms/multi-turn.md)."""
    whiten_advantages: bool = key(False, "normalise a step's advantages to mean 0 and std 1", only_with=_WHITENS)
    bootstrap_truncated: bool = key(False, "the critic's value follows truncated responses, not 0", only_with=_VALUES)
    """See [losses](algorithms/losses.md#advantages)."""
    mask_truncated: bool = key(False, "do not train on responses that a limit ended")
    """Their scores still count in their groups. This is DAPO's overlong filtering. See
    [losses](algorithms/losses.md#advantages)."""
    clip_low: Fraction = key(0.2, "lower clip range: the importance ratio is clipped at 1 - `clip_low`")
    """`gmpo` limits the log ratio to -`clip_low` and `clip_high`; `dppo_tv` and `dppo_kl` limit the divergence."""
    clip_high: NonNegativeFloat = key(0.2, "upper clip range: the importance ratio is clipped at 1 + `clip_high`")
    dual_clip: Optional[Annotated[float, Gt(1)]] = key(None, "maximum ratio for negative advantages", only_with=_CLIP)
    """A usual value is 3. `null`: no limit."""
    sapo: SapoConfig = group(SapoConfig, "`sapo`: temperatures of the loss")
    covariance: CovarianceConfig = group(CovarianceConfig, "`kl_cov`, `clip_cov`: tokens that the loss restrains")
    old_logprobs: Literal["auto", "always"] = key("auto", "source of the policy's logprobs before a step's updates")
    """`auto`: the update's own forward pass if a step is one update, else a separate pass. `always`: a separate pass. A KL
    in the reward always needs it."""
    kl: KLConfig = group(KLConfig, "KL to the reference policy")
    entropy_coef: NonNegativeFloat = key(0.0, "weight of the entropy bonus")
    centering: NonNegativeFloat = key(
        0.0, "`reward_model`: weight of a pair's squared sum of scores, which centres them"
    )
    dpo: DpoConfig = group(DpoConfig, "preference training on pairs of responses")
    loss_aggregation: Literal["token", "sequence", "constant"] = key("sequence", "weights of tokens in the loss")
    """`token`: all tokens count equally. `sequence`: mean over responses of each response's token mean. `constant`: sum
    over tokens divided by `constant_length`, mean over responses."""
    constant_length: Optional[PositiveInt] = key(None, "`constant`: divisor of the token sum of a response")
    """`null`: `rollout.sampling.max_new_tokens`."""
    rollout_correction: RolloutCorrectionConfig = group(
        RolloutCorrectionConfig, "off-policy correction for differences between engine and trainer"
    )
    overlong: OverlongConfig = group(OverlongConfig, "length penalty for responses close to the token limit")
    dynamic_sampling: DynamicSamplingConfig = group(DynamicSamplingConfig, "replacement of prompts without a signal")

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # The preset has already filled in its keys, so another name would change no other key
            if name == "preset" and vars(self).get(name, value) != value in PRESETS:
                raise ConfigError(
                    f"algorithm.preset={value!r} would change only the name, because {vars(self)[name]!r} has set its "
                    "keys; give the preset to the constructor, as in rm.Config(algorithm=...), or set single keys of algorithm"
                )
            super().__setattr__(name, value)
