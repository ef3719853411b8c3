"""From a checked configuration to the models of a run, each under its own layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rlhf_mcore.algorithms.value_loss import ReturnNormalizer
from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.files.transfer import load
from rlhf_mcore.config.derive import needs_critic
from rlhf_mcore.config.schema import ActorConfig, Config, CriticConfig, LayoutConfig, RecomputeConfig
from rlhf_mcore.mcore.families import ModelSpec, load_spec
from rlhf_mcore.mcore.groups import GroupPool, build_groups
from rlhf_mcore.mcore.model import BuildOptions, MegatronModel, build_model
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.critic import Critic
from rlhf_mcore.roles.model import MinibatchPlan, RoleModel, TrainedModel
from rlhf_mcore.roles.policy import Actor, Reference, SupervisedActor
from rlhf_mcore.roles.reward_model import RewardModel, RewardModelTrainer


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
    return BuiltRoles(
        build.actor(),
        critic=build.critic() if needs_critic(cfg) else None,
        reference=build.reference() if cfg.algorithm.kl.coef else None,
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

    def layout(self, cut: LayoutConfig, ranks: list[int] | None) -> ParallelLayout:
        first, end = ranks or (0, dist.get_world_size())
        return ParallelLayout(
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

    def model(
        self,
        spec: ModelSpec,
        path: str,
        layout: ParallelLayout,
        *,
        recompute: RecomputeConfig | None = None,
        aux_loss_coef: float = 0.0,
        dtype: str | None = None,
        saved_as: str | None = None,
    ) -> MegatronModel | None:
        """A model on the ranks of ``layout``, None on others. It is trained if ``recompute`` is given.

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
        groups = build_groups(layout, self.pool)
        model = build_model(spec, groups, self.platform, options) if groups is not None else None
        parameters = model.local_parameters() if model is not None else []
        saved = self.weights.get(saved_as) if saved_as is not None else None
        fresh_head = spec.has_fresh_head and saved is None
        on_every_rank(lambda: load(parameters, spec.geometry, HFReader(saved or path), fresh_head=fresh_head))
        return model

    def actor(self) -> Actor:
        cfg, trainer, algorithm = self.cfg.actor, self.cfg.trainer, self.cfg.algorithm
        plan = MinibatchPlan(
            trainer.minibatch_size or trainer.prompts_per_step,
            trainer.ppo_epochs,
            algorithm.loss_aggregation,
            algorithm.constant_length,
        )
        path = self.cfg.model.path
        trained = self.trained(load_spec(path), path, cfg, plan, saved_as="actor", name="actor")
        return Actor(trained, self.cfg.rollout.sampling.temperature, algorithm)

    def trained(
        self,
        spec: ModelSpec,
        path: str,
        cfg: ActorConfig | CriticConfig,
        plan: MinibatchPlan,
        *,
        saved_as: str,
        name: str,
        dtype: str | None = None,
    ) -> TrainedModel:
        """A model with its optimizer. ``name`` prefixes its metrics."""
        layout = self.layout(cfg.layout, cfg.ranks)
        moe = cfg.moe.aux_loss_coef
        model = self.model(
            spec, path, layout, recompute=cfg.recompute, aux_loss_coef=moe, dtype=dtype, saved_as=saved_as
        )
        if model is not None:
            model.add_optimizer(cfg.optimizer)
        return TrainedModel(layout, model, spec, self.cfg.trainer, optimizer=cfg.optimizer, plan=plan, name=name)

    def supervised(self, saved_as: str) -> SupervisedActor | RewardModelTrainer:
        algorithm, path = self.cfg.algorithm, self.cfg.model.path
        is_policy = algorithm.kind == "sft"
        spec = load_spec(path, "lm" if is_policy else "sequence")
        plan = MinibatchPlan(
            self.cfg.trainer.prompts_per_step, 1, algorithm.loss_aggregation, algorithm.constant_length
        )
        name = "actor" if is_policy else "reward_model"
        trained = self.trained(spec, path, self.cfg.actor, plan, saved_as=saved_as, name=name)
        return SupervisedActor(trained) if is_policy else RewardModelTrainer(trained, algorithm.centering)

    def critic(self) -> Critic:
        cfg = self.cfg.critic
        path = cfg.path or self.cfg.model.path
        assert cfg.minibatch_size is not None and cfg.ppo_epochs is not None, "resolved"
        plan = MinibatchPlan(cfg.minibatch_size, cfg.ppo_epochs)
        spec = load_spec(path, "token", "critic.path")
        trained = self.trained(spec, path, cfg, plan, saved_as="critic", name="critic", dtype=cfg.dtype)
        normalizer = ReturnNormalizer() if cfg.normalize_returns else None
        return Critic(trained, cfg.value_clip, normalizer, self.cfg.algorithm.bootstrap_truncated)

    def reference(self) -> Reference:
        cfg = self.cfg.reference
        path = cfg.path or self.cfg.model.path
        spec = load_spec(path, field="reference.path")
        layout = self.layout(self.cfg.actor.layout, self.cfg.actor.ranks)
        model = self.model(spec, path, layout, saved_as="reference" if cfg.refresh_steps else None)
        if model is not None and cfg.offload:
            model.offload()
        return Reference(RoleModel(layout, model, spec, self.cfg.trainer), self.cfg.rollout.sampling.temperature)

    def reward_model(self) -> RewardModel:
        cfg = self.cfg.reward.model
        assert cfg.path is not None
        spec = load_spec(cfg.path, "sequence", "reward.model.path")
        layout = self.layout(cfg.layout, cfg.ranks)
        model = self.model(spec, cfg.path, layout, dtype=cfg.dtype)
        if model is not None and cfg.offload:
            model.offload()
        return RewardModel(RoleModel(layout, model, spec, self.cfg.trainer))
