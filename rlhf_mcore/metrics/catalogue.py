"""Describes every metric of a run: its meaning, unit and healthy range, for docs/reference/metrics.md and ``rlhf-mcore metrics``.

Names are the same in metrics.jsonl, in trackers, on the console and in the report. ``<...>`` in a name is a variable part.
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
    def what_to_do(self) -> str:
        """Return the remedy for an unhealthy value."""
        return self.rule.remedy if self.rule is not None else self.remedy


S, TOKENS, SHARE, BYTES, NATS = "s", "tokens", "share, 0 to 1", "bytes", "nats per token"
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Rewards": (
        Metric("reward/mean", "mean score of the step's responses, before shaping and KL", healthy="rises, then levels off"),
        Metric("reward/std", "standard deviation of the scores", healthy="above 0", remedy="see reward/share_same"),
        Metric("reward/max", "highest score of the step"),
        Metric("reward/min", "lowest score of the step"),
        Metric("reward/baseline_mean", "mean score of the greedy responses (remax); other metrics exclude them"),
        Metric("reward/share_zero", "responses that score exactly 0", SHARE),
        Metric("reward/share_max", "responses with the highest score of the step, if scores differ", SHARE),
        Metric("reward/share_same", "prompts whose responses all have the same score; such a group gives no signal", SHARE),
        Metric("reward/errors", "responses whose reward raised an error", "responses"),
        Metric("reward/timeouts", "responses whose reward timed out", "responses"),
        Metric("reward/parse_failures", "responses in which the rules found no answer", "responses"),
        Metric(
            "reward/dropped_prompts",
            "prompts dropped from the step because a response has no score (reward.on_error: drop)",
            "prompts",
            "0",
            "see reward/errors and reward/timeouts",
        ),
        Metric("reward/<part>_mean", "mean of a named part of the score: a rule, the reward model, a value from a function"),
        Metric(
            "reward/overlong_mean",
            "mean penalty for responses close to the limit (algorithm.overlong)",
            healthy="close to 0",
            remedy="responses are too long: see rollout/response_length_mean",
        ),
        Metric("reward/mean/<source>", "mean score of a data source, if a step has several"),
        Metric("reward/share_zero/<source>", "reward/share_zero for a data source", SHARE),
        Metric("reward/share_max/<source>", "reward/share_max for a data source", SHARE),
        Metric("reward/share_same/<source>", "reward/share_same for a data source", SHARE),
        Metric("reward/parse_failures/<source>", "reward/parse_failures for a data source", "responses"),
    ),
    "Responses": (
        Metric("rollout/response_length_mean", "mean length of responses", TOKENS),
        Metric("rollout/response_length_max", "longest response", TOKENS),
        Metric("rollout/truncated_fraction", "responses truncated at the token limit", SHARE),
        Metric("rollout/num_tokens", "tokens sampled by the policy for the step", TOKENS),
        Metric(
            "rollout/branches_mean",
            "mean sequences per agent episode, if an episode has branched",
            "sequences",
            "close to 1",
            "the harness rewrites its history: see environment.branches",
        ),
        Metric("rollout/branches_max", "maximum of sequences per agent episode, if an episode has branched", "sequences"),
        Metric("rollout/turns_mean", "mean turns of the policy per episode", "turns"),
        Metric("rollout/tool_calls/<tool>", "calls of a tool with results, in the step's episodes", "calls"),
        Metric("rollout/num_batches", "prompt batches that dynamic sampling used for the step", "batches", "1 to 3"),
        Metric(
            "rollout/informative_fraction",
            "prompts of dynamic sampling whose responses differ in score",
            SHARE,
            "above 0.3",
            "use prompts that are neither too easy nor too hard",
        ),
    ),
    "Engines and trainer": (
        Metric("rollout/logprob_diff_mean", "mean of |trainer logprob - engine logprob| over sampled tokens", NATS),
        Metric("rollout/logprob_diff_max", "largest of these differences", NATS, "below 1", "see rollout/logprob_diff_mean"),
        Metric("rollout/logprob_exact", "sampled tokens with bitwise equal logprobs in trainer and engine", SHARE),
        Metric("rollout/ratio_mean", "mean of exp(trainer - engine), over tokens or responses", "", "0.98 to 1.02"),
        Metric("rollout/ratio_max", "largest of these ratios"),
        Metric("rollout/ratio_min", "smallest of these ratios"),
        Metric("rollout/clipped_fraction", "ratios above algorithm.rollout_correction.cap", SHARE, "below 0.01"),
        Metric("rollout/masked_fraction", "ratios outside the band; their tokens are masked", SHARE, "below 0.05"),
        Metric(
            "rollout/effective_sample_size",
            "(sum w)^2 / (n sum w^2) of the correction's factors w; 1 if all are equal",
            SHARE,
            "above 0.9",
            "engine and trainer differ too much: see rollout/logprob_diff_mean and rollout/staleness_mean",
        ),
        Metric("rollout/support_size", "mean number of candidate tokens after top_p and top_k", TOKENS),
        Metric("rollout/support_mass", "mean probability of these candidates under the trainer's policy", SHARE),
        Metric(
            "rollout/draft_acceptance/<depth>",
            "accepted share of the drafts <depth> tokens ahead (rollout.speculative)",
            SHARE,
            "constant",
            "untrained MTP layers fall behind the policy: set actor.mtp.mode=train; else lower rollout.speculative.num_tokens",
        ),
        Metric("rollout/draft_pass_tokens", "mean tokens per pass for responses with drafts", TOKENS),
        Metric("rollout/staleness_mean", "mean age of tokens at the update", "policy versions"),
        Metric("rollout/staleness_max", "maximum age of a token at the update", "policy versions"),
        Metric("rollout/stale_fraction", "tokens dropped because of their age", SHARE, "below 0.1", "lower trainer.max_staleness"),
        Metric(
            "rollout/preemptions",
            "responses whose cache was evicted since the last step; the engine computes their tokens again",
            "responses",
            "0",
            "raise rollout.gpu_memory_utilization, or lower rollout.max_num_seqs",
        ),
        Metric("rollout/in_flight", "requests in flight in the engines when training of a step starts", "requests"),
        Metric(
            "rollout/redrawn",
            "groups restarted since the start of the run, because they would have been too old",
            "prompts",
            "few",
            "raise trainer.max_staleness, or add engine devices",
        ),
        Metric(
            "rollout/other_version",
            "responses continued with newer weights after the loss of their engine, since the last step",
            "responses",
            "0",
            "set rollout.deterministic_order=true, which continues them with their original weights",
        ),
        Metric("bridge/received_bytes", "weights received by the first rank for its engine", BYTES),
        Metric("bridge/local_bytes", "weights copied locally by the first rank", BYTES),
        Metric("bridge/sent_bytes", "weights sent by the first rank to disaggregated engines", BYTES),
        Metric(
            "bridge/sent_share",
            "share of its weight bytes that is sent with bridge.full_every; unchanged elements are not sent",
            SHARE,
        ),
    ),
    "KL and loss": (
        Metric("kl/mean", "KL of the policy before the step to the reference (algorithm.kl.estimator)", NATS),
        Metric("kl/coef", "weight of the KL from the controller"),
        Metric(
            "teacher/divergence",
            "mean divergence of the policy from the teacher's distributions, per token (`teacher.divergence`, without `coef`)",
            NATS,
            "falls towards 0",
        ),
        Metric("teacher/kl", "KL of the policy before the step to the teacher, at sampled tokens (k1)", NATS, "falls towards 0"),
        Metric("loss/total", "loss of the actor's updates, aggregated as in algorithm.loss_aggregation"),
        Metric("loss/policy", "policy-gradient term of the loss"),
        Metric("loss/kl", "KL to the reference in the update's forward pass", NATS),
        Metric("loss/value", "loss of the critic", "", "falls", "see critic/explained_variance"),
        Metric("loss/sft", "negative log-likelihood of given responses", NATS, "falls"),
        Metric("loss/reward_model", "loss over pairs of a better and a worse response", "", "below 0.69 (random guessing)"),
        Metric("loss/dpo", "loss of a policy over such pairs (algorithm.dpo.loss)", "", "falls"),
    ),
    "Actor": (
        Metric("actor/entropy", "mean entropy of the next token (every logging.entropy_every steps)", NATS),
        Metric("actor/approx_kl", "k3 estimate of the KL between the policy before the step and in its updates", NATS),
        Metric("actor/importance_ratio", "mean of exp(logprobs - old_logprobs)", "", "0.99 to 1.01", "see actor/approx_kl"),
        Metric("actor/clip_fraction_high", "tokens whose gradient the upper bound removes", SHARE),
        Metric("actor/clip_fraction_low", "tokens whose gradient the lower bound removes", SHARE, "below 0.2"),
        Metric("actor/clip_fraction_dual", "tokens clipped by algorithm.dual_clip", SHARE, "below 0.01"),
        Metric("actor/perplexity", "exp of the mean negative log-likelihood per token (sft)", "", "falls"),
        Metric("actor/old_logprobs_of_update", "1 if old logprobs come from the update's own forward pass"),
        Metric("actor/grad_norm", "norm of the gradient before clipping, mean over the step's updates"),
        Metric("actor/skipped_updates", "updates skipped because the loss or the gradient is not finite", SHARE),
    ),
    "Critic": (
        Metric(
            "critic/explained_variance",
            "1 - Var(returns - values) / Var(returns) before the step; 1: perfect, 0: no better than the mean",
            "",
            "rises above 0.3",
            "raise critic.optimizer.lr, or let the critic learn first (critic.warmup_steps)",
        ),
        Metric("critic/values", "mean value of the critic in its update"),
        Metric("critic/returns", "mean return, the critic's target"),
        Metric("critic/clip_fraction", "values outside the clip range around the old values", SHARE, "below 0.3"),
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
            "mean implicit reward of chosen responses (docs/algorithms/preferences.md)",
            "",
            "not falling for long",
            "lower the learning rate, or raise algorithm.dpo.beta",
        ),
        Metric("preference/rejected_reward", "mean implicit reward of rejected responses", "", "falls"),
        Metric("preference/divergence", "KTO's estimate of the divergence of the policy from the reference", NATS + " of a response"),
    ),
    "Every trained model": (
        Metric("<role>/grad_norm", "norm of the gradient before clipping: actor, critic or reward_model"),
        Metric("<role>/lr", "learning rate of the step"),
        Metric("<role>/skipped_updates", "updates skipped because the loss or the gradient is not finite", SHARE),
        Metric(
            "<role>/bad_updates_in_a_row",
            "consecutive updates without a finite loss and gradient; 5 of them end the run",
            "updates",
            "0",
            "lower the learning rate; check the data and the rewards of the last steps",
        ),
        Metric("<role>/not_finite", "1 if a weight is not finite after the updates, which ends the run"),
        Metric("actor/mtp_loss", "mean negative log-likelihood of the MTP layers' predictions (actor.mtp)", NATS, "falls"),
        Metric("actor/mtp_grad_norm", "norm of the MTP layers' gradient before clipping, if they are clipped separately"),
        Metric(
            "actor/route_mismatch",
            "share of (token, layer) pairs in updates for which the router would choose other experts than the replayed ones "
            "(`actor.router_replay`)",
            SHARE,
            "below 0.05",
        ),
        Metric("actor/unshared_rows", "rows whose shared prefix was computed again, because an engine had routed it differently"),
        Metric(
            "trainer/computed_share",
            "tokens computed in updates, divided by the tokens of all rows; shared prefixes are computed once "
            "(`trainer.share_prefixes`)",
            SHARE,
        ),
        Metric("<role>/load_balance", "auxiliary loss of an MoE router; 1 if all experts get equally many tokens", "", "1 to 1.5"),
    ),
    "Evaluation": (
        Metric("evaluate/accuracy", "held-out prompts answered correctly, or held-out pairs ranked correctly", SHARE, "rises"),
        Metric("evaluate/accuracy/<source>", "accuracy of a data source", SHARE, "rises"),
        Metric("evaluate/reward", "mean score on held-out prompts", "", "rises with reward/mean", "use more prompts"),
        Metric("evaluate/pass_at_<k>", "probability that at least one of k responses is correct", SHARE, "rises"),
        Metric("evaluate/majority_at_<k>", "accuracy of the majority answer of k responses", SHARE, "rises"),
        Metric("evaluate/response_length_mean", "mean length of responses to held-out prompts", TOKENS),
        Metric("evaluate/truncated_fraction", "truncated responses to held-out prompts", SHARE, "below 0.2"),
        Metric("evaluate/without_score", "held-out responses whose reward failed", "responses", "0", "see reward/errors"),
        Metric("evaluate/loss", "loss on held-out examples", "", "falls", "if it rises again, stop training"),
        Metric("evaluate/perplexity", "exp of the held-out loss (sft)", "", "falls"),
        Metric("evaluate/margin", "mean difference of the scores, or rewards, of held-out pairs", "", "above 0, rising"),
        Metric("evaluate/chosen_reward", "mean implicit reward of chosen responses in held-out pairs"),
        Metric("evaluate/rejected_reward", "mean implicit reward of rejected responses in held-out pairs"),
        Metric("final/<evaluation>", "the same for the best model, loaded at the end (checkpoint.load_best_model_at_end)"),
        Metric("final/step", "step of the best model", "steps"),
    ),
    "Progress": (
        Metric("progress/prompts", "prompts of all steps so far", "prompts"),
        Metric("progress/samples", "responses of all steps so far", "responses"),
        Metric("progress/tokens", "response tokens of all steps so far", TOKENS),
    ),
    "Time and throughput": (
        Metric("timing/step_s", "the whole step", S, "steady", "rlhf-mcore report shows which phase takes longer"),
        Metric("timing/<phase>_s", "a phase: generate, score, exchange, values, update, sync, save (of the previous step)", S),
        Metric("timing/tokens_per_s", "response tokens of all ranks per second, without evaluation and save", "tokens/s"),
        Metric("timing/prefix_hit", "prompt tokens found in the engine's cache", SHARE),
        Metric("timing/episode", "mean time of an episode with several turns; the next three metrics are its parts", S),
        Metric("timing/episode_engine", "time in which an engine generates a turn, or the turn waits in the engine", S),
        Metric("timing/episode_tools", "time in which no turn is generated and a tool or the environment runs", S),
        Metric("timing/episode_waiting", "remaining time: the agent itself, process starts, waiting for an engine step", S),
        Metric("timing/tool/<tool>", "mean time of a tool call; `step` is an environment without tools", S),
        Metric("timing/concurrent_episodes", "mean number of concurrent episodes, over all engines", "episodes"),
        Metric("timing/concurrent_calls", "mean number of concurrent tool calls, over all engines", "calls"),
        Metric("timing/unix_time", "Unix time at the end of the step", S),
        Metric("throughput/tflops", "operations of the models in the step, over all devices", "TFLOP/s"),
        Metric("throughput/mfu", "share of the devices' peak (logging.peak_tflops)", SHARE, "0.2 to 0.5", "see docs/scale/tuning.md"),
        Metric("throughput/<phase>_tokens_per_s", "tokens of a phase", "tokens/s"),
        Metric("throughput/<phase>_tflops", "operations of a phase", "TFLOP/s"),
        Metric("throughput/<phase>_mfu", "share of the peak in a phase", SHARE),
        Metric("throughput/engine_steps", "decode steps of all disaggregated engines since the previous step", "steps"),
        Metric("throughput/engine_tokens", "tokens sampled in these steps, including cancelled requests", TOKENS),
        Metric("throughput/engine_lent", "turns generated by another engine than the episode's own", "turns"),
        Metric("throughput/engine_busy_s", "total time of these steps, over all engines", S),
    ),
    "Memory": (
        Metric("memory/<phase>_bytes", "peak memory of offloadable parts on the first rank's device in a phase", BYTES),
        Metric("memory/<phase>_allocated_bytes", "peak memory allocated by torch on the first rank's GPU in a phase", BYTES),
        Metric("memory/<phase>_outside_bytes", "memory used outside torch on the first rank's GPU at the end of a phase", BYTES,
               "1e9 to 9e9", "`plan --run` reserves it"),
    ),
}  # fmt: skip
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
