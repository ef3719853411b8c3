"""From a checked configuration to the models of a run, each under its own layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.filesize import decimal

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.files.transfer import load
from rlhf_mcore.config.choices import MTP_TRAINED
from rlhf_mcore.config.implied import adapter_sizes, offloaded_parts
from rlhf_mcore.config.model_files import sees_images
from rlhf_mcore.config.run_kinds import RunKind, run_kind
from rlhf_mcore.config.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    LoraConfig,
    RecomputeConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rlhf_mcore.families import FAMILIES
from rlhf_mcore.families.mtp import MTP_KEY
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import GroupPool, build_groups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import ModelSpec, load_spec
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import model_flops
from rlhf_mcore.platform import Platform
from rlhf_mcore.residency.ledger import WEIGHTS
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.roles.model import MinibatchPlan, RoleModel, TrainedModel
from rlhf_mcore.roles.policy import Actor, Reference

if TYPE_CHECKING:
    from rlhf_mcore.mcore.image_features import StepFeatures
    from rlhf_mcore.roles.critic import Critic
    from rlhf_mcore.roles.reward_model import RewardModel


@dataclass(slots=True)
class ModelBuilder:
    """Builds the models of a run; a rank builds those that it holds a part of. Every method is collective over the world.

    ``weights``: directories that models are loaded from, by their names in a checkpoint; others are loaded from the configuration's
    paths. Models whose axes join the same ranks share their process groups.
    """

    cfg: Config
    platform: Platform
    weights: Mapping[str, Path] = field(default_factory=dict)
    sharing: DeviceSharing | None = None  # of the device, among the models and the engine; None: among these models
    progress: Callable[[str], None] = lambda text: None  # how far the loading is
    _pool: GroupPool = field(init=False)
    _built: list[MegatronModel] = field(default_factory=list)
    _actor: TrainedModel | None = None
    _kept: StepFeatures | None = None

    def __post_init__(self) -> None:
        self.sharing = self.sharing or DeviceSharing(self.platform)
        self._pool = GroupPool(timedelta(seconds=self.cfg.trainer.collective_timeout_s))

    @property
    def _temperature(self) -> float:
        """Return the temperature of policies; given responses have none."""
        return self.cfg.rollout.sampling.temperature if run_kind(self.cfg).generates else 1.0

    def release(self) -> None:
        """Let the models go that were built so far: the run has ended, or they are needed no longer."""
        for model in self._built:
            model.release()
        self._built.clear()

    def actor(self) -> Actor:
        trainer, algorithm = self.cfg.trainer, self.cfg.algorithm
        plan = MinibatchPlan(
            trainer.minibatch_size or trainer.prompts_per_step,
            trainer.ppo_epochs,
            algorithm.loss_aggregation,
            algorithm.constant_length,
        )
        path = self.cfg.model.path
        model = self._build_trained(load_spec(path), path, self.cfg.actor, plan, name="actor", saved_as="actor")
        self._actor = model
        replay = self.cfg.actor.router_replay
        if replay != "off":
            from rlhf_mcore.roles.routes import replay_routes

            replay_routes(model)
        return Actor(model, self.cfg.rollout.sampling.temperature, algorithm, router_replay=replay)

    def critic(self) -> Critic:
        from rlhf_mcore.algorithms.value_loss import ReturnNormalizer
        from rlhf_mcore.roles.critic import Critic

        cfg = self.cfg.critic
        path = cfg.path or self.cfg.model.path
        assert cfg.minibatch_size is not None and cfg.ppo_epochs is not None, "resolved"
        plan = MinibatchPlan(cfg.minibatch_size, cfg.ppo_epochs)
        spec = load_spec(path, "token", "critic.path")
        model = self._build_trained(spec, path, cfg, plan, name="critic", saved_as="critic", dtype=cfg.dtype)
        normalizer = ReturnNormalizer() if cfg.normalize_returns else None
        return Critic(model, cfg.value_clip, normalizer, self.cfg.algorithm.bootstrap_truncated)

    def reference(self) -> Reference:
        cfg, actor = self.cfg.reference, self.cfg.actor
        if actor.lora.rank is not None:
            assert self._actor is not None, "it is built first"
            return Reference(self._actor, self._temperature)
        path = cfg.path or self.cfg.model.path
        spec = load_spec(path, field="reference.path")
        layout = ParallelLayout.of(actor.layout, actor.ranks, dist.get_world_size())
        saved_as = "reference" if cfg.refresh_steps else None
        overrides = Overrides.of("actor", actor)
        model = self.frozen(spec, path, layout, overrides, cfg, name="reference", saved_as=saved_as)
        return Reference(model, self._temperature)

    def reward_model(self) -> RewardModel:
        from rlhf_mcore.roles.reward_model import RewardModel

        cfg = self.cfg.reward.model
        assert cfg.path is not None
        spec = load_spec(cfg.path, "sequence", "reward.model.path")
        layout = ParallelLayout.of(cfg.layout, cfg.ranks, dist.get_world_size())
        overrides = Overrides.of("reward.model", cfg)
        model = self.frozen(spec, cfg.path, layout, overrides, cfg, name="reward", dtype=cfg.dtype)
        return RewardModel(model)

    def on_examples(self, kind: RunKind, name: str) -> TrainedModel:
        """Build the model of a run that learns from given responses: a step is one update. ``name`` prefixes its metrics."""
        cfg, path = self.cfg, self.cfg.model.path
        aggregation, constant = cfg.algorithm.loss_aggregation, cfg.algorithm.constant_length
        plan = MinibatchPlan(cfg.trainer.prompts_per_step, 1, aggregation, constant)
        spec = load_spec(path, kind.head)
        self._actor = self._build_trained(spec, path, cfg.actor, plan, name=name, saved_as=kind.saved_as)
        return self._actor

    def _build_trained(
        self,
        spec: ModelSpec,
        path: str,
        cfg: ActorConfig | CriticConfig,
        plan: MinibatchPlan,
        *,
        name: str,
        saved_as: str,
        dtype: str | None = None,
    ) -> TrainedModel:
        """Build a model with its optimizer. ``name`` prefixes its metrics."""
        layout = ParallelLayout.of(cfg.layout, cfg.ranks, dist.get_world_size())
        options = replace(
            self._options(dtype),
            recompute=cfg.recompute,
            trainable=True,
            aux_loss_coef=cfg.moe.aux_loss_coef,
            overrides=Overrides.of("critic" if cfg is self.cfg.critic else "actor", cfg),
            expert_bias_rate=cfg.moe.expert_bias_rate,
            trains_tower=isinstance(cfg, ActorConfig) and cfg.vision.train != "none",
        )
        trained = None
        if isinstance(cfg, ActorConfig) and cfg.mtp.mode in MTP_TRAINED:
            spec = replace(spec, geometry=replace(spec.geometry, mtp_layers=getattr(spec.hf_config, MTP_KEY)))
            alone = cfg.mtp.mode == "train"
            from rlhf_mcore.mcore.mtp import MTPLearning

            options = replace(options, mtp=MTPLearning(alone, 1.0 if alone else cfg.mtp.loss_coef, self._temperature))
        sizes = adapter_sizes(cfg.lora)
        if sizes is None and (frozen := _frozen_tensors(cfg, spec.geometry)):
            from rlhf_mcore.roles.freezing import freeze, trained_names

            trained = trained_names(spec.geometry, frozen)
            options = replace(options, freeze=partial(freeze, geometry=spec.geometry, layout=layout, patterns=frozen))
        if sizes is None:
            model = self._model(spec, path, layout, options, saved_as)
        else:
            adapters = replace(spec.geometry, adapter=sizes)
            model = self._with_adapters(spec, path, layout, options, adapters, cfg.lora, saved_as)
        if model is not None:
            if cfg.optimizer.name == "muon":
                from rlhf_mcore.roles.matrices import matrices_of

                model.add_optimizer(cfg.optimizer, matrices_of(spec.geometry))
            else:
                model.add_optimizer(cfg.optimizer)
            assert self.sharing is not None
            model.share(self.sharing, saved_as, offloaded_parts(cfg.offload))
        return TrainedModel(
            layout,
            model,
            spec,
            self.cfg.trainer,
            model_flops(spec.geometry),
            optimizer=cfg.optimizer,
            plan=plan,
            name=name,
            trained=trained,
            progress=self.progress,
            adapter=sizes,
        )

    def _with_adapters(
        self,
        spec: ModelSpec,
        path: str,
        layout: ParallelLayout,
        options: BuildOptions,
        adapters: ModelGeometry,
        lora: LoraConfig,
        saved_as: str,
    ) -> MegatronModel | None:
        """Build a model of ``path`` whose adapters are new ones, those of ``lora.path``, or a checkpoint's of ``saved_as``."""
        from rlhf_mcore.roles.adapters import add_adapters, initialize, load_adapters

        role = "critic" if lora is self.cfg.critic.lora else "actor"
        add = partial(add_adapters, geometry=adapters, layout=layout, dropout=lora.dropout, role=role)
        model = self._model(spec, path, layout, replace(options, add_adapters=add), None)
        parameters = model.adapter_parameters() if model is not None else []
        source = self.weights.get(saved_as) or lora.path

        if source is None and lora.init == "pissa":
            from rlhf_mcore.roles.pissa import begin_with_principal

            begin_with_principal(parameters, adapters, path, self.progress, f"{role}.lora")
            return model

        def fill() -> None:
            if source is None:
                initialize(parameters, adapters, self.cfg.seed)
                if lora.use_dora:
                    from rlhf_mcore.roles.dora import begin_with_norms

                    begin_with_norms(parameters, adapters, path)
            else:
                load_adapters(parameters, adapters, source, f"{role}.lora")

        on_every_rank(fill)
        return model

    def frozen(
        self,
        spec: ModelSpec,
        path: str,
        layout: ParallelLayout,
        overrides: Overrides,
        cfg: ReferenceConfig | RewardModelConfig | TeacherConfig,
        *,
        name: str,
        dtype: str | None = None,
        saved_as: str | None = None,
    ) -> RoleModel:
        """Build a model that no optimizer updates. ``saved_as``: its name in checkpoints, if it is there."""
        model = self._model(spec, path, layout, replace(self._options(dtype), overrides=overrides), saved_as)
        if model is not None and cfg.offload:
            assert self.sharing is not None
            model.share(self.sharing, name, (WEIGHTS,), by_layer=cfg.offload_by_layer)
        return RoleModel(layout, model, spec, self.cfg.trainer, model_flops(spec.geometry))

    def _model(
        self, spec: ModelSpec, path: str, layout: ParallelLayout, options: BuildOptions, saved_as: str | None
    ) -> MegatronModel | None:
        """Build a model on the ranks of ``layout``, None on others.

        Its weights are those of ``path``, or a checkpoint's of ``saved_as``.
        """
        groups = build_groups(layout, self._pool)
        saved = self.weights.get(saved_as) if saved_as is not None else None
        shown = shown_path(saved or path)
        self.progress(shown)
        model = build_model(spec, groups, self.platform, options) if groups is not None else None
        self._built += [model] if model is not None else []
        parameters = model.local_parameters() if model is not None else []
        fresh_head = spec.has_fresh_head and saved is None
        loaded, total = 0, sum(parameter.tensor.nbytes for parameter in parameters)

        def advance(num_bytes: int) -> None:
            nonlocal loaded
            loaded += num_bytes
            self.progress(f"{shown}, {decimal(loaded)} of {decimal(total)}")

        def fill() -> None:
            load(parameters, spec.geometry, HFReader(saved or path), fresh_head=fresh_head, progress=advance)

        on_every_rank(fill)
        return model

    def _options(self, dtype: str | None) -> BuildOptions:
        """Return the build options of a frozen model. ``dtype``: its own; null or auto: that of ``model.dtype``."""
        return BuildOptions(
            dtype=self.platform.dtype(self.cfg.model.dtype if dtype in (None, "auto") else dtype),
            layer_spec=self.cfg.model.layer_spec,
            recompute=RecomputeConfig(),
            trainable=False,
            deterministic=self.cfg.deterministic,
            seed=self.cfg.seed,
            logit_chunk_tokens=self.cfg.trainer.logit_chunk_tokens,
            microbatch_tokens=self.cfg.trainer.max_tokens_per_microbatch,
            **self._images(),
        )

    def _images(self) -> dict[str, Any]:
        """Return where models get images from, and what keeps their features; nothing where the policy sees none."""
        if not sees_images(self.cfg.model.path):
            return {}
        from rlhf_mcore.data.images import ImageStore
        from rlhf_mcore.mcore.image_features import StepFeatures

        self._kept = self._kept or StepFeatures()
        return {"images": ImageStore.of(self.cfg), "kept": self._kept}


def _frozen_tensors(group: ActorConfig | CriticConfig, geometry: ModelGeometry) -> list[str]:
    """List names and patterns of tensors of files that are not trained: those of ``freeze``, and of a tower."""
    freeze, train = (group.freeze, group.vision.train) if isinstance(group, ActorConfig) else ([], "none")
    vision = FAMILIES[geometry.family].vision
    return freeze if vision is None else [*freeze, *vision.frozen(geometry, train)]
