"""The models of a run: what each is, how it is cut and whether it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_mcore.config.derive import is_supervised, needs_critic
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.geometry import read_sizes
from rlhf_mcore.config.schema import Config, LayoutConfig, RecomputeConfig
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.types import ModelGeometry


@dataclass(frozen=True, slots=True)
class Role:
    """One model of a run. ``experts_per_token`` is 0 for a dense model.

    ``offloaded`` weights are on the device only while they are used. ``epochs`` and ``updates`` are those of a step.
    """

    name: str
    geometry: ModelGeometry
    experts_per_token: int
    layout: ParallelLayout
    trained: bool
    dtype: str = "bf16"
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offloaded: bool = False
    epochs: int = 1
    updates: int = 1


def roles_of(cfg: Config, world_size: int, dtype: str) -> list[Role]:
    """The models that a resolved configuration builds, the actor first. ``dtype`` is that of those that do not have their own."""
    trainer, critic, reward = cfg.trainer, cfg.critic, cfg.reward.model
    layout = parallel_layout(cfg.actor.layout, cfg.actor.ranks, world_size, "actor.layout")
    geometry, top_k = read_sizes(cfg.model.path, "sequence" if cfg.algorithm.kind == "reward_model" else "lm")
    if is_supervised(cfg):  # a step is one update of one model
        return [Role("actor", geometry, top_k, layout, True, dtype, cfg.actor.recompute)]
    updates = _updates(trainer.prompts_per_step, trainer.minibatch_size, trainer.ppo_epochs)
    roles = [
        Role(
            "actor",
            geometry,
            top_k,
            layout,
            True,
            dtype,
            cfg.actor.recompute,
            epochs=trainer.ppo_epochs,
            updates=updates,
        )
    ]
    if cfg.algorithm.kl.coef:
        geometry, top_k = read_sizes(cfg.reference.path or cfg.model.path, "lm")
        roles.append(Role("reference", geometry, top_k, layout, False, dtype, offloaded=cfg.reference.offload))
    if needs_critic(cfg):
        own = parallel_layout(critic.layout, critic.ranks, world_size, "critic.layout")
        geometry, top_k = read_sizes(critic.path or cfg.model.path, "token")
        epochs = critic.ppo_epochs or trainer.ppo_epochs
        updates = _updates(trainer.prompts_per_step, critic.minibatch_size or trainer.minibatch_size, epochs)
        held = _dtype(critic.dtype, dtype)
        roles.append(Role("critic", geometry, top_k, own, True, held, critic.recompute, epochs=epochs, updates=updates))
    if reward.path is not None:
        own = parallel_layout(reward.layout, reward.ranks, world_size, "reward.model.layout")
        geometry, top_k = read_sizes(reward.path, "sequence")
        held = _dtype(reward.dtype, dtype)
        roles.append(Role("reward", geometry, top_k, own, False, held, offloaded=reward.offload))
    return roles


def _dtype(stated: str | None, default: str) -> str:
    return default if stated in (None, "auto") else str(stated)


def _updates(prompts: int, minibatch: int | None, epochs: int) -> int:
    return epochs * (prompts // (minibatch or prompts))


def parallel_layout(cut: LayoutConfig, ranks: list[int] | None, world_size: int, field: str) -> ParallelLayout:
    """A layout over all ranks, or over [first, end) of them.

    Raises:
        ConfigError: it does not divide its ranks.
    """
    first, end = ranks or (0, world_size)
    try:
        return ParallelLayout(
            end - first,
            cut.tp,
            cut.pp,
            cut.vpp,
            cut.cp,
            cut.sequence_parallel,
            cut.ep,
            cut.etp,
            None if cut.layers_per_stage is None else tuple(cut.layers_per_stage),
            first,
        )
    except ValueError as error:
        raise ConfigError(f"{field}: {error}; change it or the number of processes") from error
