"""From a checked configuration to the models of a run, each under its own layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rlhf_mcore.algorithms.value_loss import ReturnNormalizer
from rlhf_mcore.bridge.hf_files import HFReader
from rlhf_mcore.bridge.transfer import load
from rlhf_mcore.config.derive import needs_critic
from rlhf_mcore.config.schema import Config, LayoutConfig, RecomputeConfig
from rlhf_mcore.mcore.families import ModelSpec, load_spec
from rlhf_mcore.mcore.groups import GroupPool, ModelGroups, build_groups
from rlhf_mcore.mcore.model import BuildOptions, MegatronModel, build_model, local_parameters
from rlhf_mcore.mcore.offload import HostWeights
from rlhf_mcore.mcore.optimizer import build_optimizer
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.critic import Critic
from rlhf_mcore.roles.policy import Actor, Reference
from rlhf_mcore.roles.reward_model import RewardModel
from rlhf_mcore.roles.supervised import RewardModelTrainer, SupervisedActor
from rlhf_mcore.roles.trained import Updates


@dataclass(frozen=True, slots=True)
class BuiltRoles:
    """The models of a run; None are those that its algorithm does not need."""

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    reward_model: RewardModel | None
    dtype: str  # of the actor


def build_roles(cfg: Config, platform: Platform, dtype: str, weights: Mapping[str, Path] | None = None) -> BuiltRoles:
    """A rank builds the models that it holds a part of. Collective over the world.

    ``weights``: directories that models are loaded from, by role; others are loaded from the configuration's paths.
    """
    pool = GroupPool(timedelta(seconds=cfg.trainer.collective_timeout_s))
    build = _Builder(cfg, platform, dtype, weights or {}, pool)
    groups = build.groups(cfg.actor.layout, cfg.actor.ranks)
    return BuiltRoles(
        build.actor(groups),
        critic=build.critic() if needs_critic(cfg) else None,
        reference=build.reference(groups) if cfg.algorithm.kl.coef else None,
        reward_model=build.reward_model() if cfg.reward.model.path is not None else None,
        dtype=dtype,
    )


def build_supervised(
    cfg: Config, platform: Platform, dtype: str, name: str, weights: Mapping[str, Path]
) -> SupervisedActor | RewardModelTrainer:
    """The model of a run that learns from given responses. ``name``: in checkpoints, as in ``weights``. Collective over the world."""
    pool = GroupPool(timedelta(seconds=cfg.trainer.collective_timeout_s))
    return _Builder(cfg, platform, dtype, weights, pool).supervised(name)


def build_reward_model(cfg: Config, platform: Platform, dtype: str) -> RewardModel:
    """The reward model alone. Collective over the world."""
    pool = GroupPool(timedelta(seconds=cfg.trainer.collective_timeout_s))
    return _Builder(cfg, platform, dtype, {}, pool).reward_model()


@dataclass(slots=True)
class _Builder:
    """Builds models under their layouts; equal process groups are shared between them."""

    cfg: Config
    platform: Platform
    dtype: str
    weights: Mapping[str, Path]
    pool: GroupPool

    def groups(self, cut: LayoutConfig, ranks: list[int] | None) -> ModelGroups | None:
        first, end = ranks or (0, dist.get_world_size())
        layout = ParallelLayout(
            end - first,
            cut.tp,
            cut.pp,
            cut.vpp,
            sequence_parallel=cut.sequence_parallel,
            ep=cut.ep,
            etp=cut.etp,
            layers_per_stage=None if cut.layers_per_stage is None else tuple(cut.layers_per_stage),
            first_rank=first,
        )
        return build_groups(layout, self.pool)

    def model(
        self,
        spec: ModelSpec,
        path: str,
        groups: ModelGroups | None,
        *,
        recompute: RecomputeConfig | None = None,
        aux_loss_coef: float = 0.0,
        dtype: str | None = None,
        saved_as: str | None = None,
    ) -> MegatronModel | None:
        """A model on the ranks of ``groups``. It is trained if ``recompute`` is said.

        Its weights are those of ``path``, or those that a checkpoint has of the role ``saved_as``.
        """
        options = BuildOptions(
            dtype=self.dtype if dtype in (None, "auto") else dtype,
            layer_spec=self.cfg.model.layer_spec,
            recompute=recompute or RecomputeConfig(),
            trainable=recompute is not None,
            deterministic=self.cfg.deterministic,
            seed=self.cfg.seed,
            aux_loss_coef=aux_loss_coef,
        )
        model = build_model(spec, groups, self.platform, options) if groups is not None else None
        parameters = local_parameters(model) if model is not None else []
        saved = self.weights.get(saved_as) if saved_as is not None else None
        fresh_head = spec.has_fresh_head and saved is None
        on_every_rank(lambda: load(parameters, spec.geometry, HFReader(saved or path), fresh_head=fresh_head))
        return model

    def actor(self, groups: ModelGroups | None) -> Actor:
        cfg, trainer, algorithm = self.cfg.actor, self.cfg.trainer, self.cfg.algorithm
        spec = load_spec(self.cfg.model.path)
        moe = cfg.moe.aux_loss_coef
        model = self.model(
            spec, self.cfg.model.path, groups, recompute=cfg.recompute, aux_loss_coef=moe, saved_as="actor"
        )
        updates = Updates(
            trainer.minibatch_size or trainer.prompts_per_step,
            trainer.ppo_epochs,
            algorithm.loss_aggregation,
            algorithm.constant_length,
        )
        return Actor(
            model,
            spec,
            trainer,
            build_optimizer(model, cfg.optimizer) if model is not None else None,
            cfg.optimizer,
            updates,
            "actor",
            self.cfg.rollout.sampling.temperature,
            algorithm,
        )

    def supervised(self, name: str) -> SupervisedActor | RewardModelTrainer:
        cfg, trainer, algorithm = self.cfg.actor, self.cfg.trainer, self.cfg.algorithm
        is_policy = algorithm.kind == "sft"
        spec = load_spec(self.cfg.model.path, "lm" if is_policy else "sequence")
        model = self.model(
            spec,
            self.cfg.model.path,
            self.groups(cfg.layout, cfg.ranks),
            recompute=cfg.recompute,
            aux_loss_coef=cfg.moe.aux_loss_coef,
            saved_as=name,
        )
        optimizer = build_optimizer(model, cfg.optimizer) if model is not None else None
        updates = Updates(trainer.prompts_per_step, 1, algorithm.loss_aggregation, algorithm.constant_length)
        if is_policy:
            return SupervisedActor(model, spec, trainer, optimizer, cfg.optimizer, updates, "actor")
        return RewardModelTrainer(
            model, spec, trainer, optimizer, cfg.optimizer, updates, "reward_model", algorithm.centering
        )

    def critic(self) -> Critic:
        cfg = self.cfg.critic
        path = cfg.path or self.cfg.model.path
        spec = load_spec(path, "token", "critic.path")
        groups = self.groups(cfg.layout, cfg.ranks)
        moe, dtype = cfg.moe.aux_loss_coef, cfg.dtype
        model = self.model(
            spec, path, groups, recompute=cfg.recompute, aux_loss_coef=moe, dtype=dtype, saved_as="critic"
        )
        assert cfg.minibatch_size is not None and cfg.ppo_epochs is not None, "resolved"
        return Critic(
            model,
            spec,
            self.cfg.trainer,
            build_optimizer(model, cfg.optimizer) if model is not None else None,
            cfg.optimizer,
            Updates(cfg.minibatch_size, cfg.ppo_epochs),
            "critic",
            cfg.value_clip,
            ReturnNormalizer() if cfg.normalize_returns else None,
            self.cfg.algorithm.bootstrap_truncated,
        )

    def reference(self, groups: ModelGroups | None) -> Reference:
        path = self.cfg.reference.path or self.cfg.model.path
        spec = load_spec(path, field="reference.path")
        saved_as = "reference" if self.cfg.reference.refresh_steps else None
        model = self.model(spec, path, groups, saved_as=saved_as)
        host, temperature = _host(model, self.cfg.reference.offload), self.cfg.rollout.sampling.temperature
        return Reference(model, spec, self.cfg.trainer, temperature, host_weights=host)

    def reward_model(self) -> RewardModel:
        cfg = self.cfg.reward.model
        assert cfg.path is not None
        spec = load_spec(cfg.path, "sequence", "reward.model.path")
        model = self.model(spec, cfg.path, self.groups(cfg.layout, cfg.ranks), dtype=cfg.dtype)
        return RewardModel(model, spec, self.cfg.trainer, host_weights=_host(model, cfg.offload))


def _host(model: MegatronModel | None, offload: bool) -> HostWeights | None:
    return HostWeights(model) if offload and model is not None else None
