"""Describe every metric of a run: its meaning, its unit, and its healthy range. docs/metrics.md and ``rlhf-mcore metrics`` show it.

Names are the same in metrics.jsonl, in trackers, on the console and in the report. ``<...>`` in a name stands for a part that differs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from rlhf_mcore.metrics.rules import MEASURES, RULES, MetricRule


@dataclass(frozen=True, slots=True)
class Metric:
    """``healthy`` and ``remedy`` are for people, where no rule judges the metric."""

    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""
    remedy: str = ""

    @property
    def rule(self) -> MetricRule | None:
        """Return what judges it, in the report and by default as an alarm."""
        return next((rule for rule in RULES if rule.metric == self.name), None)

    @property
    def range(self) -> str:
        """Return what is healthy, in words; "" where every value may be."""
        rule = self.rule
        if rule is None:
            return self.healthy
        side, share = ("above", "below") if rule.bad < rule.watch else ("below", "from"), rule.counts
        of = f"{MEASURES[rule.measure].text}{', as a share of the responses,' if share else ''}"
        alarm = f"; an alarm after {rule.alarm_steps} in a row" if rule.alarm_steps else ""
        return f"{of} {side[0]} {rule.shown(rule.watch)}; in trouble {side[1]} {rule.shown(rule.bad)}{alarm}"

    @property
    def what_to_do(self) -> str:
        """Return where it is not healthy."""
        return self.rule.remedy if self.rule is not None else self.remedy


S, TOKENS, SHARE, BYTES, NATS = "s", "tokens", "share, 0 to 1", "bytes", "nats per token"
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("reward/mean", "mean score of the step's responses, before shaping and KL", healthy="rises, then levels off"),
        Metric("reward/std", "standard deviation of the scores", healthy="above 0", remedy="see reward/share_same"),
        Metric("reward/max", "highest score of the step"),
        Metric("reward/min", "lowest score of the step"),
        Metric("reward/baseline_mean", "mean score of the greedy responses (remax), which no other metric counts"),
        Metric("reward/share_zero", "responses that score exactly 0", SHARE),
        Metric("reward/share_max", "responses with the highest score of the step, where scores differ", SHARE),
        Metric("reward/share_same", "prompts whose responses all score the same, so that a group teaches nothing", SHARE),
        Metric("reward/errors", "responses whose reward raised an error", "responses"),
        Metric("reward/timeouts", "responses whose reward was not there in time", "responses"),
        Metric("reward/parse_failures", "responses in which the rules found no answer", "responses"),
        Metric(
            "reward/dropped_prompts",
            "prompts that left the step because a response got no score (reward.on_error: drop)",
            "prompts",
            "0",
            "look at reward/errors and reward/timeouts",
        ),
        Metric("reward/<part>_mean", "mean of a named part of the score: a rule, the reward model, what a function returns"),
        Metric(
            "reward/overlong_mean",
            "mean penalty for responses close to the limit (algorithm.overlong)",
            healthy="close to 0",
            remedy="responses are too long: see rollout/response_length_mean",
        ),
        Metric("reward/mean/<source>", "mean score of a data source, where a step has several"),
        Metric("reward/share_zero/<source>", "reward/share_zero of a data source", SHARE),
        Metric("reward/share_max/<source>", "reward/share_max of a data source", SHARE),
        Metric("reward/share_same/<source>", "reward/share_same of a data source", SHARE),
        Metric("reward/parse_failures/<source>", "reward/parse_failures of a data source", "responses"),
    ),
    "Responses": (
        Metric("rollout/response_length_mean", "mean length of responses", TOKENS),
        Metric("rollout/response_length_max", "longest response", TOKENS),
        Metric("rollout/truncated_fraction", "responses that were cut off at the limit", SHARE),
        Metric("rollout/num_tokens", "tokens that the policy has sampled for the step", TOKENS),
        Metric(
            "rollout/branches_mean",
            "sequences of an episode of an agent, where one has branched",
            "sequences",
            "close to 1",
            "the harness rewrites its history: see environment.branches",
        ),
        Metric("rollout/branches_max", "most sequences of an episode of an agent, where one has branched", "sequences"),
        Metric("rollout/turns_mean", "turns of the policy in an episode", "turns"),
        Metric("rollout/tool_calls/<tool>", "calls of a tool in the step's episodes that have their results", "calls"),
        Metric("rollout/num_batches", "batches of prompts that dynamic sampling has drawn for the step", "batches", "1 to 3"),
        Metric(
            "rollout/informative_fraction",
            "prompts that dynamic sampling has drawn and whose responses differ in score",
            SHARE,
            "above 0.3",
            "use prompts that are neither too easy nor too hard",
        ),
    ),
    "Engines and trainer": (
        Metric("rollout/logprob_diff_mean", "mean of |logprob of the trainer - logprob of the engine| of sampled tokens", NATS),
        Metric("rollout/logprob_diff_max", "largest of these differences", NATS, "below 1", "see rollout/logprob_diff_mean"),
        Metric("rollout/logprob_exact", "sampled tokens whose logprobs are the same in trainer and engine, to the last bit", SHARE),
        Metric("rollout/ratio_mean", "mean of exp(trainer - engine), of tokens or responses", "", "0.98 to 1.02"),
        Metric("rollout/ratio_max", "largest of these ratios"),
        Metric("rollout/ratio_min", "smallest of these ratios"),
        Metric("rollout/clipped_fraction", "ratios above algorithm.rollout_correction.cap", SHARE, "below 0.01"),
        Metric("rollout/masked_fraction", "ratios outside of the band, whose tokens are left out", SHARE, "below 0.05"),
        Metric(
            "rollout/effective_sample_size",
            "(sum w)^2 / (n sum w^2) of the correction's factors w: 1 where all are equal",
            SHARE,
            "above 0.9",
            "engine and trainer are too far apart: see rollout/logprob_diff_mean and rollout/staleness_mean",
        ),
        Metric("rollout/support_size", "mean number of tokens that top_p and top_k had left to draw a token from", TOKENS),
        Metric("rollout/support_mass", "mean probability that the trainer's policy has on these tokens", SHARE),
        Metric(
            "rollout/draft_acceptance/<depth>",
            "drafts that were taken, of those so many tokens ahead (rollout.speculative)",
            SHARE,
            "stays where it was",
            "MTP layers that do not learn fall behind the policy: actor.mtp.mode=train; else draft fewer tokens, or none",
        ),
        Metric("rollout/draft_pass_tokens", "mean tokens that a pass adds to a response that it had drafts for", TOKENS),
        Metric("rollout/staleness_mean", "mean age of tokens, between sampling and learning", "policy versions"),
        Metric("rollout/staleness_max", "age of the oldest token", "policy versions"),
        Metric("rollout/stale_fraction", "tokens that are left out for their age", SHARE, "below 0.1", "lower trainer.max_staleness"),
        Metric(
            "rollout/preemptions",
            "responses that lost their cache to others since the last step; the engine computes their tokens again",
            "responses",
            "0",
            "raise rollout.gpu_memory_utilization, or lower rollout.max_num_seqs",
        ),
        Metric("rollout/in_flight", "requests that engines are answering when a step begins to learn", "requests"),
        Metric(
            "rollout/redrawn",
            "groups that have begun again since the run's beginning, because they would have been too old",
            "prompts",
            "few",
            "raise trainer.max_staleness, or give engines more devices",
        ),
        Metric(
            "rollout/other_version",
            "responses that newer weights have drawn than they were begun with, because their engine was lost, since the last step",
            "responses",
            "0",
            "rollout.deterministic_order=true, which has them drawn by the weights that they were begun with",
        ),
        Metric("bridge/received_bytes", "weights that the first rank has received for its engine", BYTES),
        Metric("bridge/local_bytes", "weights that the first rank has copied without a message", BYTES),
        Metric("bridge/sent_bytes", "weights that the first rank has sent to engines of their own", BYTES),
        Metric(
            "bridge/sent_share",
            "of the bytes of its weights, with bridge.full_every: what travels without elements that have not changed",
            SHARE,
        ),
    ),
    "KL and loss": (
        Metric("kl/mean", "KL of the policy before the step to the reference (algorithm.kl.estimator)", NATS),
        Metric("kl/coef", "weight of the KL, as the controller has set it"),
        Metric(
            "teacher/divergence",
            "divergence of the policy from the teacher's distributions, mean over tokens of `teacher.divergence` without `coef`",
            NATS,
            "falls towards 0",
        ),
        Metric("teacher/kl", "KL of the policy before the step to the teacher, at drawn tokens (k1)", NATS, "falls towards 0"),
        Metric("loss/total", "what the actor's updates minimise, by token or response (algorithm.loss_aggregation)"),
        Metric("loss/policy", "its policy-gradient term"),
        Metric("loss/kl", "KL to the reference in the update's forward pass", NATS),
        Metric("loss/value", "loss of the critic", "", "falls", "see critic/explained_variance"),
        Metric("loss/sft", "negative log-likelihood of given responses", NATS, "falls"),
        Metric("loss/reward_model", "loss over pairs of a better and a worse response", "", "below 0.69, which is chance"),
        Metric("loss/dpo", "loss of a policy over such pairs (algorithm.dpo.loss)", "", "falls"),
    ),
    "Actor": (
        Metric("actor/entropy", "mean entropy of the next token (every logging.entropy_every steps)", NATS),
        Metric("actor/approx_kl", "k3 estimate of the KL between the policy before the step and in its updates", NATS),
        Metric("actor/importance_ratio", "mean of exp(logprobs - old_logprobs)", "", "0.99 to 1.01", "see actor/approx_kl"),
        Metric("actor/clip_fraction_high", "tokens whose gradient the upper bound removes", SHARE),
        Metric("actor/clip_fraction_low", "tokens whose gradient the lower bound removes", SHARE, "below 0.2"),
        Metric("actor/clip_fraction_dual", "tokens at which algorithm.dual_clip acts", SHARE, "below 0.01"),
        Metric("actor/perplexity", "exp of the mean negative log-likelihood per token (sft)", "", "falls"),
        Metric("actor/old_logprobs_of_update", "1 where old logprobs come from the update's own forward pass"),
        Metric("actor/grad_norm", "norm of the gradient before clipping, mean over the step's updates"),
        Metric("actor/skipped_updates", "updates that were not made, because loss or gradient were not finite", SHARE),
    ),
    "Critic": (
        Metric(
            "critic/explained_variance",
            "1 - Var(returns - values) / Var(returns) before the step: 1 is a perfect critic, 0 one that knows the mean only",
            "",
            "rises above 0.3",
            "raise critic.optimizer.lr, or let the critic learn first (critic.warmup_steps)",
        ),
        Metric("critic/values", "mean value of the critic in its update"),
        Metric("critic/returns", "mean return, which the critic learns"),
        Metric("critic/clip_fraction", "values outside of the clip range around the old ones", SHARE, "below 0.3"),
    ),
    "Reward model": (
        Metric("reward_model/accuracy", "pairs whose better response scores higher", SHARE, "above 0.6, rising"),
        Metric("reward_model/margin", "mean difference of the scores of a pair", "", "above 0, rising"),
        Metric("reward_model/score_mean", "mean score of all responses", "", "close to 0", "set algorithm.centering"),
    ),
    "Preferences": (
        Metric("preference/accuracy", "pairs whose chosen response has the higher reward", SHARE, "above 0.6, rising"),
        Metric("preference/margin", "mean difference of the rewards of a pair", "", "above 0, rising"),
        Metric(
            "preference/chosen_reward",
            "mean reward that the policy implies of chosen responses (docs/preferences.md)",
            "",
            "not falling for long",
            "lower the learning rate, or raise algorithm.dpo.beta",
        ),
        Metric("preference/rejected_reward", "mean reward that the policy implies of rejected responses", "", "falls"),
        Metric("preference/divergence", "KTO's estimate of the divergence of the policy from the reference", NATS + " of a response"),
    ),
    "Every trained model": (
        Metric("<role>/grad_norm", "norm of the gradient before clipping: actor, critic or reward_model"),
        Metric("<role>/lr", "learning rate of the step"),
        Metric("<role>/skipped_updates", "updates that were not made, because loss or gradient were not finite", SHARE),
        Metric(
            "<role>/bad_updates_in_a_row",
            "updates in a row without a finite loss and gradient; 5 of them end the run",
            "updates",
            "0",
            "lower the learning rate, look at the data and the rewards of the last steps",
        ),
        Metric("<role>/not_finite", "1 where updates have left a weight not finite, which ends the run"),
        Metric("actor/mtp_loss", "mean negative log-likelihood of what MTP layers predict (actor.mtp)", NATS, "falls"),
        Metric("actor/mtp_grad_norm", "norm of the gradient of MTP layers before clipping, where they are clipped by it"),
        Metric(
            "actor/route_mismatch",
            "tokens and layers of updates for which the router itself would have chosen other experts than those replayed "
            "(`actor.router_replay`)",
            SHARE,
            "below 0.05",
        ),
        Metric("actor/unshared_rows", "rows whose shared beginning an engine had routed otherwise, so that it was computed again"),
        Metric(
            "trainer/computed_share",
            "tokens that updates computed, of those of all rows: what rows begin with alike is computed once "
            "(`trainer.share_prefixes`)",
            SHARE,
        ),
        Metric("<role>/load_balance", "auxiliary loss of a mixture's router: 1 where all experts get equally much", "", "1 to 1.5"),
    ),
    "Evaluation": (
        Metric("evaluate/accuracy", "held-out prompts answered rightly, or held-out pairs in the right order", SHARE, "rises"),
        Metric("evaluate/accuracy/<source>", "accuracy of a data source", SHARE, "rises"),
        Metric("evaluate/reward", "mean score on held-out prompts", "", "rises with reward/mean", "use more prompts"),
        Metric("evaluate/pass_at_<k>", "probability that one of k responses is right", SHARE, "rises"),
        Metric("evaluate/majority_at_<k>", "accuracy of the most frequent answer of k responses", SHARE, "rises"),
        Metric("evaluate/response_length_mean", "mean length of responses to held-out prompts", TOKENS),
        Metric("evaluate/truncated_fraction", "responses to held-out prompts that were cut off", SHARE, "below 0.2"),
        Metric("evaluate/without_score", "held-out responses whose reward failed", "responses", "0", "see reward/errors"),
        Metric("evaluate/loss", "loss on held-out examples", "", "falls", "where it rises again, train no longer"),
        Metric("evaluate/perplexity", "exp of the held-out loss (sft)", "", "falls"),
        Metric("evaluate/margin", "mean difference of the scores, or rewards, of held-out pairs", "", "above 0, rising"),
        Metric("evaluate/chosen_reward", "mean reward that the policy implies of chosen responses of held-out pairs"),
        Metric("evaluate/rejected_reward", "mean reward that it implies of rejected ones"),
        Metric("final/<evaluation>", "the same, of the best model, with which the run ends (checkpoint.load_best_model_at_end)"),
        Metric("final/step", "step of the best model", "steps"),
    ),
    "Progress": (
        Metric("progress/prompts", "prompts of all steps so far", "prompts"),
        Metric("progress/samples", "responses of all steps so far", "responses"),
        Metric("progress/tokens", "response tokens of all steps so far", TOKENS),
    ),
    "Time and throughput": (
        Metric("timing/step_s", "the whole step", S, "steady", "rlhf-mcore report shows which phase has grown"),
        Metric("timing/<phase>_s", "a phase: generate, score, exchange, values, update, sync, save (after the step before)", S),
        Metric("timing/tokens_per_s", "response tokens learned from, of all ranks, per second without evaluation, save", "tokens/s"),
        Metric("timing/prefix_hit", "prompt tokens that the engine's cache had", SHARE),
        Metric("timing/episode", "mean time of an episode of several turns, of which the three that follow are the parts", S),
        Metric("timing/episode_engine", "time of it in which an engine draws a turn, or the turn waits in the engine", S),
        Metric("timing/episode_tools", "time of it in which no turn is drawn and a tool, or the environment, is at work", S),
        Metric("timing/episode_waiting", "the rest: the agent itself, starts of processes, the wait for an engine's next step", S),
        Metric("timing/tool/<tool>", "mean time of a call of a tool; `step` is an environment without tools", S),
        Metric("timing/concurrent_episodes", "episodes under way at a time, in the mean, of all engines", "episodes"),
        Metric("timing/concurrent_calls", "calls of tools under way at a time, in the mean, of all engines", "calls"),
        Metric("timing/unix_time", "when the step ended, since the epoch", S),
        Metric("throughput/tflops", "operations of the models in the step, of all devices", "TFLOP/s"),
        Metric("throughput/mfu", "share of the devices' peak (logging.peak_tflops)", SHARE, "0.2 to 0.5", "see docs/performance.md"),
        Metric("throughput/<phase>_tokens_per_s", "tokens of a phase", "tokens/s"),
        Metric("throughput/<phase>_tflops", "operations of a phase", "TFLOP/s"),
        Metric("throughput/<phase>_mfu", "share of the peak in a phase", SHARE),
        Metric("throughput/engine_steps", "decode steps of engines of their own since the step before, of all engines", "steps"),
        Metric("throughput/engine_tokens", "tokens that these steps drew, those of requests that were cancelled included", TOKENS),
        Metric("throughput/engine_lent", "turns of episodes that another engine drew than the one that plays them", "turns"),
        Metric("throughput/engine_busy_s", "time that these steps took, of all engines", S),
    ),
    "Memory": (
        Metric("memory/<phase>_bytes", "most that the parts that move have had on the first rank's device in a phase", BYTES),
        Metric("memory/<phase>_allocated_bytes", "most that torch has allocated on the first rank's GPU in a phase", BYTES),
        Metric("memory/<phase>_outside_bytes", "memory of the first rank's GPU in use outside torch at the end of a phase", BYTES,
               "1e9 to 9e9", "`plan --run` reserves it"),
    ),
}  # fmt: skip
METRICS: dict[str, Metric] = {metric.name: metric for metrics in GROUPS.values() for metric in metrics}
_ANY = {"<source>": ".+", "<k>": r"\d+", "<role>": "(actor|critic|reward_model)"}


@cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    """List the names with parts that differ, the longest names first."""
    return [
        (
            re.compile("".join(_ANY.get(part, ".+" if part.startswith("<") else re.escape(part)) for part in parts)),
            metric,
        )
        for metric in sorted(METRICS.values(), key=lambda metric: -len(metric.name))
        if len(parts := re.split(r"(<\w+>)", metric.name)) > 1
    ]


def find_metric(name: str) -> Metric | None:
    """Find the entry of a metric under the name that a run writes."""
    return METRICS.get(name) or next((entry for pattern, entry in _patterns() if pattern.fullmatch(name)), None)


def matching(text: str) -> Iterator[Metric]:
    """List the metric of that name, else those with the text in their names."""
    exact = find_metric(text)
    yield from [exact] if exact is not None else [metric for name, metric in METRICS.items() if text in name]


def nearest_metric(name: str) -> str | None:
    """Return the name that a misspelt one most likely means."""
    by_last = {metric.rpartition("/")[2]: metric for metric in METRICS}
    close = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.7)
    last = difflib.get_close_matches(name.rpartition("/")[2], by_last, n=1, cutoff=0.75)
    return close[0] if close else by_last[last[0]] if last else None
