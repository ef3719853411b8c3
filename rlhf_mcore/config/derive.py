"""Values that follow from others: the one place where "null means ..." is decided."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from itertools import pairwise

from rlhf_mcore.config.choices import ADVANTAGES
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.implied import grades, longest_response, max_new_tokens, role_layouts
from rlhf_mcore.config.reward_sources import unused_rules
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config, RolloutConfig
from rlhf_mcore.config.schema.rollout import MOST_SUPPORT
from rlhf_mcore.readers.data_rows import count_rows


def default_world_size(cfg: Config, *, evaluates: bool = False) -> int:
    """Number of processes of a run: ``trainer.world_size``, else the smallest that all layouts divide and all ranks are in.

    ``evaluates``: of an evaluation, whose engines are in these processes wherever those of the run are.
    """
    if cfg.trainer.world_size is not None:
        return cfg.trainer.world_size
    roles = role_layouts(cfg)
    colocated = evaluates or (run_kind(cfg).generates and cfg.rollout.placement == "colocated")
    engine = cfg.rollout.layout.num_ranks if colocated else 1
    smallest = math.lcm(engine, *(role.model_size for role in roles if role.ranks is None))
    last = max((role.ranks[-1] for role in roles if role.ranks), default=1)
    return -(-last // smallest) * smallest


def with_sequences(cfg: RolloutConfig, memory_bytes: int, device: str) -> RolloutConfig:
    """Set ``max_num_seqs`` for a device if it is null. ``memory_bytes``: 0 on a CPU."""
    return cfg.model_copy(
        update={"max_num_seqs": cfg.max_num_seqs or engine_kind(cfg.engine).default_sequences(memory_bytes, device)}
    )


def balanced_stages(num_layers: int, num_stages: int) -> list[int]:
    """Divide layers among stages as equally as can be."""
    borders = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [high - low for low, high in pairwise(borders)]


def num_steps(cfg: Config) -> int:
    """Compute the steps of a run: ``trainer.num_steps``, or those in which ``trainer.num_epochs`` passes over the rows are made.

    Where the files are not here, as for planning, epochs tell nothing.
    """
    epochs = cfg.trainer.num_epochs
    rows = count_rows(cfg.data.train) if epochs is not None else None
    if epochs is None or not rows:
        return cfg.trainer.num_steps
    return max(math.ceil(epochs * rows / cfg.trainer.prompts_per_step), 1)


def epochs_text(cfg: Config) -> str | None:
    """Describe the steps that ``trainer.num_epochs`` comes to. Returns None where it is not set."""
    if cfg.trainer.num_epochs is None:
        return None
    leaves_out = cfg.data.transform is not None or cfg.data.overlong_prompts == "drop"
    more = "; rows that data.transform or data.overlong_prompts=drop leaves out are counted" if leaves_out else ""
    return (
        f"trainer.num_epochs={cfg.trainer.num_epochs:g}: {num_steps(cfg)} steps of {cfg.trainer.prompts_per_step} for "
        f"{count_rows(cfg.data.train) or 0} rows{more}"
    )


def updates_per_run(cfg: Config, minibatch_size: int, ppo_epochs: int) -> int:
    """Number of optimizer updates of a role over the whole run."""
    return cfg.trainer.num_steps * ppo_epochs * (cfg.trainer.prompts_per_step // minibatch_size)


def resolve(cfg: Config) -> Config:
    """Copy a valid configuration, with its derived fields filled in.

    ``model.dtype: auto`` stays: the platform decides it at run time. So does ``trainer.world_size``: under the
    user's own torchrun it is the user's to choose.
    """
    cfg = copy.deepcopy(cfg)
    sampling, trainer = cfg.rollout.sampling, cfg.trainer
    trainer.num_steps, trainer.num_epochs = num_steps(cfg), None
    if trainer.minibatch_size is None:
        trainer.minibatch_size = trainer.prompts_per_step
    if cfg.rollout.max_model_len is None:
        cfg.rollout.max_model_len = cfg.data.max_prompt_tokens + max_new_tokens(cfg)
    if sampling.top_p < 1 and sampling.top_k < 1:
        sampling.top_k = MOST_SUPPORT
    cfg.rollout.at_publish = at_publish(cfg)
    _resolve_algorithm(cfg)
    if cfg.evaluate.max_new_tokens is None:
        cfg.evaluate.max_new_tokens = sampling.max_new_tokens
    critic = cfg.critic
    critic.minibatch_size = critic.minibatch_size or trainer.minibatch_size
    critic.ppo_epochs = critic.ppo_epochs or trainer.ppo_epochs
    if cfg.actor.optimizer.schedule.total_updates is None:
        steps = updates_per_run(cfg, trainer.minibatch_size, trainer.ppo_epochs)
        cfg.actor.optimizer.schedule.total_updates = steps
    if critic.optimizer.schedule.total_updates is None:
        critic.optimizer.schedule.total_updates = updates_per_run(cfg, critic.minibatch_size, critic.ppo_epochs)
    for schedule in (cfg.actor.optimizer.schedule, critic.optimizer.schedule):
        if schedule.warmup_ratio:
            assert schedule.total_updates is not None
            schedule.warmup_updates = math.ceil(schedule.warmup_ratio * schedule.total_updates)
    if cfg.model.tokenizer_path is None:
        cfg.model.tokenizer_path = cfg.model.path
    if cfg.bridge.canary is None:
        cfg.bridge.canary = cfg.rollout.placement == "colocated"
    for frozen in (cfg.reference, cfg.reward.model, cfg.teacher):
        if frozen.offload_by_layer and frozen.offload is None:
            frozen.offload = True
    return cfg


def _resolve_algorithm(cfg: Config) -> None:
    algorithm, longest = cfg.algorithm, longest_response(cfg)
    algorithm.rollout_correction.mode = correction_mode(cfg)
    algorithm.reward_weights = part_weights(cfg)
    if algorithm.constant_length is None:
        algorithm.constant_length = longest
    if algorithm.overlong.max_tokens is None:
        algorithm.overlong.max_tokens = longest
    if algorithm.overlong.cache_tokens is None:
        algorithm.overlong.cache_tokens = max(algorithm.overlong.max_tokens // 5, 1)
    if algorithm.kl.controller.steps is None:
        algorithm.kl.controller.steps = cfg.trainer.num_steps


def at_publish(cfg: Config) -> str | None:
    """Say what becomes of unfinished responses when new weights come. Returns None where there are none then."""
    if not cfg.trainer.max_staleness:
        return None
    return cfg.rollout.at_publish or ("drain" if cfg.rollout.deterministic_order else "continue")


def correction_mode(cfg: Config) -> str:
    """Choose how the policy term is weighed: where tokens may be of older policies, or of 8 bits, by the ratio of each."""
    is_other = cfg.trainer.max_staleness or cfg.rollout.quantization
    return cfg.algorithm.rollout_correction.mode or ("token" if is_other else "off")


def part_weights(cfg: Config) -> dict[str, float] | None:
    """Choose the weights of parts of a score, where an estimator compares these: unless they are given, those of the rules."""
    estimator, given = ADVANTAGES.get(cfg.algorithm.advantage), cfg.algorithm.reward_weights
    if given is not None or estimator is None or not estimator.compares_parts:
        return given
    reward = cfg.reward
    if reward.function is not None or reward.remote.url is not None:  # in the place of rules
        return {}
    rules = [*reward.rules, *(rule for rules in (reward.sources or {}).values() for rule in rules)]
    weights = {rule.name: rule.weight if rule.correct > rule.incorrect else -rule.weight for rule in rules}
    return {name: weight for name, weight in weights.items() if weight}


def warnings_of(cfg: Config) -> Iterator[str]:
    """List what a user probably did not mean, although it works."""
    for unused, key in unused_rules(cfg.reward).items() if grades(cfg) else ():
        also = "; reward.functions adds a function to rules" if key == "reward.function" else ""
        yield f"{unused} has no effect, because {key} replaces it{also}"
    if (warning := _short_episodes(cfg)) is not None:
        yield warning


def _short_episodes(cfg: Config) -> str | None:
    """Return a warning where ``environment.max_tokens`` is not set, so that several turns have the room of one."""
    own, limit = cfg.environment, cfg.rollout.sampling.max_new_tokens
    if own.function is None or own.max_tokens is not None or own.max_turns == 1:
        return None
    return (
        f"environment.max_tokens is null, so an episode, what the environment writes included, has at most {limit} tokens, as many as "
        f"one turn (rollout.sampling.max_new_tokens): set it to what environment.max_turns={own.max_turns} turns need"
    )
