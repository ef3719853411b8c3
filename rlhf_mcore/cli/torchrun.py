"""torchrun with one message for whatever ends a run, the exit code of its cause, and an eye on the ranks' progress.

Ctrl-C ends a run at once unless it trains; then the ranks finish the step and save, and a second one ends it at once. Requests
to save (SIGUSR1, SIGUSR2, SIGTERM) go to the ranks, and are answered between steps. Other signals end the run, and so does SIGTERM
where ranks save nothing.
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
from rlhf_mcore.cli.rank_files import RankFiles
from rlhf_mcore.cli.terminal import say, working
from rlhf_mcore.config.errors import printable
from rlhf_mcore.observability.files import FULL, full_disks
from rlhf_mcore.observability.rank_file import CONSEQUENCE, USER, VARIABLE
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.own_processes import STARTED_BY, children, end_all, end_with_parent, has_ended, signal_name

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

HELD = (signal.SIGUSR1, signal.SIGUSR2)
FORWARDED = (*HELD, signal.SIGTERM)  # to the ranks
LINES, MAX_LINE, MAX_TAIL_BYTES = 20, 200, 1 << 16  # of a killed rank's log
ENDING = ("SIGHUP", "SIGQUIT")
# What a Ctrl-C before the first step means.
INTERRUPTED_IN = {
    "rlhf_mcore.cli.train": "ended before the first step, nothing was to be saved",
    "rlhf_mcore.commands.evaluate.command": "what is scored is kept, the same command continues",
}
_STACKS_S = 2.0  # that ranks get to print their stacks


def main(argv: Sequence[str]) -> int:
    """Run torchrun with ``argv``. Returns 0 if every rank has done all it should, the exit code of what failed first, or 128 + N after
    signal N."""
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

    # It reports the end of every worker as an error, the one that was asked for too. Failures are printed here, with their ranks.
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
    except SignalException as ended:  # the workers have been ended with the same signal
        return to_shell_code(-ended.sigval)
    except ChildFailedError as error:
        return agent.report(error.failures)
    except OSError as error:  # torchrun makes folders and files for the ranks' logs
        if error.errno not in FULL:
            raise
        return report_of_tool(error)
    except rendezvous.RendezvousError as error:
        say(f"error: {error}", file=sys.stderr)
        return error.code
    return agent.check_done()


def with_files_in_memory(logs: LogsSpecs, ranks: RankFiles) -> LogsSpecs:
    """Give torchrun the logs of ``logs``, and for the errors of ranks the files that ``ranks`` makes."""
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
    """Hold what this process knows of its ranks, and reports about them."""

    def __init__(self, ranks: RankFiles) -> None:
        self.ranks = ranks
        self.log_dir: Path | None = None
        self.module = ""  # what the ranks run
        self.saves = True  # whether they answer what asks for a save
        self._interrupted = False

    def handle_signals(self) -> None:
        """Take the signals that torchrun is not to take, from now on."""
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._terminate)
        forward_signals()

    def report(self, failures: Mapping[int, ProcessFailure]) -> int:
        """Print what ended the run, once. Returns the exit code.

        The cause is the first reported error that is no consequence of another rank's end; else a killed rank; else a rank that left
        without an error; else torchrun's first failure.
        """
        errors = {number: told for number, told in self.ranks.read().items() if "kind" in told}
        own = {number: told for number, told in errors.items() if told["kind"] != CONSEQUENCE}
        if own:
            cause = min(own, key=lambda number: own[number]["time"])
            self._say(own[cause]["message"], cause)
            # By its own report: torchrun may have ended the rank before its own exit.
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
        """Exit code 0 is for runs whose ranks have all come to their end."""
        if unfinished := self._unfinished():
            self._say(_LEFT.format(unfinished[0]), unfinished[0])
            return FAILED
        return DONE

    def _unfinished(self) -> list[int]:
        """List ranks that have begun and have not told that the run is done."""
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
        # In a rank SIGTERM is torchrun's way of ending it; asked from outside it means what SIGUSR1 means.
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
        again = "interrupted again: ended at once; what was saved before is whole\n"
        first = f"interrupted: {INTERRUPTED_IN.get(self.module, 'ended')}\n"
        start = "\n" if os.isatty(2) else ""  # a terminal has ^C, or the edge of the live display, on this line
        os.write(2, (start + (again if self._interrupted else first)).encode())
        os._exit(INTERRUPTED)


_LEFT = "rank {} ended with exit code 0 before the run was done; does code that the run calls use sys.exit or os._exit?"


def find_first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Find the worker that failed first, with its rank. Those that torchrun ended because of it (by SIGTERM) are not the cause."""
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM}
    return min((causes or failures).items(), key=lambda item: item[1].timestamp)


def forward_signals() -> None:
    """Forward SIGUSR1 and SIGUSR2 to the workers from now on; one that comes before there is a worker waits for it.

    They are blocked here, and a worker inherits that: a signal that comes while it is still starting waits until the
    worker listens, instead of ending it. SIGTERM is not blocked, because torchrun ends workers with it.
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
    """Return the end of a rank's stderr, without commands to a terminal."""
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
