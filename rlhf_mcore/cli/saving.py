"""From a run's models and its objects with a state to what saves them, and what brings them back."""

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
from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.files.transfer import load
from rlhf_mcore.checkpoint.collective import CheckpointWriter
from rlhf_mcore.checkpoint.commit import Permissions
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import tidy
from rlhf_mcore.checkpoint.layout import BEST, checkpoint_path, linked_step
from rlhf_mcore.checkpoint.links import best_rule
from rlhf_mcore.checkpoint.registry import Registry, Stateful
from rlhf_mcore.checkpoint.retention import Retention
from rlhf_mcore.checkpoint.triggers import Triggers
from rlhf_mcore.cli.run_context import RunContext
from rlhf_mcore.config.errors import ConfigError, shortened
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.run import time_left
from rlhf_mcore.config.show import to_yaml
from rlhf_mcore.data.sampler import ResumableSampler
from rlhf_mcore.mcore.model import rng_tracker_states, set_rng_tracker_states
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.parallel.collectives import broadcast_json, on_every_rank, world_group
from rlhf_mcore.roles.model import RoleModel, TrainedModel
from rlhf_mcore.roles.role_files import RoleFiles
from rlhf_mcore.trainer.checkpointer import RunCheckpointer
from rlhf_mcore.trainer.dealing import ExpectedLengths
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.resume import Start
from rlhf_mcore.trainer.run_state import RunState

if TYPE_CHECKING:
    from rlhf_mcore.checkpoint.archive import Archiver
    from rlhf_mcore.trainer.ahead import SamplingAhead


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A model under its name in checkpoints. ``path``: the source of its files beside the weights."""

    name: str
    model: RoleModel
    path: str


@dataclass(frozen=True, slots=True)
class Restorer:
    """Brings a run to where it was at a checkpoint."""

    directory: Path  # of the run
    state: RunState
    files: list[RoleFiles]
    models: Sequence[SavedModel]

    def resume(self, start: Start) -> list[str]:
        """Restore everything but the weights, which were loaded when the models were built. Collective over the world.

        Returns what the user should know.
        """
        checkpoint = start.checkpoint
        if checkpoint is None:
            return []
        for part in self.files:
            on_every_rank(partial(part.load_state, checkpoint))
        return on_every_rank(lambda: self.state.load(checkpoint))

    def load_best(self, last_step: int, *, hashes: bool) -> int | None:
        """Restore the best checkpoint: weights, optimizers, counters. Collective over the world.

        Returns its step; None where there is none, and where it is that of the last step.

        Raises:
            ConfigError: it is damaged.
        """
        run = self.directory

        def find() -> tuple[int, dict[str, str]] | None:
            step = linked_step(run, BEST) if dist.get_rank() == 0 else None
            if step is None or step == last_step:
                return None
            from rlhf_mcore.checkpoint.delta import readable, verify_chain

            problems = verify_chain(checkpoint_path(run, step), hashes=hashes)
            if damage := [problem for problem in problems if problem.is_damage]:
                raise ConfigError(
                    f"checkpoint.load_best_model_at_end: checkpoint-{step}, the best one, is damaged ({shortened(damage, 3)}); "
                    "the last one is whole, use that"
                )
            checkpoint = checkpoint_path(run, step)
            return step, {model.name: str(readable(checkpoint, model.name, run)) for model in self.models}

        found = broadcast_json(on_every_rank(find), 0)
        if found is None:
            return None
        step, weights = found
        for saved in self.models:
            if isinstance(saved.model, TrainedModel):
                on_every_rank(partial(_load_weights, saved.model, weights[saved.name]))
        self.resume(Start(checkpoint_path(run, step), step))
        return int(step)


def _load_weights(model: RoleModel, directory: str) -> None:
    parameters = model.local_parameters()
    if model.model is not None:  # what is not on the device is loaded into its copy on the host
        parameters = [replace(held, tensor=model.model.movable.current(held.tensor)) for held in parameters]
    load(parameters, model.spec.geometry, HFReader(directory))


def build_checkpointer(
    run: RunContext,
    models: Sequence[SavedModel],
    holders: Mapping[str, Stateful],
    sampler: ResumableSampler,
    ahead: SamplingAhead | None = None,
    lengths: ExpectedLengths | None = None,
    room: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> RunCheckpointer:
    """What saves the run from here on, after everything was restored from the checkpoint that it begins with.

    ``holders`` are the objects with a state, beside models and sampler; ``ahead`` is what is sampled for coming steps, on the first
    rank; ``lengths`` are those of the responses so far; others leave the device while ``room`` is entered. Collective over the world.
    """
    cfg, record, directory = run.cfg, run.record, run.directory
    files = []
    for saved in models:
        # MTP layers predict tokens from hidden states, which a scalar head has no use for.
        has_tokens = saved.model.spec.geometry.head == "lm"
        carried = on_every_rank(partial(CarriedTensors, saved.path, saved.model.spec.geometry)) if has_tokens else None
        if carried is not None and carried.types:
            record.note(carried.text(saved.name))
        files.append(RoleFiles(saved.name, saved.model, _exporter(cfg, saved, carried)))
    triggers = None
    if dist.get_rank() == 0:
        left = time_left(cfg.checkpoint.save_by, time.time(), os.environ)
        # From here on only the monotonic clock counts: the wall clock may be set during the run.
        ends = None if left is None else time.monotonic() + left
        num_steps = cfg.trainer.num_steps
        triggers = Triggers(cfg.checkpoint, num_steps, directory, ends, num_epochs=lambda: sampler.num_epochs)
    registry, data = Registry(), Registry()
    registry.register("triggers", triggers or _OnFirstRank())
    for name, holder in holders.items():
        registry.register(name, holder)
    data.register("sampler", sampler)
    if lengths is not None:
        data.register("response_lengths", lengths, added_later=True)
    if cfg.rollout.placement == "disaggregated" and run.kind.generates:
        data.register("ahead", ahead or _OnFirstRank())
    state = RunState(
        registry,
        data,
        to_yaml(cfg),
        recent=lambda: record.recent,
        generators=rng_tracker_states,
        set_generators=set_rng_tracker_states,
        inputs=run.start.inputs,
        ahead=ahead,
    )
    restorer = Restorer(directory, state, files, models)

    def load_best() -> int | None:
        with room():  # what engines have drawn is compared with the weights that they have
            return restorer.load_best(cfg.trainer.num_steps, hashes=cfg.checkpoint.verify)

    keeper = _Housekeeping(cfg, directory, record)
    checkpointer = RunCheckpointer(
        writer=CheckpointWriter(
            directory,
            full_every=cfg.checkpoint.full_every if cfg.checkpoint.delta else 1,
            permissions=Permissions(cfg.checkpoint.mode),
        ),
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
        load_best=load_best if cfg.checkpoint.load_best_model_at_end else lambda: None,
    )
    if run.start.checkpoint is not None:
        with record.phase("load_state"):
            record.progress(shown_path(run.start.checkpoint))
            notes = restorer.resume(run.start)
        for line in notes:
            record.note(line)
    return checkpointer


def _exporter(cfg: Config, saved: SavedModel, carried: CarriedTensors | None) -> Exporter:
    spec = saved.model.spec
    with saved.model.on_device():  # views are made of what is there
        return Exporter(
            saved.model.local_parameters(),
            spec.geometry,
            [saved.path, cfg.model.tokenizer_path or cfg.model.path],
            world_group(),
            bucket_bytes=cfg.bridge.bucket_bytes,
            config_updates=spec.config_updates | (carried.config_updates if carried is not None else {}),
            carried=carried,
        )


class _Housekeeping:
    """What is done on the first rank after a commit, and at the end of a run."""

    def __init__(self, cfg: Config, run: Path, record: RunRecord):
        self._run, self._record, self._disk = run, record, Disk()
        self._policy = Retention(cfg.checkpoint.save_total_limit, cfg.checkpoint.keep_every, tuple(cfg.checkpoint.keep))
        self._rule = best_rule(cfg.checkpoint)
        self._archiver: Archiver | None = None
        if cfg.checkpoint.archive and dist.get_rank() == 0:
            from rlhf_mcore.checkpoint.archive import Archiver

            self._archiver = Archiver(run, self._disk)

    def after_commit(self, step: int) -> None:
        for line in tidy(self._run, self._policy, self._rule, self._disk, self._archiver):
            self._record.note(line)
        if self._record.on_save is not None:
            self._record.on_save(step, checkpoint_path(self._run, step))

    def at_end(self) -> None:
        """A run that is done waits for its archives; one that is stopped does not, the next one packs them."""
        if self._archiver is not None:
            self._archiver.close()
            for line in self._archiver.take_notes():
                self._record.note(line)


class _OnFirstRank:
    """Stands for an object that only the first rank has, where the others restore a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in state:
            _ = state[key]
