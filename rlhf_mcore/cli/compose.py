"""The composition root: build a run with its record from a checked configuration, and train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_mcore.checkpoint.commit import Permissions
from rlhf_mcore.checkpoint.layout import BEST, LATEST
from rlhf_mcore.checkpoint.rng import seed_process
from rlhf_mcore.checkpoint.triggers import SignalRequests
from rlhf_mcore.cli import rank, terminal
from rlhf_mcore.cli.preflight import continues_text, finished_text, is_over
from rlhf_mcore.cli.run_context import RunContext
from rlhf_mcore.cli.saved_checkpoint import SharedChecker, serve
from rlhf_mcore.cli.trainers import TRAINERS
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.questions import has_teacher, role_layouts
from rlhf_mcore.config.resolve import with_sequences
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import with_values
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.observability import rank_file
from rlhf_mcore.observability.alarms import AlarmBell, RewardAlarm
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.prometheus import PrometheusExporter
from rlhf_mcore.observability.run_directory import PROFILE, RunDirectory
from rlhf_mcore.observability.throughput import Throughput, Timers, peak_tflops
from rlhf_mcore.observability.trackers import MultiTracker, build_trackers
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.parallel.collectives import Ask, all_gather_json, broadcast_json, lead, on_every_rank
from rlhf_mcore.planning.inputs import GPUS
from rlhf_mcore.planning.plan import make_plan
from rlhf_mcore.planning.report import out_of_memory
from rlhf_mcore.protocols import Tracker
from rlhf_mcore.redaction import without_secrets
from rlhf_mcore.residency.ledger import OutOfDeviceMemory
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.trainer.inputs import fingerprints
from rlhf_mcore.trainer.loop import TrainingLoop
from rlhf_mcore.trainer.profiler import StepProfiler
from rlhf_mcore.trainer.record import MAX_WARNINGS, SAMPLES_EVERY, RunRecord
from rlhf_mcore.trainer.resume import find_start
from rlhf_mcore.trainer.run_state import Start

SUMMARISED = {
    "evaluate/accuracy": "held-out accuracy",
    "evaluate/reward": "held-out reward",
    "evaluate/margin": "held-out margin",
    "evaluate/perplexity": "held-out perplexity",
}


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run that is ready for its next step. ``trainer`` is None if the last step is already done."""

    cfg: Config
    record: RunRecord
    trainer: TrainingLoop | None
    first_step: int

    def finish(self) -> None:
        """Print the result of the run."""
        if self.record.console is not None:
            _summary(self.cfg, self.record)


def run(cfg: Config, announced: int = 0) -> int:
    """Train. Every rank of the world calls it, under torchrun. Returns the exit code: DONE, REQUEUE or STOPPED.

    ``announced``: the step after which the run continues, if the launcher has already printed it.

    Raises:
        ConfigError: the loaded data or the built models show an error; raised on every rank.
    """
    with open_run(cfg, announced) as opened:
        if opened.trainer is None:
            return terminal.DONE
        finished = opened.trainer.run(cfg.trainer.num_steps, opened.first_step)
        opened.record.close_profile()
        if finished:
            opened.finish()
            return terminal.DONE
        bell = opened.record.bell
        by_alarm = broadcast_json(bell is not None and bool(bell.stopped_by), 0)
        return terminal.STOPPED if by_alarm else terminal.REQUEUE


def build_trainer(run: RunContext) -> TrainingLoop:
    """Build the trainer of a run, and restore the checkpoint that it continues from. Collective over the world.

    Raises:
        ConfigError: the loaded data or the built models show an error; raised on every rank.
    """
    return TRAINERS[run.kind](run)


@contextmanager
def open_run(
    cfg: Config,
    announced: int = 0,
    trackers: Sequence[Tracker] = (),
    on_save: Callable[[int, Path], None] | None = None,
) -> Iterator[OpenRun]:
    """Open a run for the duration of the block. Collective over the world.

    On the first rank, ``trackers`` also receive the metrics, and ``on_save`` is called with step and path of every checkpoint.

    Raises:
        ConfigError: as in ``run``.
    """
    timeout = timedelta(seconds=cfg.trainer.collective_timeout_s)
    with rank.join_world(cfg, timeout) as process, ExitStack() as stack:
        seed_process(cfg.seed, dist.get_rank())
        timers = Timers(process.platform.synchronize)
        sharing = DeviceSharing(process.platform)
        device = process.platform.device_name()
        if run_kind(cfg).generates:
            cfg = _with_sequences(cfg, process.platform.memory_bytes() or 0, device)
        drops = cfg.reward.on_error == "drop"
        record = RunRecord(
            timers,
            cfg.logging.rollouts_every,
            watchdog=process.watchdog,
            memory=sharing,
            alarm=RewardAlarm() if cfg.alarms.defaults else None,
            throughput=Throughput(dist.get_world_size(), cfg.logging.peak_tflops or peak_tflops(device)),
            without_score="are dropped with the other responses to their prompts" if drops else "count as 0",
            mark=process.platform.range,
            samples_every=SAMPLES_EVERY,
            on_save=on_save,
        )
        if dist.get_rank() != 0:
            stack.enter_context(_collect_warnings(record.heard))
        stack.enter_context(explain_out_of_memory(cfg, record, sharing))
        requests = stack.enter_context(SignalRequests(record.acknowledge, rank_file.note_training).listening())
        start = _broadcast(
            on_every_rank(
                lambda: lead(
                    lambda ask: _open_record(cfg, record, stack, announced, trackers, requests, ask), serve, Start()
                )
            )
        )
        if start.is_over:
            assert start.checkpoint is not None
            record.note(finished_text(cfg, start.checkpoint, start.step))
            yield OpenRun(cfg, record, None, start.step + 1)
            return
        if cfg.trainer.profile.steps:
            record.profiler = _profiler(cfg, record, start.step)
        trainer = build_trainer(RunContext(cfg, process.platform, record, start, requests, stack))
        timers.pop()  # discard the times before the first step
        sharing.pop()
        yield OpenRun(cfg, record, trainer, start.step + 1)


@contextmanager
def explain_out_of_memory(cfg: Config, record: RunRecord, sharing: DeviceSharing) -> Iterator[None]:
    """Explain an out-of-memory error in the block by a comparison with the plan.

    Raises:
        OutOfDeviceMemory: instead of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        outside = sharing.outside_bytes()  # before the engine and the models are released
        size = sharing.platform.memory_bytes() or GPUS["H100"].memory_bytes
        plan = make_plan(cfg, dist.get_world_size(), replace(GPUS["H100"], memory_bytes=size))
        raise OutOfDeviceMemory(out_of_memory(plan, record.phase_name, outside, error)) from error


def _with_sequences(cfg: Config, memory_bytes: int, device: str) -> Config:
    """Choose ``rollout.max_num_seqs`` for the smallest device of the run. Collective."""
    rollout = with_sequences(cfg.rollout, memory_bytes, device)
    return with_values(cfg, {"rollout.max_num_seqs": min(all_gather_json(rollout.max_num_seqs))})


@contextmanager
def _collect_warnings(warnings: list[str]) -> Iterator[None]:
    """Collect the ``logging`` warnings of libraries on this rank in ``warnings``, for the first rank to print."""

    class Collector(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            if len(warnings) < MAX_WARNINGS:
                warnings.append(f"{entry.levelname.lower()}: {entry.getMessage()}")

    root, collector = logging.getLogger(), Collector(logging.WARNING)
    # Without another handler Python writes warnings to stderr. Our handler would suppress that, so we add one for stderr.
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
    if all(step <= done for step in cfg.trainer.profile.steps):
        record.note(
            f"trainer.profile.steps={cfg.trainer.profile.steps}: the run continues after step {done}, nothing is profiled"
        )
    number = dist.get_rank()
    roles = [role.name for role in role_layouts(cfg) if role.ranks is None or role.ranks[0] <= number < role.ranks[1]]
    roles += ["engine"] if run_kind(cfg).generates and cfg.rollout.placement == "colocated" else []
    directory = cfg.run_directory.resolve() / PROFILE
    return StepProfiler(cfg.trainer.profile.steps, directory, f"rank {number} ({', '.join(roles)})", record.note)


def _open_record(
    cfg: Config,
    record: RunRecord,
    stack: ExitStack,
    announced: int,
    trackers: Sequence[Tracker],
    requests: SignalRequests,
    ask: Ask,
) -> Start:
    """Lock the run directory, find the starting point of the run, and open its record. Called on the first rank."""
    directory = stack.enter_context(closing(RunDirectory.create(cfg.output_dir, cfg.project, cfg.experiment)))
    checker = SharedChecker(ask, values=cfg.checkpoint.verify, base=cfg.model.path)
    start = find_start(directory.path, cfg.checkpoint, to_yaml(cfg), fingerprints(cfg), checker)
    directory.write_config(to_yaml(cfg), Permissions(cfg.checkpoint.mode).of("config.yaml"))
    notes, over = list(start.notes), False
    if start.checkpoint is not None:
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
    console = Console(
        cfg.logging.console,
        cfg.trainer.num_steps,
        without_secrets(title),
        first_step=start.step,
        every=cfg.logging.every,
    )
    record.console = stack.enter_context(console)
    own = build_trackers(cfg, directory, start.step if start.continues else None, record.note)
    if cfg.logging.prometheus is not None:
        record.exporter = PrometheusExporter(cfg.logging.prometheus, cfg.project, cfg.experiment)
        trackers = [*trackers, record.exporter]
    record.tracker = stack.enter_context(closing(MultiTracker([own, *trackers])))
    for note in notes:
        record.console.note(note)
    return replace(start, is_over=over)


def _broadcast(start: Start) -> Start:
    """Send the first rank's start to every rank, without its notes."""
    weights = {role: str(path) for role, path in start.weights.items()}
    received = broadcast_json([str(start.checkpoint or ""), start.step, weights, start.continues, start.is_over], 0)
    checkpoint, step, weights, continues, over = received
    paths = {role: Path(path) for role, path in weights.items()}
    return Start(Path(checkpoint) if checkpoint else None, step, paths, continues, over, inputs=start.inputs)


def _summary(cfg: Config, record: RunRecord) -> None:
    """Print the final table of a run: metrics before and after, output paths, and a hint if every reward was 0."""
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
    if record.all_zero and not has_teacher(cfg):  # a teacher's gradients need no reward
        footer.append(
            "every reward was 0, so nothing was learned: read rollouts/ in the run directory, and try the reward with "
            "`rlhf-mcore reward-test CONFIG`"
        )
    record.console.summary("result", rows, ("", "before", "after", "change"), footer)
