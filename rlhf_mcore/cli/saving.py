"""Puts together what saves a run and what brings it back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.files.transfer import load
from rlhf_mcore.checkpoint.archive import Archiver
from rlhf_mcore.checkpoint.collective import CheckpointWriter
from rlhf_mcore.checkpoint.delta import readable, verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import tidy
from rlhf_mcore.checkpoint.layout import BEST, checkpoint_path, linked_step
from rlhf_mcore.checkpoint.links import best_rule
from rlhf_mcore.checkpoint.permissions import Permissions
from rlhf_mcore.checkpoint.registry import Registry, Stateful
from rlhf_mcore.checkpoint.retention import Retention
from rlhf_mcore.checkpoint.signals import SignalRequests
from rlhf_mcore.checkpoint.triggers import Triggers
from rlhf_mcore.cli.roles import BuiltRoles
from rlhf_mcore.config.checkpoint_rules import time_left
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.show import to_yaml
from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.mcore.model import rng_tracker_states, set_rng_tracker_states
from rlhf_mcore.parallel.collectives import broadcast_json, on_every_rank
from rlhf_mcore.roles.model import RoleModel, TrainedModel
from rlhf_mcore.roles.role_files import RoleFiles
from rlhf_mcore.trainer.checkpointer import Checkpointer
from rlhf_mcore.trainer.documents import RunState
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.resume import Start

ACTOR, CRITIC, REFERENCE = "actor", "critic", "reference"
SavedRole = tuple[str, RoleModel, str]  # name in a checkpoint, model, where its files that are no weights come from


@dataclass(frozen=True, slots=True)
class Saving:
    """The checkpointer of a run, and the parts of a checkpoint that it is resumed from."""

    checkpointer: Checkpointer
    state: RunState
    roles: list[RoleFiles]
    models: Sequence[SavedRole]

    def resume(self, start: Start) -> list[str]:
        """Restore everything but the weights, which were loaded when the models were built. Collective over the world.

        Returns what the user should know.
        """
        checkpoint = start.checkpoint
        if checkpoint is None:
            return []
        for part in self.roles:
            on_every_rank(lambda part=part: part.load_state(checkpoint))  # type: ignore[misc]
        return on_every_rank(lambda: self.state.load(checkpoint))

    def load_best(self, run: Path, last_step: int, *, hashes: bool) -> int | None:
        """Bring the process to where it was at the best checkpoint: weights, optimizers, counters. Collective over the world.

        Returns its step; None where there is none, and where it is that of the last step.

        Raises:
            ConfigError: it is damaged.
        """

        def find() -> tuple[int, dict[str, str]] | None:
            step = linked_step(run, BEST) if dist.get_rank() == 0 else None
            if step is None or step == last_step:
                return None
            if damage := [
                str(problem) for problem in verify_chain(checkpoint_path(run, step), hashes=hashes) if problem.is_damage
            ]:
                raise ConfigError(
                    f"checkpoint.load_best_model_at_end: checkpoint-{step}, the best one, is damaged ({'; '.join(damage[:3])}); "
                    "the last one is whole, use that"
                )
            checkpoint = checkpoint_path(run, step)
            return step, {name: str(readable(checkpoint, name, run)) for name, _, _ in self.models}

        found = broadcast_json(on_every_rank(find), 0)
        if found is None:
            return None
        step, weights = found
        for name, role, _ in self.models:
            if isinstance(role, TrainedModel):
                self._load_weights(role, weights[name])
        self.resume(Start(checkpoint_path(run, step), step))
        return int(step)

    @staticmethod
    def _load_weights(role: TrainedModel, directory: str) -> None:
        on_every_rank(lambda: load(role.local_parameters(), role.spec.geometry, HFReader(directory)))


def build_saving(
    cfg: Config,
    start: Start,
    models: Sequence[SavedRole],
    holders: Mapping[str, Stateful],
    sampler: Sampler,
    requests: SignalRequests,
    record: RunRecord,
) -> Saving:
    """``holders`` are the objects with a state, beside models and sampler. Collective over the world."""
    run = Path(cfg.output_dir).resolve() / cfg.project / cfg.experiment
    roles = [RoleFiles(name, role, exporter(cfg, role, path)) for name, role, path in models]
    triggers = _triggers(cfg, run, sampler) if dist.get_rank() == 0 else None
    registry, data = Registry(), Registry()
    registry.register("triggers", triggers or _OnFirstRank())
    for name, holder in holders.items():
        registry.register(name, holder)
    data.register("sampler", sampler)
    state = RunState(
        registry, data, to_yaml(cfg), lambda: record.recent, rng_tracker_states, set_rng_tracker_states, start.inputs
    )
    keeper = _Housekeeping(cfg, run, record.note)
    checkpointer = Checkpointer(
        writer=CheckpointWriter(
            run,
            full_every=cfg.checkpoint.full_every if cfg.checkpoint.delta else 1,
            permissions=Permissions(cfg.checkpoint.mode),
        ),
        parts=roles,
        documents=state.documents,
        triggers=triggers,
        requests=requests,
        after_commit=keeper.after_commit,
        at_end=keeper.at_end,
        note=record.note,
        in_background=cfg.checkpoint.async_save,
        stop_on_failure=cfg.checkpoint.on_failed_save == "stop",
    )
    saving = Saving(checkpointer, state, roles, models)
    if cfg.checkpoint.load_best_model_at_end:
        checkpointer.load_best = partial(saving.load_best, run, cfg.trainer.num_steps, hashes=cfg.checkpoint.verify)
    return saving


def saved_roles(cfg: Config, built: BuiltRoles) -> list[SavedRole]:
    """The models in a checkpoint.

    The reference is one of them only if it takes over the actor's weights now and then.
    """
    found: list[SavedRole] = [(ACTOR, built.actor.model, cfg.model.path)]
    if built.critic is not None:
        found.append((CRITIC, built.critic.model, cfg.critic.path or cfg.model.path))
    if built.reference is not None and cfg.reference.refresh_steps:
        found.append((REFERENCE, built.reference.model, cfg.reference.path or cfg.model.path))
    return found


def exporter(cfg: Config, role: RoleModel, path: str) -> Exporter:
    """Writes a role's model; ``path`` is where it came from, for the files that travel with the weights."""
    return Exporter(
        role.local_parameters(),
        role.spec.geometry,
        [path, cfg.model.tokenizer_path or cfg.model.path],
        bucket_bytes=cfg.bridge.bucket_bytes,
        config_updates=role.spec.config_updates,
    )


def _triggers(cfg: Config, run: Path, sampler: Sampler) -> Triggers:
    left = time_left(cfg.checkpoint.save_by, time.time(), os.environ)
    # From here on only the monotonic clock counts: the wall clock may be set during the run.
    ends = None if left is None else time.monotonic() + left
    return Triggers(cfg.checkpoint, cfg.trainer.num_steps, run, ends, num_epochs=lambda: sampler.num_epochs)


class _Housekeeping:
    """What is done on the first rank after a commit, and at the end of a run."""

    def __init__(self, cfg: Config, run: Path, note: Callable[[str], None]):
        self._run, self._note, self._disk = run, note, Disk()
        self._policy = Retention(cfg.checkpoint.save_total_limit, cfg.checkpoint.keep_every, tuple(cfg.checkpoint.keep))
        self._rule = best_rule(cfg.checkpoint)
        archives = cfg.checkpoint.archive and dist.get_rank() == 0
        self._archiver = Archiver(run, self._disk) if archives else None

    def after_commit(self) -> None:
        for line in tidy(self._run, self._policy, self._rule, self._disk, self._archiver):
            self._note(line)

    def at_end(self) -> None:
        """A run that is done waits for its archives; one that is stopped does not, the next one packs them."""
        if self._archiver is not None:
            self._archiver.close()
            for line in self._archiver.take_notes():
                self._note(line)


class _OnFirstRank:
    """Stands for an object that only the first rank has, where the others restore a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key in state:
            _ = state[key]
