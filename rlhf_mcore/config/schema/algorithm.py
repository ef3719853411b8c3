"""The group ``algorithm``: the training objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from rlhf_mcore.config.choices import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.run_kinds import RUN_KINDS
from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.key import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FROM_0_TO_1,
    Choices,
    Range,
    function_or,
    group,
    key,
    one_of,
)


class KLControllerConfig(Group):
    """Set how the KL weight changes during a run. It starts at ``kl.coef``."""

    target: Optional[float] = key(
        None,
        "adaptive controller: target KL, compared with `kl/mean`",
        ABOVE_0,
        unit="nats per response token",
        null="no adaptive controller",
    )
    gain: float = key(
        0.1, "with `target`: gain of the controller; a step changes `coef` by at most a fifth of this share", ABOVE_0
    )
    final: Optional[float] = key(
        None, "linear controller: value of `coef` after `steps` steps", AT_LEAST_0, null="no linear controller"
    )
    steps: Optional[int] = key(
        None, "with `final`: number of steps until `coef` reaches `final`", AT_LEAST_1, null="`trainer.num_steps`"
    )

    @property
    def name(self) -> str:
        """The kind of the controller: fixed, adaptive or linear."""
        return "adaptive" if self.target is not None else "linear" if self.final is not None else "fixed"


class KLConfig(Group):
    """KL divergence to the reference policy."""

    coef: float = key(
        0.0, "weight of the KL to the reference policy; 0: off", AT_LEAST_0, more="With 0 no reference model is built."
    )
    estimator: str = key(
        "k3", "estimator of the KL per token", one_of(*KL_ESTIMATORS), more="`k1` is allowed only in the reward."
    )
    placement: str = key(
        "loss",
        "part of the objective that contains the KL",
        one_of("loss", reward="subtracted from the reward per token, before advantages are computed"),
    )
    clip: Optional[float] = key(
        10.0,
        "`k2`, `k3`: maximum KL of a token",
        ABOVE_0,
        null="no limit",
        unit="nats",
        more="It applies in the loss and in the reward; a token above it has no gradient.",
    )
    controller: KLControllerConfig = group(KLControllerConfig, "schedule of `coef` during the run")


class RolloutCorrectionConfig(Group):
    """Off-policy correction: the trainer's probabilities of tokens differ from the engine's.

    Weights and masks apply only to the policy term of the loss.
    """

    mode: Optional[str] = key(
        None,
        "weights of the policy term from the ratio of the trainer's to the engine's probability",
        one_of(
            "off",
            token="ratio of each token",
            sequence="ratio of each response, the product over its tokens",
            geometric="no weights; masks use the geometric mean of a response's ratios",
        ),
        null="`token` with `trainer.max_staleness` or `rollout.quantization`, else `off`",
        more="See [asynchronous runs](algorithms/off-policy.md#asynchronous-runs).",
    )
    cap: float = key(2.0, "maximum weight", ABOVE_0)
    mask_low: Optional[float] = key(
        None, "mask tokens or responses with a lower ratio in the policy term", AT_LEAST_0, null="off"
    )
    mask_high: Optional[float] = key(
        None, "mask tokens or responses with a higher ratio in the policy term", ABOVE_0, null="off"
    )
    veto: Optional[float] = key(
        None,
        "mask responses with a token of a lower ratio in the policy term",
        Range(0, 1, open_low=True, open_high=True),
        null="off",
        more="A usual value is 1e-4.",
    )
    max_binary_kl: Optional[float] = key(
        None,
        "`token`: mask tokens in the policy term whose binary KL between both probabilities, in either direction, is "
        "above this value",
        ABOVE_0,
        null="off",
        unit="nats",
        more="KPop sets it to 0.1.",
    )
    max_token_staleness: Optional[int] = key(
        None,
        "mask tokens in the policy term above this staleness",
        AT_LEAST_0,
        null="off",
        unit="policy versions",
        more="It applies in every `mode`. No token is staler than `trainer.max_staleness`.",
    )
    max_response_staleness: Optional[int] = key(
        None,
        "mask responses in the policy term with a token above this staleness",
        AT_LEAST_0,
        null="off",
        unit="policy versions",
    )


class SapoConfig(Group):
    """Set how fast a token's gradient decays with the distance of its ratio from 1."""

    tau_positive: float = key(1.0, "temperature for positive advantages", ABOVE_0)
    tau_negative: float = key(1.05, "temperature for negative advantages", ABOVE_0)


class CovarianceConfig(Group):
    """Select the tokens that `kl_cov` and `clip_cov` restrain, by the covariance of logprob and advantage."""

    share: float = key(
        2e-4,
        "share of a minibatch's tokens that is restrained, at least one token",
        Range(0, 1, open_low=True),
        more="Use 2e-3 for small models.",
    )
    kl_coef: float = key(1.0, "`kl_cov`: weight of the absolute log ratio of these tokens", AT_LEAST_0)
    low: float = key(1.0, "`clip_cov`: minimum covariance of the selected tokens", AT_LEAST_0)
    high: float = key(5.0, "`clip_cov`: maximum covariance of the selected tokens", ABOVE_0)


class DpoConfig(Group):
    """Set how a policy learns from pairs of responses."""

    loss: str = key(
        "dpo",
        "preference loss",
        one_of(*PREFERENCE_LOSSES),
        more="`simpo` and `orpo` use no reference model. See [preferences](algorithms/preferences.md).",
        is_fixed=True,
        only_with="algorithm.kind=dpo",
    )
    beta: float = key(
        0.1,
        "scale of the rewards; smaller values let the policy move further from the reference",
        ABOVE_0,
        more="`ipo`: tau in the paper; `orpo`: lambda in the paper, the weight of the odds ratio.",
        only_with="algorithm.kind=dpo",
    )
    label_smoothing: float = key(
        0.0,
        "expected share of pairs with swapped labels (cDPO)",
        Range(0, 0.5, open_high=True),
        only_with="algorithm.dpo.loss=dpo",
    )
    gamma: float = key(
        1.0,
        "target margin between the rewards of chosen and rejected response",
        AT_LEAST_0,
        only_with="algorithm.dpo.loss=simpo",
    )
    nll_coef: float = key(
        0.0,
        "weight of the negative log-likelihood of chosen responses, averaged over the tokens of each; 0: off",
        AT_LEAST_0,
        more="It keeps chosen responses likely, which a loss over differences does not. `orpo` always includes it.",
        only_with="algorithm.dpo.loss=dpo or ipo or simpo or kto",
    )
    desirable_weight: float = key(1.0, "weight of chosen responses", ABOVE_0, only_with="algorithm.dpo.loss=kto")
    undesirable_weight: float = key(1.0, "weight of rejected responses", ABOVE_0, only_with="algorithm.dpo.loss=kto")


class OverlongConfig(Group):
    """A length penalty for responses that come close to the token limit."""

    enabled: bool = key(False, "subtract a penalty from the score of responses that come close to the token limit")
    max_tokens: Optional[int] = key(
        None,
        "length from which on a response gets the full penalty",
        AT_LEAST_1,
        null="`rollout.sampling.max_new_tokens`",
    )
    cache_tokens: Optional[int] = key(
        None,
        "number of tokens before `max_tokens` over which the penalty grows",
        AT_LEAST_1,
        null="a fifth of `max_tokens`",
    )
    penalty: float = key(1.0, "full penalty", AT_LEAST_0)


class DynamicSamplingConfig(Group):
    """Replace prompts whose responses all have the same score. A group-relative advantage learns nothing from them."""

    enabled: bool = key(False, "replace prompts whose responses all have the same score")
    max_batches: int = key(10, "maximum number of prompt batches that a step generates", AT_LEAST_1)


class AlgorithmConfig(Group):
    """Set the training objective. A preset fills in only keys that are not set."""

    preset: str = key(
        "grpo",
        "name of an algorithm, which fills in keys that are not set",
        one_of(*PRESETS),
        more="See [choose an algorithm](algorithms/choose.md).",
    )
    kind: str = key(
        "rl",
        "kind of training",
        Choices({kind.name: kind.purpose for kind in RUN_KINDS.values()}),
        more="`sft`, `reward_model` and `dpo` ignore `rollout`, `bridge`, `reward`, `critic` and `teacher`. Of these, only "
        "`dpo` reads `reference`.",
        is_fixed=True,
    )
    advantage: str = key("grpo", "advantage estimator", function_or(ADVANTAGES), is_fixed=True)
    policy_loss: str = key("ppo_clip", "policy loss", function_or(POLICY_LOSSES), is_fixed=True)
    use_critic: str = key(
        "auto",
        "train a critic",
        one_of(auto="with `gae`", true="", false=""),
        more="Your own estimator needs `true` if it reads values.",
        is_fixed=True,
    )
    reward_weights: Optional[dict[str, float]] = key(
        None,
        "`gdpo`: weight of each part of a score, by name",
        null="the weights of `reward.rules` and `reward.sources`",
        more="Each rule is a part, reported as `reward/<name>_mean`. A part that a score lacks counts as 0.",
    )
    normalize_std: bool = key(True, "`grpo`, `gdpo`: divide by the group's standard deviation")
    gamma: float = key(1.0, "`gae`, `reinforce`: discount of later rewards, per token", FROM_0_TO_1)
    lam: float = key(
        0.95,
        "`gae`: weight of later rewards against the critic's values, from 0 (only values) to 1 (only rewards)",
        FROM_0_TO_1,
    )
    critic_lam: Optional[float] = key(
        None, "`gae`: lam for the critic's targets", FROM_0_TO_1, null="`lam`", more="VAPO sets it to 1."
    )
    lam_alpha: Optional[float] = key(
        None,
        "`gae`: sets the policy's lam to 1 - 1 / (`lam_alpha` · tokens of the response)",
        ABOVE_0,
        null="`lam`",
        more="VAPO sets it to 0.05.",
    )
    turn_gamma: float = key(
        1.0,
        "discount of later rewards, per policy turn",
        FROM_0_TO_1,
        more="It needs an environment; `gae` and `reinforce` apply it in addition to `gamma`. See "
        "[turns](algorithms/multi-turn.md).",
    )
    turn_credit: bool = key(
        False,
        "assign advantages to policy turns: a turn is one action",
        more="`grpo`, `rloo`: a turn is compared with the same turn of the group's other responses; `gae`, `reinforce`: the "
        "recursion goes over turns instead of tokens. See [turns](algorithms/multi-turn.md).",
    )
    whiten_advantages: bool = key(
        False, "`gae`, `reinforce`: normalise advantages to mean 0 and standard deviation 1 over the tokens of a step"
    )
    bootstrap_truncated: bool = key(
        False,
        "`gae`: the value after a response that the token limit cut is the critic's value, not 0",
        more="With false the value is 0, as after any other response. See [losses](algorithms/losses.md#advantages).",
    )
    mask_truncated: bool = key(
        False,
        "do not train on responses that a limit ended",
        more="Their scores still count in their groups. This is DAPO's overlong filtering. See "
        "[losses](algorithms/losses.md#advantages).",
    )
    clip_low: float = key(
        0.2,
        "lower clip range: the importance ratio is clipped at 1 - `clip_low`",
        FROM_0_TO_1,
        more="`gmpo` limits the log ratio to -`clip_low` and `clip_high`; `dppo_tv` and `dppo_kl` limit the divergence.",
    )
    clip_high: float = key(0.2, "upper clip range: the importance ratio is clipped at 1 + `clip_high`", AT_LEAST_0)
    dual_clip: Optional[float] = key(
        None,
        "`ppo_clip`: maximum ratio for negative advantages; a usual value is 3",
        Range(1, open_low=True),
        null="no limit",
    )
    sapo: SapoConfig = group(SapoConfig, "`sapo`: temperatures of the loss")
    covariance: CovarianceConfig = group(CovarianceConfig, "`kl_cov`, `clip_cov`: tokens that the loss restrains")
    old_logprobs: str = key(
        "auto",
        "source of the policy's logprobs before the updates of a step",
        one_of(
            auto="the update's own forward pass if a step is one update, else a separate pass",
            always="a separate pass before the updates",
        ),
        more="If a step is one update, both are equal, and `actor/old_logprobs_of_update` is 1. A KL in the reward always "
        "needs the separate pass.",
    )
    kl: KLConfig = group(KLConfig, "KL to the reference policy")
    entropy_coef: float = key(0.0, "weight of the entropy bonus", AT_LEAST_0)
    centering: float = key(
        0.0,
        "`reward_model`: weight of a loss term that centres scores, the squared sum of a pair's scores; 0: off",
        AT_LEAST_0,
    )
    dpo: DpoConfig = group(DpoConfig, "preference training on pairs of responses")
    loss_aggregation: str = key(
        "sequence",
        "weights of tokens in the loss",
        one_of(
            token="all tokens count equally",
            sequence="mean over responses of each response's token mean",
            constant="sum over tokens divided by `constant_length`, mean over responses",
        ),
    )
    constant_length: Optional[int] = key(
        None,
        "`constant`: divisor of the token sum of a response",
        AT_LEAST_1,
        null="`rollout.sampling.max_new_tokens`",
    )
    rollout_correction: RolloutCorrectionConfig = group(
        RolloutCorrectionConfig, "off-policy correction for differences between engine and trainer"
    )
    overlong: OverlongConfig = group(OverlongConfig, "length penalty for responses close to the token limit")
    dynamic_sampling: DynamicSamplingConfig = group(
        DynamicSamplingConfig, "replace prompts whose responses all have the same score"
    )

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # The preset has already filled in its keys, so another name would change no other key
            if name == "preset" and vars(self).get(name, value) != value in PRESETS:
                raise ConfigError(
                    f"algorithm.preset={value!r} would change only the name, because {vars(self)[name]!r} has set its "
                    "keys; give the preset to the constructor, as in rm.Config(algorithm=...), or set single keys of algorithm"
                )
            super().__setattr__(name, value)
