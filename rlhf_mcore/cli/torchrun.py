"""Run torchrun, print one message for the cause of a failed run, return its exit code, and watch the ranks' progress.

Ctrl-C ends a run at once before its first step. During training the ranks finish the step and save; a second Ctrl-C ends the run
at once. Requests to save (SIGUSR1, SIGUSR2, SIGTERM) are forwarded to the ranks, which save between steps. Other signals end the
run. If the ranks save nothing, SIGTERM ends the run too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from rlhf_mcore.cli.exit_codes import (
    DONE,
    FAILED,
    INTERRUPTED,
    REQUEUE,
    STOPPED,
    USER_ERROR,
    full_disks_here,
    report_of_tool,
    to_shell_code,
)
from rlhf_mcore.cli.launch import SHOWN, UNSAVED
from rlhf_mcore.cli.terminal import say, working
from rlhf_mcore.config.errors import printable
from rlhf_mcore.observability.files import FULL, full_disks
from rlhf_mcore.observability.rank_file import CONSEQUENCE, USER, VARIABLE, RankFiles
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.own_processes import STARTED_BY, children, end_all, end_with_parent, has_ended, signal_name

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

HELD = (signal.SIGUSR1, signal.SIGUSR2)
FORWARDED = (*HELD, signal.SIGTERM)  # to the ranks
LINES, MAX_LINE, MAX_TAIL_BYTES = 20, 200, 1 << 16  # limits for the printed end of a killed rank's log
ENDING = ("SIGHUP", "SIGQUIT")
# Messages for a Ctrl-C before the first step.
INTERRUPTED_IN = {
    "rlhf_mcore.cli.train": "ended before the first step; there was nothing to save",
    "rlhf_mcore.commands.evaluate.command": "scored prompts are kept; the same command continues",
}
_STACKS_S = 2.0  # time for the ranks to print their stacks


def main(argv: Sequence[str]) -> int:
    """Run torchrun with ``argv``.

    Returns 0 if every rank has finished the run, the exit code of the first failure, or 128 + N after signal N.
    """
    end_with_parent(signal.SIGHUP)
    agent = Agent(RankFiles(has_ended))
    os.environ[STARTED_BY] = str(os.getpid())
    agent.saves = UNSAVED not in argv
    agent.handle_signals()
    is_shown, argv = SHOWN in argv, [word for word in argv if word not in (SHOWN, UNSAVED)]

    def show(what: str) -> contextlib.AbstractContextManager[object]:
        return working(what, console=Console()) if is_shown else contextlib.nullcontext()

    with show("importing torchrun"):
        from rlhf_mcore.cli import forked_ranks, rendezvous

        rendezvous.register()
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch
        from torch.distributed.run import config_from_args, parse_args

    # torchrun reports the end of every worker as an error, even a requested end. This module prints failures with their ranks.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    args = parse_args([f"--signals-to-handle={','.join(ENDING)}", *argv])
    agent.module = args.training_script
    with show("importing Megatron-core and the engine"):
        are_forks = forked_ranks.preload(agent.module, args.training_script_args)
    if are_forks:
        forked_ranks.fork_ranks()
    agent.log_dir = Path(args.log_dir) if args.log_dir else None
    agent.ranks.watch(agent.stalled)
    try:
        config, command, arguments = config_from_args(args)
        assert config.logs_specs is not None, "made from args"
        config.logs_specs = with_files_in_memory(config.logs_specs, agent.ranks)
        elastic_launch(config, command)(*arguments)
    except SignalException as ended:  # torchrun has ended the workers with the same signal
        return to_shell_code(-ended.sigval)
    except ChildFailedError as error:
        return agent.report(error.failures)
    except OSError as error:  # torchrun creates folders and files for the ranks' logs
        if error.errno not in FULL:
            raise
        return report_of_tool(error)
    except rendezvous.RendezvousError as error:
        say(f"error: {error}", file=sys.stderr)
        return error.code
    return agent.check_done()


def with_files_in_memory(logs: LogsSpecs, ranks: RankFiles) -> LogsSpecs:
    """Return torchrun's ``logs`` with the in-memory error files of ``ranks``."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class FilesInMemory(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return logs.root_log_dir

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            made = logs.reify(envs)
            for local_rank, environment in envs.items():
                made.error_files[local_rank] = environment[VARIABLE] = ranks.make(local_rank)
            return made

    return FilesInMemory()


class Agent:
    """The supervisor of this process's ranks: it handles signals and reports failures."""

    def __init__(self, ranks: RankFiles) -> None:
        self.ranks = ranks
        self.log_dir: Path | None = None
        self.module = ""  # the module that the ranks run
        self.saves = True  # whether the ranks save on request
        self._interrupted = False

    def handle_signals(self) -> None:
        """Handle the signals that torchrun should not handle, from now on."""
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._terminate)
        forward_signals()

    def report(self, failures: Mapping[int, ProcessFailure]) -> int:
        """Print the cause of the end of the run, once. Returns the exit code.

        The cause is the first reported error that is not a consequence of another rank's end. Without one, it is a killed rank, then
        a rank that ended early without an error, then torchrun's first failure.
        """
        errors = {number: told for number, told in self.ranks.read().items() if "kind" in told}
        own = {number: told for number, told in errors.items() if told["kind"] != CONSEQUENCE}
        if own:
            cause = min(own, key=lambda number: own[number]["time"])
            self._say(own[cause]["message"], cause)
            # Use the reported kind, because torchrun may have ended the rank before it could exit.
            return USER_ERROR if own[cause]["kind"] == USER else FAILED
        rank, failure = find_first_failure({n: each for n, each in failures.items() if n not in errors} or failures)
        if failure.exitcode in (REQUEUE, STOPPED):
            return failure.exitcode
        if rank not in errors:
            self._say(
                f"rank {rank} {_describe_exit(failure.exitcode)}{self._full_disks()}",
                rank,
                failure.local_rank,
                tail=True,
            )
        elif left := [number for number in self._unfinished() if number not in failures]:
            self._say(_LEFT.format(left[0]), left[0])
        else:
            self._say(errors[rank]["message"], rank)
        return to_shell_code(failure.exitcode)

    def check_done(self) -> int:
        """Return exit code 0 only if all ranks have finished the run."""
        if unfinished := self._unfinished():
            self._say(_LEFT.format(unfinished[0]), unfinished[0])
            return FAILED
        return DONE

    def _unfinished(self) -> list[int]:
        """List the ranks that have started and have not reported the end of the run."""
        return sorted(number for number, told in self.ranks.read().items() if not told.get("done"))

    def stalled(self, message: str, blamed: list[int]) -> None:
        """End a run that makes no progress. Does not return."""
        for pid in children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGQUIT)  # the ranks print their stacks
        time.sleep(_STACKS_S)
        self._say(f"{message}; the stacks of the ranks that could print them are in their logs", blamed[0])
        end_all(children())
        os._exit(FAILED)

    def log_of(self, rank: int, local_rank: int | None = None) -> Path | None:
        """Return the file of a rank's stderr, if it goes to one."""
        if local_rank is None:
            local_rank = self.ranks.read()[rank]["local_rank"]
        logs = list(self.log_dir.glob(f"*/attempt_*/{local_rank}/stderr.log")) if self.log_dir else []
        return max(logs, key=lambda path: path.stat().st_mtime, default=None)

    def _full_disks(self) -> str:
        return full_disks_here() or full_disks([self.log_dir] if self.log_dir else [])

    def _say(self, text: str, rank: int, local_rank: int | None = None, *, tail: bool = False) -> None:
        log = self.log_of(rank, local_rank)
        told = self.ranks.read().get(rank)
        phase = "" if told is None else f" in phase {told['phase']}"
        lines = [f"error: {text}"]
        if log is not None:
            lines += read_last_lines(log) if tail else []
            lines.append(f"(rank {rank}{phase}; its log: {shown_path(log)})")
        else:
            lines.append(f"(rank {rank}{phase})")
        say("\n".join(lines), file=sys.stderr)

    def _terminate(self, number: int, _frame: FrameType | None) -> None:
        # torchrun ends ranks with SIGTERM. A SIGTERM from outside requests a save, as SIGUSR1 does.
        if self.saves:
            os.kill(os.getpid(), signal.SIGUSR1)
            return
        end_all(children())
        os._exit(128 + number)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.ranks.is_training() and not self._interrupted:
            self._interrupted = True
            _forward(signal.SIGINT)
            return
        end_all(children())
        again = "interrupted again: ended at once; earlier checkpoints are complete\n"
        first = f"interrupted: {INTERRUPTED_IN.get(self.module, 'ended')}\n"
        start = "\n" if os.isatty(2) else ""  # on a terminal this line already shows ^C or the edge of the live display
        os.write(2, (start + (again if self._interrupted else first)).encode())
        os._exit(INTERRUPTED)


_LEFT = "rank {} ended with exit code 0 before the run was done; does code that the run calls use sys.exit or os._exit?"


def find_first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank and the failure of the worker that failed first. Workers that torchrun then ended by SIGTERM do not count."""
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM}
    return min((causes or failures).items(), key=lambda item: item[1].timestamp)


def forward_signals() -> None:
    """Forward SIGUSR1 and SIGUSR2 to the workers from now on. A signal that arrives before a worker exists is kept until then.

    This process blocks both signals, and workers inherit the block. A signal to a starting worker is therefore pending until the
    worker listens, and does not end it. SIGTERM is not blocked, because torchrun ends workers with it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)

    def wait() -> None:
        while True:
            number = signal.sigwait(HELD)
            while not list(children()):
                time.sleep(0.1)
            _forward(number)

    threading.Thread(target=wait, daemon=True).start()


def read_last_lines(log: Path) -> list[str]:
    """Return the last lines of a rank's stderr, with control characters escaped."""
    try:
        with log.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - MAX_TAIL_BYTES, 0))
            lines = file.read(MAX_TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [f"    {printable(line[:MAX_LINE])}" for line in lines[-LINES:]]


def _describe_exit(exitcode: int) -> str:
    if exitcode == -signal.SIGKILL:
        return "was ended by SIGKILL (the kernel does that when memory runs out: see dmesg)"
    return f"was ended by {signal_name(-exitcode)}" if exitcode < 0 else f"ended with exit code {exitcode}"


def _forward(number: int) -> None:
    for child in children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
