"""The composition root: from a checked configuration to a run with a record, which begins, trains and ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rlhf_mcore.checkpoint.commit import Permissions
from rlhf_mcore.checkpoint.layout import BEST, LATEST
from rlhf_mcore.checkpoint.rng import seed_process
from rlhf_mcore.checkpoint.triggers import SignalRequests
from rlhf_mcore.cli import exit_codes, rank
from rlhf_mcore.cli.run_context import RunContext
from rlhf_mcore.cli.trainers import rl_trainer
from rlhf_mcore.config.implied import has_teacher, role_layouts
from rlhf_mcore.config.run_kinds import DPO, REWARD_MODEL, RL, SFT, run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.show import to_yaml, without_secrets
from rlhf_mcore.observability.alarms import AlarmBell, RewardAlarm
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.run_directory import PROFILE, RunDirectory
from rlhf_mcore.observability.throughput import Throughput, peak_tflops
from rlhf_mcore.observability.timers import Timers
from rlhf_mcore.observability.trackers import MultiTracker, build_trackers
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.parallel.collectives import broadcast_json, on_every_rank
from rlhf_mcore.protocols import Tracker
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.trainer.inputs import fingerprints
from rlhf_mcore.trainer.loop import Trainer
from rlhf_mcore.trainer.record import MAX_WARNINGS, RunRecord
from rlhf_mcore.trainer.resume import find_start
from rlhf_mcore.trainer.run_state import Start

if TYPE_CHECKING:
    from rlhf_mcore.trainer.profiler import StepProfiler

SUMMARISED = {
    "evaluate/accuracy": "held-out accuracy",
    "evaluate/reward": "held-out reward",
    "evaluate/margin": "held-out margin",
    "evaluate/perplexity": "held-out perplexity",
}


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that is ready for its next step. ``trainer`` is None where the last step was made already."""

    cfg: Config
    record: RunRecord
    trainer: Trainer | None
    first_step: int

    def finish(self) -> None:
        """Print what the run has come to."""
        if self.record.console is not None:
            _summary(self.cfg, self.record)


def run(cfg: Config, announced: int = 0) -> int:
    """Train. Every rank of the world calls it, under torchrun. Returns the exit code: DONE, REQUEUE or STOPPED.

    ``announced``: the step after which the run continues, where the launcher has printed it already.

    Raises:
        ConfigError: found in the loaded data or the built models; raised on every rank.
    """
    with opened(cfg, announced) as open_run:
        if open_run.trainer is None:
            return exit_codes.DONE
        finished = open_run.trainer.run(cfg.trainer.num_steps, open_run.first_step)
        open_run.record.close_profile()
        if finished:
            open_run.finish()
            return exit_codes.DONE
        bell = open_run.record.bell
        by_alarm = broadcast_json(bell is not None and bool(bell.stopped_by), 0)
        return exit_codes.STOPPED if by_alarm else exit_codes.REQUEUE


def build_trainer(run: RunContext) -> Trainer:
    """Build the trainer of a run, resumed where it begins after a checkpoint. Collective over the world.

    Raises:
        ConfigError: what only the loaded data and the built models can show; raised on every rank.
    """
    if run.kind is RL:
        return rl_trainer(run)
    from rlhf_mcore.cli import example_trainers

    builders = {
        SFT: example_trainers.sft_trainer,
        REWARD_MODEL: example_trainers.reward_model_trainer,
        DPO: example_trainers.preference_trainer,
    }
    return builders[run.kind](run)


@contextmanager
def opened(
    cfg: Config,
    announced: int = 0,
    trackers: Sequence[Tracker] = (),
    on_save: Callable[[int, Path], None] | None = None,
) -> Iterator[OpenRun]:
    """Open a run between its beginning and its end. Collective over the world.

    On the first rank ``trackers`` get its metrics too, and ``on_save`` every checkpoint that is whole.

    Raises:
        ConfigError: as ``run``.
    """
    timeout = timedelta(seconds=cfg.trainer.collective_timeout_s)
    with rank.in_world(cfg, timeout) as process, ExitStack() as stack:
        seed_process(cfg.seed, dist.get_rank())
        timers = Timers(process.platform.synchronize)
        sharing = DeviceSharing(process.platform)
        record = RunRecord(timers, cfg.logging.rollouts_every, watchdog=process.watchdog, memory=sharing)
        device = torch.cuda.get_device_name() if process.platform.name == "cuda" else ""
        record.on_save = on_save
        record.throughput = Throughput(dist.get_world_size(), cfg.logging.peak_tflops or peak_tflops(device))
        record.alarm = RewardAlarm() if cfg.alarms.defaults else None
        if cfg.reward.on_error == "drop":
            record.without_score = "leave the step, with the other responses to their prompts"
        record.mark, record.samples_every = process.platform.range, cfg.logging.samples
        if dist.get_rank() != 0:
            stack.enter_context(_collect_warnings(record.heard))
        requests = stack.enter_context(SignalRequests(record.acknowledge, process.reporter.training).listening())
        start = _broadcast(on_every_rank(lambda: _open_record(cfg, record, stack, announced, trackers, requests)))
        if start.is_over:
            from rlhf_mcore.cli.continuing import finished_text

            assert start.checkpoint is not None
            record.note(finished_text(cfg, start.checkpoint, start.step))
            yield OpenRun(cfg, record, None, start.step + 1)
            return
        if cfg.trainer.profile.steps:
            record.profiler = _profiler(cfg, record, start.step)
        trainer = build_trainer(RunContext(cfg, process.platform, record, start, requests, stack))
        timers.pop()  # of the phases before the first step
        sharing.pop()
        yield OpenRun(cfg, record, trainer, start.step + 1)


@contextmanager
def _collect_warnings(warnings: list[str]) -> Iterator[None]:
    """Collect in ``warnings`` what libraries warn of by ``logging`` on this rank, for the first rank to show."""

    class Collector(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            if len(warnings) < MAX_WARNINGS:
                warnings.append(f"{entry.levelname.lower()}: {entry.getMessage()}")

    root, collector = logging.getLogger(), Collector(logging.WARNING)
    # Without any handler Python itself would write to stderr.
    own = [collector] if root.handlers else [collector, logging.StreamHandler()]
    for handler in own:
        handler.setLevel(logging.WARNING)
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in own:
            root.removeHandler(handler)


def _profiler(cfg: Config, record: RunRecord, done: int) -> StepProfiler:
    from rlhf_mcore.trainer.profiler import StepProfiler

    if all(step <= done for step in cfg.trainer.profile.steps):
        record.note(
            f"trainer.profile.steps={cfg.trainer.profile.steps}: the run continues after step {done}, nothing is profiled"
        )
    number = dist.get_rank()
    roles = [role.name for role in role_layouts(cfg) if role.ranks is None or role.ranks[0] <= number < role.ranks[1]]
    roles += ["engine"] if run_kind(cfg).generates and cfg.rollout.placement == "colocated" else []
    directory = Path(cfg.output_dir).resolve() / cfg.project / cfg.experiment / PROFILE
    return StepProfiler(cfg.trainer.profile.steps, directory, f"rank {number} ({', '.join(roles)})", record.note)


def _open_record(
    cfg: Config,
    record: RunRecord,
    stack: ExitStack,
    announced: int,
    trackers: Sequence[Tracker],
    requests: SignalRequests,
) -> Start:
    """Take the run directory, find out where the run begins, and open its record there. On the first rank."""
    if dist.get_rank() != 0:
        return Start()
    directory = stack.enter_context(closing(RunDirectory.create(cfg.output_dir, cfg.project, cfg.experiment)))

    def check(checkpoint: Path, weights: Mapping[str, Path]) -> None:
        from rlhf_mcore.cli.saved_checkpoint import check_saved  # a run that begins reads no checkpoint

        check_saved(checkpoint, weights, values=cfg.checkpoint.verify, base=cfg.model.path)

    start = find_start(directory.path, cfg.checkpoint, to_yaml(cfg), fingerprints(cfg), check)
    directory.write_config(to_yaml(cfg), Permissions(cfg.checkpoint.mode).of("config.yaml"))
    notes, over = list(start.notes), False
    if start.checkpoint is not None:
        from rlhf_mcore.cli.continuing import continues_text, is_over

        over = start.continues and is_over(cfg, directory.path, start.step)
        if start.step != announced and not over:
            notes.insert(0, continues_text(cfg, start.checkpoint, start.step))
    run_name = without_secrets(f"{cfg.project}/{cfg.experiment}")
    bell = AlarmBell(cfg.alarms, run_name, record.note, requests.request_save, requests.request_stop)
    record.bell = stack.enter_context(closing(bell))
    if start.continues:
        directory.cut_metrics(start.step)
        record.recall(directory.records())
    elif (earlier := directory.set_aside_metrics()) is not None:
        notes.append(f"metrics of an earlier run are in {shown_path(earlier)}")
    record.directory = directory
    title = f"{cfg.project} / {cfg.experiment}"
    console = Console(cfg.logging.console, cfg.trainer.num_steps, without_secrets(title), first_step=start.step)
    record.console = stack.enter_context(console)
    own = build_trackers(cfg, directory, start.step if start.continues else None, record.note)
    if cfg.logging.prometheus is not None:
        from rlhf_mcore.observability.prometheus import Exporter

        record.exporter = Exporter(cfg.logging.prometheus, cfg.project, cfg.experiment)
        trackers = [*trackers, record.exporter]
    record.tracker = stack.enter_context(closing(MultiTracker([own, *trackers])))
    for note in notes:
        record.console.note(note)
    return replace(start, is_over=over)


def _broadcast(start: Start) -> Start:
    """Send the first rank's start to every rank. Notes stay there."""
    weights = {role: str(path) for role, path in start.weights.items()}
    received = broadcast_json([str(start.checkpoint or ""), start.step, weights, start.continues, start.is_over], 0)
    checkpoint, step, weights, continues, over = received
    paths = {role: Path(path) for role, path in weights.items()}
    return Start(Path(checkpoint) if checkpoint else None, step, paths, continues, over, inputs=start.inputs)


def _summary(cfg: Config, record: RunRecord) -> None:
    """Print the table that a run ends with: before and after, where everything is, and what to try next."""
    assert record.console is not None and record.directory is not None
    rows: list[tuple[str, ...]] = []
    for name, values in (("training reward", record.rewards), ("training loss", record.losses)):
        if values:
            few = max(len(values) // 10, 1)
            first, last = sum(values[:few]) / few, sum(values[-few:]) / few
            label = f"{name} (mean of {few} steps)" if few > 1 else f"{name} (first and last step)"
            rows.append((label, f"{first:z.3f}", f"{last:z.3f}", f"{last - first:+z.3f}"))
    if len(record.evaluations) > 1:
        before, after = record.evaluations[min(record.evaluations)], record.evaluations[max(record.evaluations)]
        for name, label in SUMMARISED.items():
            if name in before and name in after:
                change = f"{after[name] - before[name]:+z.3f}"
                rows.append((label, f"{before[name]:z.3f}", f"{after[name]:z.3f}", change))
    directory = shown_path(record.directory.path)
    chosen = BEST if cfg.checkpoint.load_best_model_at_end else LATEST
    kind = "a Hugging Face directory" if cfg.actor.lora.rank is None else "a PEFT directory of adapters"
    footer = [
        f"run directory   {directory}",
        f"trained model   {directory}/{chosen}/{run_kind(cfg).saved_as}  ({kind})",
        f"report          rlhf-mcore report {directory}",
    ]
    if record.all_zero and not has_teacher(cfg):  # whose gradients need no reward
        footer.append(
            "every reward was 0, so nothing was learned: read rollouts/ in the run directory, and try the reward with "
            "`rlhf-mcore reward-test CONFIG`"
        )
    record.console.summary("result", rows, ("", "before", "after", "change"), footer)
