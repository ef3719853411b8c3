"""The group ``algorithm``: what is optimised."""

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
    """Set how the weight of the KL changes over a run; it starts at ``kl.coef``."""

    target: Optional[float] = key(
        None,
        "adaptive controller: the wanted KL, as `kl/mean` shows it",
        ABOVE_0,
        unit="nats per response token",
        null="`coef` does not follow the KL",
    )
    gain: float = key(0.1, "with `target`: `coef` changes by at most a fifth of this share in a step", ABOVE_0)
    final: Optional[float] = key(
        None, "linear controller: `coef` after `steps` steps", AT_LEAST_0, null="`coef` does not follow a line"
    )
    steps: Optional[int] = key(None, "with `final`: steps until `final`", AT_LEAST_1, null="`trainer.num_steps`")

    @property
    def name(self) -> str:
        """The kind of controller: fixed, adaptive or linear."""
        return "adaptive" if self.target is not None else "linear" if self.final is not None else "fixed"


class KLConfig(Group):
    """KL divergence to the reference policy."""

    coef: float = key(
        0.0, "weight of the KL to the reference; 0: off", AT_LEAST_0, more="With 0 no reference model is built."
    )
    estimator: str = key(
        "k3", "estimator of the KL of a token", one_of(*KL_ESTIMATORS), more="`k1` in the reward only."
    )
    placement: str = key("loss", "", one_of("loss", reward="charged per token before advantages are computed"))
    clip: Optional[float] = key(
        10.0,
        "`k2`, `k3`: largest KL of a token",
        ABOVE_0,
        null="no limit",
        unit="nats",
        more="In the loss and in the reward; beyond it the gradient is 0.",
    )
    controller: KLControllerConfig = group(KLControllerConfig, "how `coef` changes over the run")


class RolloutCorrectionConfig(Group):
    """The correction where the trainer's probabilities of tokens differ from the engine's.

    Weights and masks apply to the policy term of the loss only.
    """

    mode: Optional[str] = key(
        None,
        "weigh the policy term of the loss by the ratio of the trainer's to the engine's probability",
        one_of(
            "off",
            token="of each token",
            sequence="of each response",
            geometric="only leave out responses, by the geometric mean of their tokens' ratios",
        ),
        null="`token` with `trainer.max_staleness` or `rollout.quantization`, else `off`",
        more="See [asynchronous runs](algorithms/off-policy.md#asynchronous-runs).",
    )
    cap: float = key(2.0, "largest weight", ABOVE_0)
    mask_low: Optional[float] = key(
        None, "the policy term leaves out tokens (or responses) of a smaller ratio", AT_LEAST_0, null="none"
    )
    mask_high: Optional[float] = key(None, "and those of a larger ratio", ABOVE_0, null="none")
    veto: Optional[float] = key(
        None,
        "it leaves out responses with a token of a smaller ratio",
        Range(0, 1, open_low=True, open_high=True),
        null="none",
        more="1e-4 is usual.",
    )
    max_binary_kl: Optional[float] = key(
        None,
        "`token`: it leaves out tokens for which the divergence of the two probabilities is larger, in either direction",
        ABOVE_0,
        null="none",
        unit="nats",
        more="KPop sets it to 0.1.",
    )
    max_token_staleness: Optional[int] = key(
        None,
        "the policy term leaves out tokens that an older policy sampled",
        AT_LEAST_0,
        null="none",
        unit="versions before the weights that learn from them",
        more="With every `mode`. Tokens older than `trainer.max_staleness` are not there.",
    )
    max_response_staleness: Optional[int] = key(
        None, "and responses with an older token", AT_LEAST_0, null="none", unit="versions"
    )


class SapoConfig(Group):
    """Set how fast a token's gradient fades out with the distance of its ratio from 1."""

    tau_positive: float = key(1.0, "where the advantage is positive", ABOVE_0)
    tau_negative: float = key(1.05, "where it is negative", ABOVE_0)


class CovarianceConfig(Group):
    """Set which tokens `kl_cov` and `clip_cov` hold back for their covariance of logprob and advantage."""

    share: float = key(
        2e-4,
        "share of a minibatch's tokens, at least one of them",
        Range(0, 1, open_low=True),
        more="2e-3 for small models.",
    )
    kl_coef: float = key(1.0, "`kl_cov`: weight of their distance from the old policy", AT_LEAST_0)
    low: float = key(1.0, "`clip_cov`: they have a larger covariance than this", AT_LEAST_0)
    high: float = key(5.0, "`clip_cov`: and a smaller one than this", ABOVE_0)


class DpoConfig(Group):
    """Set how a policy learns from pairs of responses."""

    loss: str = key(
        "dpo",
        "",
        one_of(*PREFERENCE_LOSSES),
        more="`simpo` and `orpo` need no reference, and none is built. See [preferences](algorithms/preferences.md).",
        is_fixed=True,
        only_with="algorithm.kind=dpo",
    )
    beta: float = key(
        0.1,
        "scale of the rewards; the smaller, the farther the policy may go from the reference",
        ABOVE_0,
        more="`ipo`: tau of its paper; `orpo`: its lambda, the weight of the odds ratio.",
        only_with="algorithm.kind=dpo",
    )
    label_smoothing: float = key(
        0.0,
        "share of the pairs that are labelled the wrong way round, as it is guessed (cDPO)",
        Range(0, 0.5, open_high=True),
        only_with="algorithm.dpo.loss=dpo",
    )
    gamma: float = key(
        1.0,
        "by how much the chosen response's reward is to be higher",
        AT_LEAST_0,
        only_with="algorithm.dpo.loss=simpo",
    )
    nll_coef: float = key(
        0.0,
        "weight of the negative log-likelihood of chosen responses, mean over the tokens of each; 0: off",
        AT_LEAST_0,
        more="It keeps chosen responses probable, which a loss over differences does not. `orpo` has it in any case.",
        only_with="algorithm.dpo.loss=dpo or ipo or simpo or kto",
    )
    desirable_weight: float = key(1.0, "weight of chosen responses", ABOVE_0, only_with="algorithm.dpo.loss=kto")
    undesirable_weight: float = key(1.0, "weight of rejected responses", ABOVE_0, only_with="algorithm.dpo.loss=kto")


class OverlongConfig(Group):
    """A soft punishment for responses that come close to the token limit."""

    enabled: bool = key(False, "take a penalty off the score of responses that come close to the token limit")
    max_tokens: Optional[int] = key(
        None, "a response of this length gets the whole penalty", AT_LEAST_1, null="`rollout.sampling.max_new_tokens`"
    )
    cache_tokens: Optional[int] = key(
        None, "the penalty grows over the last so many tokens", AT_LEAST_1, null="a fifth of `max_tokens`"
    )
    penalty: float = key(1.0, "the whole penalty", AT_LEAST_0)


class DynamicSamplingConfig(Group):
    """Replace prompts whose responses all got the same score, from which a group-relative advantage learns nothing."""

    enabled: bool = key(False, "replace prompts whose responses all got the same score by others")
    max_batches: int = key(10, "batches of prompts that a step may generate", AT_LEAST_1)


class AlgorithmConfig(Group):
    """Set what is optimised. A preset only fills in keys that are not set."""

    preset: str = key(
        "grpo",
        "",
        one_of(*PRESETS),
        more="See [choose an algorithm](algorithms/choose.md).",
    )
    kind: str = key(
        "rl",
        "",
        Choices({kind.name: kind.purpose for kind in RUN_KINDS.values()}),
        more="The last three look at no key of `rollout`, `bridge`, `reward`, `critic` and `teacher`, and `dpo` alone at those of "
        "`reference`.",
        is_fixed=True,
    )
    advantage: str = key("grpo", "estimator of advantages", function_or(ADVANTAGES), is_fixed=True)
    policy_loss: str = key("ppo_clip", "loss of the policy", function_or(POLICY_LOSSES), is_fixed=True)
    use_critic: str = key(
        "auto",
        "",
        one_of(auto="with `gae`", true="", false=""),
        more="An estimator of yours that reads values needs `true`.",
        is_fixed=True,
    )
    reward_weights: Optional[dict[str, float]] = key(
        None,
        "`gdpo`: the weight of each part of a score, by its name",
        null="those of `reward.rules` and `reward.sources`",
        more="A rule is a part, as `reward/<name>_mean` among the metrics. One that a score lacks counts as 0.",
    )
    normalize_std: bool = key(True, "`grpo`, `gdpo`: divide by the group's standard deviation")
    gamma: float = key(1.0, "`gae`, `reinforce`: discount of later rewards, per token", FROM_0_TO_1)
    lam: float = key(0.95, "`gae`: 0 trusts the critic, 1 the rewards", FROM_0_TO_1)
    critic_lam: Optional[float] = key(
        None, "`gae`: that of the critic's targets", FROM_0_TO_1, null="`lam`", more="VAPO sets it to 1."
    )
    lam_alpha: Optional[float] = key(
        None,
        "`gae`: the policy's lam is 1 - 1 / (`lam_alpha` · tokens of the response)",
        ABOVE_0,
        null="`lam`",
        more="VAPO sets it to 0.05.",
    )
    turn_gamma: float = key(
        1.0,
        "discount of later rewards, per turn of the policy",
        FROM_0_TO_1,
        more="It acts where an environment answers, with `gae` and `reinforce` beside `gamma`. See [turns](algorithms/multi-turn.md).",
    )
    turn_credit: bool = key(
        False,
        "a turn of the policy is one action: advantages are those of turns",
        more="`grpo`, `rloo`: a turn is compared with the same turn of the group's responses; `gae`, `reinforce`: the recursion goes "
        "over turns instead of tokens. See [turns](algorithms/multi-turn.md).",
    )
    whiten_advantages: bool = key(False, "`gae`, `reinforce`: mean 0 and deviation 1 over the tokens of a step")
    bootstrap_truncated: bool = key(
        False,
        "`gae`: a response that the token limit cut off ends with the critic's value, not with 0",
        more="With false the value is 0, as after a response that the policy ended. See [losses](algorithms/losses.md#advantages).",
    )
    mask_truncated: bool = key(
        False,
        "learn nothing from responses that a limit ended",
        more="Their scores still count in their groups. DAPO's overlong filtering. See [losses](algorithms/losses.md#advantages).",
    )
    clip_low: float = key(
        0.2,
        "the importance ratio is clipped at 1 - `clip_low`",
        FROM_0_TO_1,
        more="`gmpo` bounds the log of the ratio by -`clip_low` and `clip_high`, `dppo_tv` and `dppo_kl` the divergence.",
    )
    clip_high: float = key(0.2, "and at 1 + `clip_high`", AT_LEAST_0)
    dual_clip: Optional[float] = key(
        None,
        "`ppo_clip`: bound of the ratio where the advantage is negative, 3 is usual",
        Range(1, open_low=True),
        null="none",
    )
    sapo: SapoConfig = group(SapoConfig, "`sapo`: temperatures of the loss")
    covariance: CovarianceConfig = group(CovarianceConfig, "`kl_cov`, `clip_cov`: the tokens that are held back")
    old_logprobs: str = key(
        "auto",
        "logprobs of the policy before the updates of a step",
        one_of(
            auto="of the update's own forward pass where a step is one update, else of a pass before the updates",
            always="of a pass before the updates",
        ),
        more="In one update they are the same numbers, and `actor/old_logprobs_of_update` is 1. With the KL in the reward they are "
        "needed before.",
    )
    kl: KLConfig = group(KLConfig, "divergence from the reference")
    entropy_coef: float = key(0.0, "weight of an entropy bonus", AT_LEAST_0)
    centering: float = key(
        0.0, "`reward_model`: weight of the square of the sum of a pair's scores in the loss; 0: off", AT_LEAST_0
    )
    dpo: DpoConfig = group(DpoConfig, "a policy that learns from pairs of responses")
    loss_aggregation: str = key(
        "sequence",
        "",
        one_of(token="every token counts the same", sequence="mean of each response's mean", constant=""),
    )
    constant_length: Optional[int] = key(
        None,
        "with `constant`: the length that responses are divided by",
        AT_LEAST_1,
        null="`rollout.sampling.max_new_tokens`",
    )
    rollout_correction: RolloutCorrectionConfig = group(
        RolloutCorrectionConfig, "of the policy term, where the engine's probabilities are not the trainer's"
    )
    overlong: OverlongConfig = group(OverlongConfig, "a soft punishment for responses close to the token limit")
    dynamic_sampling: DynamicSamplingConfig = group(
        DynamicSamplingConfig, "replace prompts whose responses all got the same score"
    )

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # It has filled in its keys already
            if name == "preset" and vars(self).get(name, value) != value in PRESETS:
                raise ConfigError(
                    f"algorithm.preset={value!r} would change nothing but the name of {vars(self)[name]!r}; give a preset when the "
                    "configuration is made, as in rm.Config(algorithm=...), or set the keys of algorithm that it stands for"
                )
            super().__setattr__(name, value)
