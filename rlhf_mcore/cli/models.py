"""Build the models of a run from a checked configuration, each under its own layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.filesize import decimal
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.algorithms.kl import Divergence
from rlhf_mcore.algorithms.value_loss import ReturnNormalizer
from rlhf_mcore.bridge.files.hf_files import HFReader, load, locate_tensors
from rlhf_mcore.config.choices import MTP_TRAINED, RunKind, run_kind
from rlhf_mcore.config.questions import adapter_sizes, is_offloaded, offloaded_parts
from rlhf_mcore.config.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    RecomputeConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
)
from rlhf_mcore.data.images import ImageStore
from rlhf_mcore.data.rendering import PromptContext
from rlhf_mcore.expected_kernels import why_unshared
from rlhf_mcore.families import FAMILIES, hf_shapes
from rlhf_mcore.families.indexed import is_of_indexer, with_trained_indexers
from rlhf_mcore.families.mtp import MTP_KEY
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import GroupPool, build_groups
from rlhf_mcore.mcore.image_features import StepFeatures
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import ModelSpec, load_spec
from rlhf_mcore.mcore.mtp import MTPLearning
from rlhf_mcore.mcore.optimizer import check_state_dtype
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import model_flops
from rlhf_mcore.platform import Platform
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.readers.model_files import sees_images
from rlhf_mcore.residency.ledger import WEIGHTS
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.roles.adapters import add_adapters, initialize, load_adapters
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Actor, Reference, replay_routes
from rlhf_mcore.roles.scalar_models import Critic, RewardModel
from rlhf_mcore.roles.teacher import OTHERS, Average, Context, Teacher
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.roles.trained_weights import freeze, freeze_all_but_indexers, matrices_of, trained_names
from rlhf_mcore.types import Prompt

SAVED_AS = "teacher"


@dataclass(frozen=True, slots=True)
class TrainedPlan:
    """The plan for a model with an optimizer. Each function of ``FEATURES`` may change the plan before the model is built."""

    role: str  # actor or critic, for messages
    cfg: ActorConfig | CriticConfig
    spec: ModelSpec
    layout: ParallelLayout
    options: BuildOptions
    temperature: float
    trained: Sequence[str] | None = None  # names of the trained tensors; None: all
    adapter: AdapterSizes | None = None


def predict_further_tokens(plan: TrainedPlan) -> TrainedPlan:
    """Add the training of the model's layers for multi-token prediction (``actor.mtp``)."""
    if not isinstance(plan.cfg, ActorConfig) or plan.cfg.mtp.mode not in MTP_TRAINED:
        return plan
    spec, alone = plan.spec, plan.cfg.mtp.mode == "train"
    spec = replace(spec, geometry=replace(spec.geometry, mtp_layers=getattr(spec.hf_config, MTP_KEY)))
    learning = MTPLearning(alone, 1.0 if alone else plan.cfg.mtp.loss_coef, plan.temperature)
    return replace(plan, spec=spec, options=replace(plan.options, mtp=learning))


def train_indexers(plan: TrainedPlan) -> TrainedPlan:
    """Train the indexers of sparse attention (``actor.indexer``), in the warm-up only them."""
    stage = plan.cfg.indexer if isinstance(plan.cfg, ActorConfig) else "frozen"
    if stage == "frozen":
        return plan
    geometry, options = with_trained_indexers(plan.spec.geometry), replace(plan.options, indexer=stage)
    plan = replace(plan, spec=replace(plan.spec, geometry=geometry), options=options)
    if stage == "sparse":
        return plan
    names = [name for name in hf_shapes(geometry, trained=True) if is_of_indexer(name)]
    return replace(plan, options=replace(options, freeze=freeze_all_but_indexers), trained=names)


def add_low_rank_adapters(plan: TrainedPlan) -> TrainedPlan:
    """Add adapters, which are trained instead of the weights (``lora``)."""
    sizes = adapter_sizes(plan.cfg.lora)
    if sizes is None:
        return plan
    geometry = replace(plan.spec.geometry, adapter=sizes)
    add = partial(add_adapters, geometry=geometry, layout=plan.layout, dropout=plan.cfg.lora.dropout, role=plan.role)
    return replace(plan, options=replace(plan.options, add_adapters=add), adapter=sizes)


def freeze_tensors(plan: TrainedPlan) -> TrainedPlan:
    """Exclude tensors from training: the tensors in ``freeze``, and an image tower that is not trained."""
    geometry = plan.spec.geometry
    if plan.adapter is not None or not (patterns := _frozen_tensors(plan.cfg, geometry)):
        return plan
    stop = partial(freeze, geometry=geometry, layout=plan.layout, patterns=patterns)
    return replace(plan, options=replace(plan.options, freeze=stop), trained=trained_names(geometry, patterns))


FEATURES: tuple[Callable[[TrainedPlan], TrainedPlan], ...] = (
    predict_further_tokens,
    train_indexers,
    add_low_rank_adapters,
    freeze_tensors,
)


def _frozen_tensors(group: ActorConfig | CriticConfig, geometry: ModelGeometry) -> list[str]:
    """List names and patterns of the tensors that are not trained, as in model files: ``freeze`` and the image tower."""
    freeze, train = (group.freeze, group.vision.train) if isinstance(group, ActorConfig) else ([], "none")
    vision = FAMILIES[geometry.family].vision
    return freeze if vision is None else [*freeze, *vision.frozen(geometry, train)]


@dataclass(slots=True)
class ModelBuilder:
    """Build the models of a run. A rank builds a model only if it stores a shard of it. Every method is collective over the world.

    ``weights`` maps names in a checkpoint to the directories to load from; other models are loaded from the configuration's paths.
    Models whose axes contain the same ranks share their process groups.
    """

    cfg: Config
    platform: Platform
    weights: Mapping[str, Path] = field(default_factory=dict)
    sharing: DeviceSharing | None = None  # shares the device among the models and the engine; None: among these models
    progress: Callable[[str], None] = lambda text: None  # receives the progress of loading
    _pool: GroupPool = field(init=False)
    _built: list[MegatronModel] = field(default_factory=list)
    _actor: TrainedModel | None = None
    _kept: StepFeatures | None = None

    def __post_init__(self) -> None:
        self.sharing = self.sharing or DeviceSharing(self.platform)
        self._pool = GroupPool(timedelta(seconds=self.cfg.trainer.collective_timeout_s))

    @property
    def _temperature(self) -> float:
        """Return the sampling temperature of policies; 1 for runs on given responses."""
        return self.cfg.rollout.sampling.temperature if run_kind(self.cfg).generates else 1.0

    def release(self) -> None:
        """Release the models that were built so far, because the run has ended or no longer needs them."""
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
            replay_routes(model)
        return Actor(model, self.cfg.rollout.sampling.temperature, algorithm, router_replay=replay)

    def critic(self) -> Critic:
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
        cfg = self.cfg.reward.model
        assert cfg.path is not None
        spec = load_spec(cfg.path, "sequence", "reward.model.path")
        layout = ParallelLayout.of(cfg.layout, cfg.ranks, dist.get_world_size())
        overrides = Overrides.of("reward.model", cfg)
        model = self.frozen(spec, cfg.path, layout, overrides, cfg, name="reward", dtype=cfg.dtype)
        return RewardModel(model)

    def on_examples(self, kind: RunKind, name: str) -> TrainedModel:
        """Build the model of a run on given responses. Each step is one update. ``name`` prefixes the model's metrics."""
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
        updates: MinibatchPlan,
        *,
        name: str,
        saved_as: str,
        dtype: str | None = None,
    ) -> TrainedModel:
        """Build a model with its optimizer. ``name`` prefixes its metrics."""
        layout = ParallelLayout.of(cfg.layout, cfg.ranks, dist.get_world_size())
        role = "critic" if cfg is self.cfg.critic else "actor"
        check_state_dtype(cfg.optimizer, f"{role}.optimizer")
        options = replace(
            self._options(dtype),
            recompute=cfg.recompute,
            trainable=True,
            aux_loss_coef=cfg.moe.aux_loss_coef,
            overrides=Overrides.of(role, cfg),
            expert_bias_rate=cfg.moe.expert_bias_rate,
            trains_tower=isinstance(cfg, ActorConfig) and cfg.vision.train != "none",
        )
        plan = TrainedPlan(role, cfg, spec, layout, options, self._temperature)
        for feature in FEATURES:
            plan = feature(plan)
        loaded_as = saved_as if plan.adapter is None else None  # adapters are saved without their model
        model = self._model(plan.spec, path, layout, plan.options, loaded_as)
        if plan.adapter is not None:
            self._fill_adapters(plan, model, path, self.weights.get(saved_as) or cfg.lora.path)
        if model is not None:
            if cfg.optimizer.name == "muon":
                model.add_optimizer(cfg.optimizer, matrices_of(plan.spec.geometry))
            else:
                model.add_optimizer(cfg.optimizer)
            assert self.sharing is not None
            model.share(self.sharing, saved_as, offloaded_parts(cfg.offload))
        return TrainedModel(
            layout,
            model,
            plan.spec,
            self.cfg.trainer,
            model_flops(plan.spec.geometry),
            optimizer=cfg.optimizer,
            plan=updates,
            name=name,
            trained=plan.trained,
            progress=self.progress,
            adapter=plan.adapter,
            unshared_because=why_unshared(plan.spec.geometry, layout.cp, torch.cuda.is_available()),
        )

    def _fill_adapters(
        self, plan: TrainedPlan, model: MegatronModel | None, path: str, source: str | Path | None
    ) -> None:
        """Load adapters from ``source``; without a source, initialise new adapters."""
        lora, adapters = plan.cfg.lora, replace(plan.spec.geometry, adapter=plan.adapter)
        parameters = model.adapter_parameters() if model is not None else []
        if source is None and lora.init == "pissa":
            pissa = load_plugin("adapters", "pissa", f"{plan.role}.lora.init=pissa")
            pissa.initialize(parameters, adapters, path, self.progress, f"{plan.role}.lora")
            return

        def fill() -> None:
            if source is not None:
                load_adapters(parameters, adapters, source, f"{plan.role}.lora")
                return
            initialize(parameters, adapters, self.cfg.seed)
            if lora.use_dora:
                dora = load_plugin("adapters", "dora", f"{plan.role}.lora.use_dora=true")
                dora.initialize(parameters, adapters, path)

        on_every_rank(fill)

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
        """Build a model without an optimizer. ``saved_as``: its name in checkpoints, or None if it is not saved."""
        model = self._model(spec, path, layout, replace(self._options(dtype), overrides=overrides), saved_as)
        if model is not None and is_offloaded(cfg.offload):
            assert self.sharing is not None
            model.share(self.sharing, name, (WEIGHTS,), by_layer=cfg.offload == "by_layer")
        because = why_unshared(spec.geometry, layout.cp, torch.cuda.is_available())
        return RoleModel(layout, model, spec, self.cfg.trainer, model_flops(spec.geometry), unshared_because=because)

    def _model(
        self, spec: ModelSpec, path: str, layout: ParallelLayout, options: BuildOptions, saved_as: str | None
    ) -> MegatronModel | None:
        """Build a model on the ranks of ``layout``; other ranks return None.

        Its weights are loaded from the checkpoint if it contains ``saved_as``, else from ``path``.
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

        shard_of = locate_tensors(saved or path)

        def fill() -> None:
            reader = HFReader(saved or path, shard_of=shard_of)
            load(parameters, spec.geometry, reader, fresh_head=fresh_head, progress=advance)

        on_every_rank(fill)
        return model

    def _options(self, dtype: str | None) -> BuildOptions:
        """Return the build options of a frozen model. ``dtype``: its dtype; None or auto means ``model.dtype``."""
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
        """Return the image store and the cache of image features; empty if the policy sees no images."""
        if not sees_images(self.cfg.model.path):
            return {}
        self._kept = self._kept or StepFeatures()
        cfg = self.cfg
        return {"images": ImageStore.of(cfg.run_directory, cfg.model.path, cfg.data.image_pixels), "kept": self._kept}


def build_teacher(models: ModelBuilder, actor: Actor, tokenizer: PreTrainedTokenizerBase) -> Teacher:
    """Build the teacher, and set the actor's divergence if it is part of the loss. Collective over the world."""
    cfg, geometry = models.cfg.teacher, actor.model.spec.geometry
    if cfg.divergence != "k1":
        actor.divergence = Divergence(cfg.divergence, cfg.beta, cfg.coef)
    found: dict[str, RoleModel] = {OTHERS: actor.model}
    average = None
    if cfg.weights == "average":
        model = _average(models, actor)
        found, average = {OTHERS: model}, Average(model, actor.model, cfg.decay)
    elif cfg.weights == "path":
        assert cfg.path is not None, "checked"
        paths = {OTHERS: cfg.path, **(cfg.sources or {})}
        found = {source: _of_path(models, path, source) for source, path in paths.items()}
    return Teacher(
        found,
        models.cfg.rollout.sampling.temperature,
        geometry.vocab_size,
        None if cfg.divergence == "k1" else min(cfg.top_k, geometry.vocab_size),
        _context(models.cfg, found, tokenizer),
        average,
    )


def _of_path(models: ModelBuilder, path: str, source: str) -> RoleModel:
    cfg, field = models.cfg.teacher, "teacher.path" if source == OTHERS else f"teacher.sources[{source}]"
    layout = ParallelLayout.of(cfg.layout, cfg.ranks, dist.get_world_size())
    overrides = Overrides.of("teacher", cfg)
    name = SAVED_AS if source == OTHERS else f"{SAVED_AS}[{source}]"
    return models.frozen(load_spec(path, field=field), path, layout, overrides, cfg, name=name, dtype=cfg.dtype)


def _average(models: ModelBuilder, actor: Actor) -> RoleModel:
    """Build a copy of the actor in its layout. The copy is in fp32, because bf16 would round small updates of the average to 0."""
    cfg, spec = models.cfg, load_spec(models.cfg.model.path)
    overrides = Overrides("actor.megatron", cfg.actor.megatron or {})
    dtype = "fp32" if cfg.teacher.dtype in (None, "auto") else cfg.teacher.dtype
    options = {"name": SAVED_AS, "dtype": dtype, "saved_as": SAVED_AS}
    return models.frozen(spec, cfg.model.path, actor.model.layout, overrides, cfg.teacher, **options)


def _context(cfg: Config, models: dict[str, RoleModel], tokenizer: PreTrainedTokenizerBase) -> Context | None:
    if cfg.teacher.context is None:
        return None
    spec, trainer = cfg.teacher.context, cfg.trainer
    positions = min(model.spec.hf_config.max_position_embeddings for model in models.values())
    longest = min(positions, trainer.forward_tokens or 2 * trainer.max_tokens_per_microbatch)
    render = on_every_rank(lambda: PromptContext(spec, tokenizer, longest - cfg.rollout.sampling.max_new_tokens))

    def of_prompts(prompts: Sequence[Prompt]) -> list[list[int]]:
        return on_every_rank(lambda: render(prompts))

    return of_prompts
