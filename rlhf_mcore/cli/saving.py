"""Build the objects that save and restore a run's models and state."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rlhf_mcore.bridge.files.carried import CarriedTensors
from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.hf_files import HFReader, load, locate_tensors
from rlhf_mcore.checkpoint.collective import CheckpointWriter
from rlhf_mcore.checkpoint.commit import Permissions
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import ArchiveHook, Retention, best_rule, tidy
from rlhf_mcore.checkpoint.layout import BEST, checkpoint_path, linked_step
from rlhf_mcore.checkpoint.registry import Registry, Stateful
from rlhf_mcore.checkpoint.triggers import Triggers
from rlhf_mcore.cli.run_context import RunContext
from rlhf_mcore.cli.saved_checkpoint import SharedChecker, serve
from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.config.rules.run import ARCHIVE, DELTAS
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.run import time_left
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.mcore.model import rng_tracker_states, set_rng_tracker_states
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.parallel.collectives import Ask, broadcast_json, lead, on_every_rank, world_group
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.roles.adapters import load_adapters
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.role_files import RoleFiles
from rlhf_mcore.roles.trained_model import TrainedModel
from rlhf_mcore.trainer.checkpointer import RunCheckpointer
from rlhf_mcore.trainer.dealing import ExpectedLengths
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.run_state import RunState, restore_state

if TYPE_CHECKING:
    from rlhf_mcore.trainer.ahead import SamplingAhead


@dataclass(frozen=True, slots=True)
class ModelToSave:
    """A model with its name in checkpoints. ``path``: the directory with its other files, such as the tokenizer."""

    name: str
    model: RoleModel
    path: str


def build_checkpointer(
    run: RunContext,
    models: Sequence[ModelToSave],
    holders: Mapping[str, Stateful],
    sampler: Sampler,
    ahead: SamplingAhead | None = None,
    lengths: ExpectedLengths | None = None,
    room: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> RunCheckpointer:
    """Build the checkpointer of the run, and restore the checkpoint that the run starts from. Collective over the world.

    Args:
        holders: objects with state, in addition to the models and the sampler.
        ahead: samples for later steps; on the first rank only.
        lengths: lengths of the responses so far.
        room: while this context is entered, the engine is not on the device.
    """
    cfg, record, directory = run.cfg, run.record, run.directory
    files = [_role_files(run, saved) for saved in models]
    triggers = _build_triggers(run, sampler) if dist.get_rank() == 0 else None
    state = _run_state(run, {"triggers": triggers or _OnFirstRank(), **holders}, sampler, ahead, lengths)
    keeper = _Housekeeping(cfg, directory, record)
    writer = CheckpointWriter(
        directory,
        deltas=load_plugin(*DELTAS) if cfg.checkpoint.deltas else None,
        full_every=cfg.checkpoint.deltas + 1,
        permissions=Permissions(cfg.checkpoint.mode),
    )
    checkpointer = RunCheckpointer(
        writer=writer,
        parts=files,
        small_files=state.small_files,
        triggers=triggers,
        requests=run.requests,
        after_commit=keeper.after_commit,
        at_end=keeper.at_end,
        note=record.note,
        phase=partial(record.phase, of_step=False),
        progress=record.progress,
        in_background=cfg.checkpoint.async_save,
        stop_on_failure=cfg.checkpoint.on_failed_save == "stop",
        room=room,
    )
    if run.start.checkpoint is None and not cfg.checkpoint.load_best_model_at_end:
        return checkpointer
    restorer = Restorer(directory, state, files, models, room)
    if cfg.checkpoint.load_best_model_at_end:
        checkpointer.load_best = partial(restorer.load_best, cfg.trainer.num_steps, hashes=cfg.checkpoint.verify)
    if run.start.checkpoint is not None:
        with record.phase("load_state"):
            record.progress(shown_path(run.start.checkpoint))
            notes = restorer.resume(run.start.checkpoint)
        for line in notes:
            record.note(line)
    return checkpointer


def _role_files(run: RunContext, saved: ModelToSave) -> RoleFiles:
    """Build the writer of a model's files. Collective over the world."""
    # MTP layers predict tokens, which a model with a scalar head does not use.
    has_tokens = saved.model.spec.geometry.head == "lm" and saved.model.adapter is None
    carried = on_every_rank(partial(CarriedTensors, saved.path, saved.model.spec.geometry)) if has_tokens else None
    if carried is not None and carried.types:
        run.record.note(carried.text(saved.name))
    return RoleFiles(saved.name, saved.model, _exporter(run.cfg, saved, carried))


def _build_triggers(run: RunContext, sampler: Sampler) -> Triggers:
    """Build the triggers that decide when to save, for the first rank."""
    cfg = run.cfg
    remaining_s = time_left(cfg.checkpoint.save_by, time.time(), os.environ)
    # Use only the monotonic clock from here on, because the wall clock may be set during the run.
    ends = None if remaining_s is None else time.monotonic() + remaining_s
    return Triggers(cfg.checkpoint, cfg.trainer.num_steps, run.directory, ends, num_epochs=lambda: sampler.num_epochs)


def _run_state(
    run: RunContext,
    holders: Mapping[str, Stateful],
    sampler: Sampler,
    ahead: SamplingAhead | None,
    lengths: ExpectedLengths | None,
) -> RunState:
    """Register every object that has state."""
    registry, data = Registry(), Registry()
    for name, holder in holders.items():
        registry.register(name, holder)
    data.register("sampler", sampler)
    if lengths is not None:
        data.register("response_lengths", lengths, added_later=True)
    if run.cfg.rollout.placement == "disaggregated" and run.kind.generates:
        data.register("ahead", ahead or _OnFirstRank())
    return RunState(
        registry,
        data,
        to_yaml(run.cfg),
        recent=lambda: run.record.recent,
        generators=rng_tracker_states,
        set_generators=set_rng_tracker_states,
        inputs=run.start.inputs,
        ahead=ahead,
    )


def _exporter(cfg: Config, saved: ModelToSave, carried: CarriedTensors | None) -> Exporter:
    spec, adapters = saved.model.spec, saved.model.adapter_geometry
    with saved.model.on_device():  # the exporter makes views of the tensors on the device
        return Exporter(
            saved.model.local_parameters() if adapters is None else saved.model.adapter_parameters(),
            adapters or spec.geometry,
            [saved.path, cfg.model.tokenizer_path or cfg.model.path],
            world_group(),
            bucket_bytes=cfg.bridge.bucket_bytes,
            adapters_of=None if adapters is None else saved.path,
            dropout=(cfg.critic if saved.name == "critic" else cfg.actor).lora.dropout,
            config_updates=spec.config_updates | (carried.config_updates if carried is not None else {}),
            carried=carried,
        )


class _Housekeeping:
    """Remove or archive old checkpoints on the first rank, after a commit and at the end of a run."""

    def __init__(self, cfg: Config, run: Path, record: RunRecord):
        self._run, self._record, self._disk = run, record, Disk()
        self._policy = Retention(cfg.checkpoint.save_total_limit, cfg.checkpoint.keep_every, tuple(cfg.checkpoint.keep))
        self._rule = best_rule(cfg.checkpoint)
        self._archiver: ArchiveHook | None = None
        if cfg.checkpoint.archive and dist.get_rank() == 0:
            self._archiver = load_plugin(*ARCHIVE)(run, self._disk)

    def after_commit(self, step: int) -> None:
        for line in tidy(self._run, self._policy, self._rule, self._disk, self._archiver):
            self._record.note(line)
        if self._record.on_save is not None:
            self._record.on_save(step, checkpoint_path(self._run, step))

    def at_end(self) -> None:
        """Wait for the archives of a finished run. A stopped run does not wait; the next start packs them."""
        if self._archiver is not None:
            self._archiver.close()
            for line in self._archiver.take_notes():
                self._record.note(line)


class _OnFirstRank:
    """Placeholder on the other ranks for an object that only the first rank has."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in state:
            _ = state[key]


@dataclass(frozen=True, slots=True)
class Restorer:
    """Restore a run to a checkpoint. While ``room`` is entered, the engine is not on the device."""

    directory: Path  # the run directory
    state: RunState
    files: Sequence[RoleFiles]
    models: Sequence[ModelToSave]
    room: Callable[[], AbstractContextManager[None]]

    def resume(self, checkpoint: Path) -> list[str]:
        """Restore everything except the weights, which were loaded when the models were built. Collective over the world.

        Returns notes for the user.
        """
        for part in self.files:
            on_every_rank(partial(part.load_state, checkpoint))
        return on_every_rank(lambda: restore_state(self.state, checkpoint))

    def load_best(self, last_step: int, *, hashes: bool) -> int | None:
        """Restore the best checkpoint: weights, optimizers, counters. Collective over the world.

        Returns its step, or None if there is no best checkpoint or it is the last step's.

        Raises:
            ConfigError: the checkpoint is damaged.
        """
        found = on_every_rank(lambda: lead(lambda ask: self._find_best(last_step, hashes, ask), serve, None))
        best = broadcast_json(found, 0)
        if best is None:
            return None
        step, weights = best
        # Entering room scores pending canary samples with the old weights; leaving it sends the best weights to the engines.
        with self.room():
            for saved in self.models:
                if isinstance(saved.model, TrainedModel):
                    _load_weights(saved.model, weights[saved.name])
            self.resume(checkpoint_path(self.directory, step))
        return int(step)

    def _find_best(self, last_step: int, hashes: bool, ask: Ask) -> tuple[int, dict[str, str]] | None:
        """Return the best step, and for each model the directory with its weights. Called on the first rank."""
        step = linked_step(self.directory, BEST)
        if step is None or step == last_step:
            return None
        checkpoint = checkpoint_path(self.directory, step)
        checker = SharedChecker(ask, values=False)
        problems = checker.verify(checkpoint, hashes=hashes)
        if damage := [problem for problem in problems if problem.is_damage]:
            raise ConfigError(
                f"checkpoint.load_best_model_at_end: checkpoint-{step}, the best one, is damaged ({join_first(damage, 3)}); "
                "the last one is whole, use that"
            )
        names = [model.name for model in self.models]
        return step, {name: str(checker.readable(checkpoint, name, self.directory)) for name in names}


def _load_weights(model: RoleModel, directory: str) -> None:
    """Load weights or adapters. Collective over the world."""
    parameters = model.local_parameters() if model.adapter is None else model.adapter_parameters()
    if model.model is not None:  # offloaded tensors are loaded into their copy on the host
        parameters = [replace(each, tensor=model.model.movable.current(each.tensor)) for each in parameters]
    if (adapters := model.adapter_geometry) is not None:
        on_every_rank(lambda: load_adapters(parameters, adapters, directory))
    else:
        shard_of = locate_tensors(directory)
        on_every_rank(lambda: load(parameters, model.spec.geometry, HFReader(directory, shard_of=shard_of)))
