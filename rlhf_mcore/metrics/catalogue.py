"""Describes every metric of a run: its meaning, unit and healthy range, for docs/reference/metrics.md and ``rlhf-mcore metrics``.

Names are the same in metrics.jsonl, in trackers, on the console and in the report. ``<...>`` in a name is a variable part.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from rlhf_mcore.metrics.rules import MEASURES, RULES, MetricRule, read_table


@dataclass(frozen=True, slots=True)
class Metric:
    """``healthy`` and ``remedy`` are texts for metrics without a rule."""

    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""
    remedy: str = ""

    @property
    def rule(self) -> MetricRule | None:
        """Return the rule that judges the metric, in the report and by default as an alarm."""
        return next((rule for rule in RULES if rule.metric == self.name), None)

    @property
    def range(self) -> str:
        """Return the healthy range in words; "" if every value is healthy."""
        rule = self.rule
        if rule is None:
            return self.healthy
        side, share = ("above", "below") if rule.bad < rule.watch else ("below", "from"), rule.counts
        of = f"{MEASURES[rule.measure].text}{', as a share of the responses,' if share else ''}"
        alarm = f"; alarm after {rule.alarm_steps} steps in a row" if rule.alarm_steps else ""
        return f"{of} {side[0]} {rule.shown(rule.watch)}; bad {side[1]} {rule.shown(rule.bad)}{alarm}"

    @property
    def advice(self) -> str:
        """Return the remedy for an unhealthy value."""
        return self.rule.remedy if self.rule is not None else self.remedy


# A group, then its metrics: name, meaning, unit, healthy range, remedy.
_TABLE = """
[Rewards]
reward/mean | mean score of the step's responses, before shaping and KL | - | rises, then levels off
reward/std | standard deviation of the scores | - | above 0 | see reward/share_same
reward/max | highest score of the step
reward/min | lowest score of the step
reward/baseline_mean | mean score of the greedy responses (remax); other metrics exclude them
reward/share_zero | responses that score exactly 0 | share, 0 to 1
reward/share_max | responses with the highest score of the step, if scores differ | share, 0 to 1
reward/share_same | prompts whose responses all have the same score; such a group gives no signal | share, 0 to 1
reward/errors | responses whose reward raised an error | responses
reward/timeouts | responses whose reward timed out | responses
reward/parse_failures | responses in which the rules found no answer | responses
reward/dropped_prompts | prompts dropped from the step because a response has no score (reward.on_error: drop) | prompts | 0 |
    see reward/errors and reward/timeouts
reward/<part>_mean | mean of a named part of the score: a rule, the reward model, a value from a function
reward/overlong_mean | mean penalty for responses close to the limit (algorithm.overlong) | - | close to 0 | responses are too
    long: see rollout/response_length_mean
reward/mean/<source> | mean score of a data source, if a step has several
reward/share_zero/<source> | reward/share_zero for a data source | share, 0 to 1
reward/share_max/<source> | reward/share_max for a data source | share, 0 to 1
reward/share_same/<source> | reward/share_same for a data source | share, 0 to 1
reward/parse_failures/<source> | reward/parse_failures for a data source | responses
[Responses]
rollout/response_length_mean | mean length of responses | tokens
rollout/response_length_max | longest response | tokens
rollout/truncated_fraction | responses truncated at the token limit | share, 0 to 1
rollout/num_tokens | tokens sampled by the policy for the step | tokens
rollout/branches_mean | mean sequences per agent episode, if an episode has branched | sequences | close to 1 | the harness
    rewrites its history: see environment.branches
rollout/branches_max | maximum of sequences per agent episode, if an episode has branched | sequences
rollout/turns_mean | mean turns of the policy per episode | turns
rollout/tool_calls/<tool> | calls of a tool with results, in the step's episodes | calls
rollout/num_batches | prompt batches that dynamic sampling used for the step | batches | 1 to 3
rollout/informative_fraction | prompts of dynamic sampling whose responses differ in score | share, 0 to 1 | above 0.3 | use
    prompts that are neither too easy nor too hard
[Engines and trainer]
rollout/logprob_diff_mean | mean of |trainer logprob - engine logprob| over sampled tokens | nats per token
rollout/logprob_diff_max | largest of these differences | nats per token | below 1 | see rollout/logprob_diff_mean
rollout/logprob_exact | sampled tokens with bitwise equal logprobs in trainer and engine | share, 0 to 1
rollout/ratio_mean | mean of exp(trainer - engine), over tokens or responses | - | 0.98 to 1.02
rollout/ratio_max | largest of these ratios
rollout/ratio_min | smallest of these ratios
rollout/clipped_fraction | ratios above algorithm.rollout_correction.cap | share, 0 to 1 | below 0.01
rollout/masked_fraction | ratios outside the band; their tokens are masked | share, 0 to 1 | below 0.05
rollout/effective_sample_size | (sum w)^2 / (n sum w^2) of the correction's factors w; 1 if all are equal | share, 0 to 1 |
    above 0.9 | engine and trainer differ too much: see rollout/logprob_diff_mean and rollout/staleness_mean
rollout/support_size | mean number of candidate tokens after top_p and top_k | tokens
rollout/support_mass | mean probability of these candidates under the trainer's policy | share, 0 to 1
rollout/draft_acceptance/<depth> | accepted share of the drafts <depth> tokens ahead (rollout.speculative) | share, 0 to 1 |
    constant | untrained MTP layers fall behind the policy: set actor.mtp.mode=train; else lower rollout.speculative.num_tokens
rollout/draft_pass_tokens | mean tokens per pass for responses with drafts | tokens
rollout/staleness_mean | mean age of tokens at the update | policy versions
rollout/staleness_max | maximum age of a token at the update | policy versions
rollout/stale_fraction | tokens dropped because of their age | share, 0 to 1 | below 0.1 | lower trainer.max_staleness
rollout/preemptions | responses whose cache was evicted since the last step; the engine computes their tokens again | responses
    | 0 | raise rollout.gpu_memory_utilization, or lower rollout.max_num_seqs
rollout/in_flight | requests in flight in the engines when training of a step starts | requests
rollout/redrawn | groups restarted since the start of the run, because they would have been too old | prompts | few | raise
    trainer.max_staleness, or add engine devices
rollout/other_version | responses continued with newer weights after the loss of their engine, since the last step | responses |
    0 | set rollout.deterministic_order=true, which continues them with their original weights
bridge/received_bytes | weights received by the first rank for its engine | bytes
bridge/local_bytes | weights copied locally by the first rank | bytes
bridge/sent_bytes | weights sent by the first rank to disaggregated engines | bytes
bridge/sent_share | share of its weight bytes that is sent with bridge.full_every; unchanged elements are not sent | share, 0 to
    1
[KL and loss]
kl/mean | KL of the policy before the step to the reference (algorithm.kl.estimator) | nats per token
kl/coef | weight of the KL from the controller
teacher/divergence | mean divergence of the policy from the teacher's distributions, per token (`teacher.divergence`, without
    `coef`) | nats per token | falls towards 0
teacher/kl | KL of the policy before the step to the teacher, at sampled tokens (k1) | nats per token | falls towards 0
loss/total | loss of the actor's updates, aggregated as in algorithm.loss_aggregation
loss/policy | policy-gradient term of the loss
loss/kl | KL to the reference in the update's forward pass | nats per token
loss/value | loss of the critic | - | falls | see critic/explained_variance
loss/sft | negative log-likelihood of given responses | nats per token | falls
loss/reward_model | loss over pairs of a better and a worse response | - | below 0.69 (random guessing)
loss/dpo | loss of a policy over such pairs (algorithm.dpo.loss) | - | falls
[Actor]
actor/entropy | mean entropy of the next token (every logging.entropy_every steps) | nats per token
actor/approx_kl | k3 estimate of the KL between the policy before the step and in its updates | nats per token
actor/importance_ratio | mean of exp(logprobs - old_logprobs) | - | 0.99 to 1.01 | see actor/approx_kl
actor/clip_fraction_high | tokens whose gradient the upper bound removes | share, 0 to 1
actor/clip_fraction_low | tokens whose gradient the lower bound removes | share, 0 to 1 | below 0.2
actor/clip_fraction_dual | tokens clipped by algorithm.dual_clip | share, 0 to 1 | below 0.01
actor/perplexity | exp of the mean negative log-likelihood per token (sft) | - | falls
actor/old_logprobs_of_update | 1 if old logprobs come from the update's own forward pass
actor/grad_norm | norm of the gradient before clipping, mean over the step's updates
actor/skipped_updates | updates skipped because the loss or the gradient is not finite | share, 0 to 1
[Critic]
critic/explained_variance | 1 - Var(returns - values) / Var(returns) before the step; 1: perfect, 0: no better than the mean | -
    | rises above 0.3 | raise critic.optimizer.lr, or let the critic learn first (critic.warmup_steps)
critic/values | mean value of the critic in its update
critic/returns | mean return, the critic's target
critic/clip_fraction | values outside the clip range around the old values | share, 0 to 1 | below 0.3
[Reward model]
reward_model/accuracy | pairs whose better response scores higher | share, 0 to 1 | above 0.6, rising
reward_model/margin | mean difference of the scores of a pair | - | above 0, rising
reward_model/score_mean | mean score of all responses | - | close to 0 | set algorithm.centering
[Preferences]
preference/accuracy | pairs whose chosen response has the higher reward | share, 0 to 1 | above 0.6, rising
preference/margin | mean difference of the rewards of a pair | - | above 0, rising
preference/chosen_reward | mean implicit reward of chosen responses (docs/algorithms/preferences.md) | - | not falling for long |
    lower the learning rate, or raise algorithm.dpo.beta
preference/rejected_reward | mean implicit reward of rejected responses | - | falls
preference/divergence | KTO's estimate of the divergence of the policy from the reference | nats per token of a response
[Every trained model]
<role>/grad_norm | norm of the gradient before clipping: actor, critic or reward_model
<role>/lr | learning rate of the step
<role>/skipped_updates | updates skipped because the loss or the gradient is not finite | share, 0 to 1
<role>/bad_updates_in_a_row | consecutive updates without a finite loss and gradient; 5 of them end the run | updates | 0 |
    lower the learning rate; check the data and the rewards of the last steps
<role>/not_finite | 1 if a weight is not finite after the updates, which ends the run
actor/mtp_loss | mean negative log-likelihood of the MTP layers' predictions (actor.mtp) | nats per token | falls
actor/mtp_grad_norm | norm of the MTP layers' gradient before clipping, if they are clipped separately
actor/indexer_loss | KL divergence from the attention's distribution to the indexer's (actor.indexer) | nats per token | falls
actor/indexer_grad_norm | norm of the indexers' gradient before clipping, if they are clipped separately
actor/route_mismatch | share of (token, layer) pairs in updates for which the router would choose other experts than the
    replayed ones (`actor.router_replay`) | share, 0 to 1 | below 0.05
actor/unshared_rows | rows whose shared prefix was computed again, because an engine had routed it differently
trainer/computed_share | tokens computed in updates, divided by the tokens of all rows; shared prefixes are computed once
    (`trainer.share_prefixes`) | share, 0 to 1
<role>/load_balance | auxiliary loss of an MoE router; 1 if all experts get equally many tokens | - | 1 to 1.5
[Evaluation]
evaluate/accuracy | held-out prompts answered correctly, or held-out pairs ranked correctly | share, 0 to 1 | rises
evaluate/accuracy/<source> | accuracy of a data source | share, 0 to 1 | rises
evaluate/reward | mean score on held-out prompts | - | rises with reward/mean | use more prompts
evaluate/pass_at_<k> | probability that at least one of k responses is correct | share, 0 to 1 | rises
evaluate/majority_at_<k> | accuracy of the majority answer of k responses | share, 0 to 1 | rises
evaluate/response_length_mean | mean length of responses to held-out prompts | tokens
evaluate/truncated_fraction | truncated responses to held-out prompts | share, 0 to 1 | below 0.2
evaluate/without_score | held-out responses whose reward failed | responses | 0 | see reward/errors
evaluate/loss | loss on held-out examples | - | falls | if it rises again, stop training
evaluate/perplexity | exp of the held-out loss (sft) | - | falls
evaluate/margin | mean difference of the scores, or rewards, of held-out pairs | - | above 0, rising
evaluate/chosen_reward | mean implicit reward of chosen responses in held-out pairs
evaluate/rejected_reward | mean implicit reward of rejected responses in held-out pairs
final/<evaluation> | the same for the best model, loaded at the end (checkpoint.load_best_model_at_end)
final/step | step of the best model | steps
[Progress]
progress/prompts | prompts of all steps so far | prompts
progress/samples | responses of all steps so far | responses
progress/tokens | response tokens of all steps so far | tokens
[Time and throughput]
timing/step_s | the whole step | s | steady | rlhf-mcore report shows which phase takes longer
timing/<phase>_s | a phase: generate, score, exchange, values, update, sync, save (of the previous step) | s
timing/tokens_per_s | response tokens of all ranks per second, without evaluation and save | tokens/s
timing/prefix_hit | prompt tokens found in the engine's cache | share, 0 to 1
timing/episode | mean time of an episode with several turns; the next three metrics are its parts | s
timing/episode_engine | time in which an engine generates a turn, or the turn waits in the engine | s
timing/episode_tools | time in which no turn is generated and a tool or the environment runs | s
timing/episode_waiting | remaining time: the agent itself, process starts, waiting for an engine step | s
timing/tool/<tool> | mean time of a tool call; `step` is an environment without tools | s
timing/concurrent_episodes | mean number of concurrent episodes, over all engines | episodes
timing/concurrent_calls | mean number of concurrent tool calls, over all engines | calls
timing/unix_time | Unix time at the end of the step | s
throughput/tflops | operations of the models in the step, over all devices | TFLOP/s
throughput/mfu | share of the devices' peak (logging.peak_tflops) | share, 0 to 1 | 0.2 to 0.5 | see docs/scale/tuning.md
throughput/<phase>_tokens_per_s | tokens of a phase | tokens/s
throughput/<phase>_tflops | operations of a phase | TFLOP/s
throughput/<phase>_mfu | share of the peak in a phase | share, 0 to 1
throughput/engine_steps | decode steps of all disaggregated engines since the previous step | steps
throughput/engine_tokens | tokens sampled in these steps, including cancelled requests | tokens
throughput/engine_lent | turns generated by another engine than the episode's own | turns
throughput/engine_busy_s | total time of these steps, over all engines | s
[Memory]
memory/<phase>_bytes | peak memory of offloadable parts on the first rank's device in a phase | bytes
memory/<phase>_allocated_bytes | peak memory allocated by torch on the first rank's GPU in a phase, without a sleeping engine | bytes
memory/<phase>_outside_bytes | memory used outside torch on the first rank's GPU at the end of a phase | bytes | 1e9 to 9e9 |
    `plan --run` reserves it, and compares the peaks with the plan
"""
GROUPS: dict[str, list[Metric]] = {}
for _cells in read_table(_TABLE):
    if _cells[0].startswith("["):
        _group = GROUPS.setdefault(_cells[0].strip("[]"), [])
    else:
        _group.append(Metric(*_cells))
METRICS: dict[str, Metric] = {metric.name: metric for metrics in GROUPS.values() for metric in metrics}
_ANY = {"<source>": ".+", "<k>": r"\d+", "<role>": "(actor|critic|reward_model)"}


@cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    """List the names with variable parts as patterns, the longest names first."""
    return [
        (
            re.compile("".join(_ANY.get(part, ".+" if part.startswith("<") else re.escape(part)) for part in parts)),
            metric,
        )
        for metric in sorted(METRICS.values(), key=lambda metric: -len(metric.name))
        if len(parts := re.split(r"(<\w+>)", metric.name)) > 1
    ]


def find_metric(name: str) -> Metric | None:
    """Return the entry for a metric name that a run writes, or None."""
    return METRICS.get(name) or next((entry for pattern, entry in _patterns() if pattern.fullmatch(name)), None)


def matching(text: str) -> Iterator[Metric]:
    """Yield the metric with this name, or all metrics whose names contain the text."""
    exact = find_metric(text)
    yield from [exact] if exact is not None else [metric for name, metric in METRICS.items() if text in name]


def nearest_metric(name: str) -> str | None:
    """Return the most likely intended name for a misspelt metric, or None."""
    by_last = {metric.rpartition("/")[2]: metric for metric in METRICS}
    close = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.7)
    last = difflib.get_close_matches(name.rpartition("/")[2], by_last, n=1, cutoff=0.75)
    return close[0] if close else by_last[last[0]] if last else None
