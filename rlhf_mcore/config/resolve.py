"""Fill in values that follow from other keys. Only this module decides the meaning of null."""

from __future__ import annotations

import math
from typing import Any

from rlhf_mcore.config.choices import ADVANTAGES, run_kind
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.questions import longest_response, max_new_tokens, role_layouts
from rlhf_mcore.config.schema import Config, RolloutConfig, ScheduleConfig
from rlhf_mcore.config.schema.group import with_values
from rlhf_mcore.config.schema.rollout import MOST_SUPPORT
from rlhf_mcore.readers.data_rows import count_rows


def resolve(cfg: Config) -> Config:
    """Return a copy of a valid configuration with its derived values filled in.

    Two keys are not resolved. The platform decides ``model.dtype: auto`` at run time. The launcher of the ranks decides
    ``trainer.world_size``; under torchrun, this is the user.
    """
    trainer, critic, sampling = cfg.trainer, cfg.critic, cfg.rollout.sampling
    steps, longest = num_steps(cfg), longest_response(cfg)
    minibatch_size = or_else(trainer.minibatch_size, trainer.prompts_per_step)
    critic_minibatch_size = critic.minibatch_size or minibatch_size
    critic_epochs = critic.ppo_epochs or trainer.ppo_epochs
    overlong = or_else(cfg.algorithm.overlong.max_tokens, longest)
    nucleus = sampling.top_p < 1 and sampling.top_k < 1
    values = {
        "trainer.num_steps": steps,
        "trainer.num_epochs": None,
        "trainer.minibatch_size": minibatch_size,
        "critic.minibatch_size": critic_minibatch_size,
        "critic.ppo_epochs": critic_epochs,
        "model.tokenizer_path": or_else(cfg.model.tokenizer_path, cfg.model.path),
        "rollout.max_model_len": or_else(cfg.rollout.max_model_len, cfg.data.max_prompt_tokens + max_new_tokens(cfg)),
        "rollout.sampling.top_k": MOST_SUPPORT if nucleus else sampling.top_k,
        "rollout.at_publish": at_publish(cfg),
        "bridge.canary": or_else(cfg.bridge.canary, cfg.rollout.placement == "colocated"),
        "evaluate.max_new_tokens": or_else(cfg.evaluate.max_new_tokens, sampling.max_new_tokens),
        "algorithm.rollout_correction.mode": correction_mode(cfg),
        "algorithm.reward_weights": part_weights(cfg),
        "algorithm.constant_length": or_else(cfg.algorithm.constant_length, longest),
        "algorithm.overlong.max_tokens": overlong,
        "algorithm.overlong.cache_tokens": or_else(cfg.algorithm.overlong.cache_tokens, max(overlong // 5, 1)),
        "algorithm.kl.controller.steps": or_else(cfg.algorithm.kl.controller.steps, steps),
    }
    for role, size, epochs in (
        ("actor", minibatch_size, trainer.ppo_epochs),
        ("critic", critic_minibatch_size, critic_epochs),
    ):
        updates = steps * epochs * (trainer.prompts_per_step // size)
        schedule = _with_updates(getattr(cfg, role).optimizer.schedule, updates)
        values[f"{role}.optimizer.schedule"] = schedule
    return with_values(cfg.model_copy(deep=True), values)


def or_else(value: Any, default: Any) -> Any:
    """Return a value, or the default if it is null."""
    return default if value is None else value


def num_steps(cfg: Config) -> int:
    """Return the steps of a run: ``trainer.num_steps``, or the steps for ``trainer.num_epochs`` passes over the rows.

    If the files are missing, as in planning, epochs are ignored.
    """
    epochs = cfg.trainer.num_epochs
    rows = count_rows(cfg.data.train) if epochs is not None else None
    if epochs is None or not rows:
        return cfg.trainer.num_steps
    return max(math.ceil(epochs * rows / cfg.trainer.prompts_per_step), 1)


def at_publish(cfg: Config) -> str | None:
    """Return the handling of unfinished responses when weights are published, or None in synchronous runs."""
    if not cfg.trainer.max_staleness:
        return None
    return cfg.rollout.at_publish or ("drain" if cfg.rollout.deterministic_order else "continue")


def correction_mode(cfg: Config) -> str:
    """Return the mode of rollout correction. By default it is ``token`` if an older or an 8-bit policy may have sampled tokens."""
    is_other = cfg.trainer.max_staleness or cfg.rollout.quantization
    return cfg.algorithm.rollout_correction.mode or ("token" if is_other else "off")


def part_weights(cfg: Config) -> dict[str, float] | None:
    """Return the weights of score parts for an estimator that compares parts. By default they are the rules' weights."""
    estimator, given = ADVANTAGES.get(cfg.algorithm.advantage), cfg.algorithm.reward_weights
    if given is not None or estimator is None or not estimator.compares_parts:
        return given
    reward = cfg.reward
    if (
        reward.function is not None or reward.remote.url is not None
    ):  # they replace the rules, so names and weights are unknown
        return {}
    rules = [*reward.rules, *(rule for rules in (reward.sources or {}).values() for rule in rules)]
    weights = {rule.name: rule.weight if rule.correct > rule.incorrect else -rule.weight for rule in rules}
    return {name: weight for name, weight in weights.items() if weight}


def _with_updates(schedule: ScheduleConfig, updates: int) -> ScheduleConfig:
    """Return a learning-rate schedule with its number of updates and warm-up filled in."""
    total = or_else(schedule.total_updates, updates)
    warmup = math.ceil(schedule.warmup * total if schedule.warmup < 1 else schedule.warmup)
    return with_values(schedule, {"total_updates": total, "warmup": float(warmup)})


def default_world_size(cfg: Config, *, evaluates: bool = False) -> int:
    """Return the number of processes of a run: ``trainer.world_size``, else the smallest number that fits all layouts and ranks.

    ``evaluates``: for ``rlhf-mcore evaluate``, whose engines always run in these processes.
    """
    if cfg.trainer.world_size is not None:
        return cfg.trainer.world_size
    roles = role_layouts(cfg)
    colocated = evaluates or (run_kind(cfg).generates and cfg.rollout.placement == "colocated")
    engine = cfg.rollout.layout.num_ranks if colocated else 1
    smallest = math.lcm(engine, *(role.model_size for role in roles if role.ranks is None))
    last = max((role.ranks[-1] for role in roles if role.ranks), default=1)
    return math.ceil(last / smallest) * smallest


def with_sequences(cfg: RolloutConfig, memory_bytes: int, device: str) -> RolloutConfig:
    """Return ``cfg`` with ``max_num_seqs`` set for a device if it is null. ``memory_bytes``: 0 on a CPU."""
    default = engine_kind(cfg.engine).default_sequences(memory_bytes, device)
    return with_values(cfg, {"max_num_seqs": cfg.max_num_seqs or default})
