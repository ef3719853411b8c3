"""Start the ranks of one node and watch them. Print one message for the cause of a failed run, and return its exit code.

torch's ``distributed.elastic.multiprocessing``, the part of torchrun that starts processes, starts the ranks and redirects their
output. The ranks connect to a store in this process, which listens on one address only.

Ctrl-C ends a run at once before its first step. During training the ranks finish the step and save; a second Ctrl-C ends the run
at once. Requests to save (SIGUSR1, SIGUSR2, SIGTERM) are forwarded to the ranks, which save between steps. Other signals end the
run. If the ranks save nothing, SIGTERM ends the run too.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from rlhf_mcore.cli.terminal import (
    DONE,
    FAILED,
    INTERRUPTED,
    PORT_TAKEN,
    REQUEUE,
    STOPPED,
    USER_ERROR,
    full_disks_here,
    report_of_tool,
    say,
    to_shell_code,
    working,
)
from rlhf_mcore.config.errors import printable
from rlhf_mcore.observability.files import FULL, full_disks
from rlhf_mcore.observability.rank_file import CONSEQUENCE, USER, VARIABLE, RankFiles
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.own_processes import STARTED_BY, children, end_all, end_with_parent, has_ended, signal_name
from rlhf_mcore.parallel.addresses import LOOPBACK, listener

if TYPE_CHECKING:
    from torch.distributed import TCPStore
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
POLL_S = 0.1
CONNECT_S = 300  # for all nodes to connect
END_S = 300  # for the ranks of the other nodes to end
_STACKS_S = 2.0  # time for the ranks to print their stacks


def main(argv: Sequence[str]) -> int:
    """Start the ranks of this node, and wait for them.

    Returns 0 if every rank has finished the run, the exit code of the first failure, or 128 + N after signal N.
    """
    end_with_parent(signal.SIGHUP)
    args = _parser().parse_args(argv)
    supervisor = Supervisor(RankFiles(has_ended), args.module, args.logs, saves=not args.unsaved)
    os.environ[STARTED_BY] = str(os.getpid())
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(ENDING)
    supervisor.handle_signals()

    def show(what: str) -> contextlib.AbstractContextManager[object]:
        return working(what, console=Console()) if args.shown else contextlib.nullcontext()

    with show("importing torch"):
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException

        from rlhf_mcore.cli import forked_ranks

    # torch reports the end of every rank as an error, even a requested end. This module prints failures with their ranks.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with show("importing Megatron-core and the engine"):
        are_forks = forked_ranks.preload(args.module, args.arguments)
    if are_forks:
        forked_ranks.fork_ranks()
    try:
        store = open_store(args.address, args.port, args.node_rank, args.nodes)
    except (OSError, DistError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        say(f"error: the nodes cannot meet at {args.address}:{args.port} ({reason})", file=sys.stderr)
        return PORT_TAKEN if isinstance(error, OSError) and error.errno == errno.EADDRINUSE else FAILED
    try:
        code = _run_ranks(args, supervisor, store.port)
    except SignalException as ended:
        code = to_shell_code(-ended.sigval)
    except OSError as error:  # torch creates folders and files for the output of ranks
        if error.errno not in FULL:
            raise
        code = report_of_tool(error)
    with contextlib.suppress(DistError):  # another node has failed; the launcher reports it
        if args.node_rank:
            store.set(f"ended/{args.node_rank}", "")
        elif code == DONE:
            store.wait([f"ended/{node}" for node in range(1, args.nodes)], timedelta(seconds=END_S))
    return code


def _run_ranks(args: argparse.Namespace, supervisor: Supervisor, port: int) -> int:
    """Run the ranks of this node to their end. Returns the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException, start_processes

    local_ranks = range(args.ranks)
    context = start_processes(
        name="rank",
        entrypoint=sys.executable,
        args=dict.fromkeys(local_ranks, ("-u", "-m", args.module, *args.arguments)),
        envs={local: _environment(args, local, port, supervisor.ranks) for local in local_ranks},
        logs_specs=_logs_specs(args),
        log_line_prefixes=dict.fromkeys(local_ranks, ""),
    )
    supervisor.ranks.watch(supervisor.end_stalled_run)
    try:
        result = context.wait(period=POLL_S)
    except SignalException as ended:
        context.close(ended.sigval)
        raise
    assert result is not None, "it waits without a limit"
    if result.failures:
        return supervisor.report({args.node_rank * args.ranks + n: each for n, each in result.failures.items()})
    return supervisor.check_done()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m rlhf_mcore.cli.supervisor", description="Start the ranks of one node.")
    parser.add_argument("--ranks", type=int, required=True, help="number of processes on this node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--address", default=LOOPBACK, help="address of the first node, where its store listens")
    parser.add_argument("--port", type=int, default=0, help="port of the store; 0 on a single node: a free one")
    parser.add_argument("--logs", type=Path, help="directory for the output of the ranks")
    parser.add_argument("--terminal", action="store_true", help="the first rank prints to the standard output itself")
    parser.add_argument("--shown", action="store_true", help="show the start on the terminal")
    parser.add_argument("--unsaved", action="store_true", help="the ranks have nothing to save, so SIGTERM ends them")
    parser.add_argument("module", help="module that every rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def open_store(address: str, port: int, node_rank: int, num_nodes: int) -> TCPStore:
    """Connect to the store of a run, which is in the supervisor of the first node. Blocks until all nodes are connected.

    The stores of torch and torchrun listen on every interface, and torchrun's default rendezvous unpickles the data that it
    receives there. This store listens on ``address`` only.
    """
    from torch.distributed import TCPStore

    listening = listener(address, port) if node_rank == 0 else None
    return TCPStore(
        address,
        port if listening is None else listening.getsockname()[1],
        num_nodes,
        is_master=node_rank == 0,
        timeout=timedelta(seconds=CONNECT_S),
        master_listen_fd=None if listening is None else listening.detach(),  # the store closes it
    )


def _environment(args: argparse.Namespace, local_rank: int, port: int, ranks: RankFiles) -> dict[str, str]:
    """Return the variables of a rank, as torchrun sets them."""
    return {
        "RANK": str(args.node_rank * args.ranks + local_rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(args.node_rank),
        "WORLD_SIZE": str(args.nodes * args.ranks),
        "LOCAL_WORLD_SIZE": str(args.ranks),
        "GROUP_WORLD_SIZE": str(args.nodes),
        "MASTER_ADDR": args.address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "ranks",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        VARIABLE: ranks.make(local_rank),
    }


def _logs_specs(args: argparse.Namespace) -> LogsSpecs:
    """Return the destinations of the ranks' output: files, except for the first rank's standard output."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    if args.logs is None:
        return DefaultLogsSpecs(os.devnull)  # otherwise torch creates a temporary directory and does not remove it
    redirects = dict.fromkeys(range(args.ranks), Std.ALL)
    if args.terminal:
        return DefaultLogsSpecs(str(args.logs), redirects | {0: Std.ERR})
    return DefaultLogsSpecs(str(args.logs), redirects, {0: Std.OUT} if args.node_rank == 0 else Std.NONE)


class Supervisor:
    """Handles signals and reports failures.

    Args:
        ranks: the reports of the ranks.
        module: the module that the ranks run.
        logs: the directory of their output, if it goes to files.
        saves: whether the ranks save on request.
    """

    def __init__(self, ranks: RankFiles, module: str = "", logs: Path | None = None, *, saves: bool = True) -> None:
        self.ranks, self._module, self._logs, self._saves = ranks, module, logs, saves
        self._interrupted = False

    def handle_signals(self) -> None:
        """Handle the signals that torch should not handle, from now on."""
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._terminate)
        forward_signals()

    def report(self, failures: Mapping[int, ProcessFailure]) -> int:
        """Print the cause of the end of the run, once. Returns the exit code.

        The cause is the first reported error that is not a consequence of another rank's end. Without one, it is a killed rank, then
        a rank that ended early without an error, then torch's first failure.
        """
        errors = {number: told for number, told in self.ranks.read().items() if "kind" in told}
        own = {number: told for number, told in errors.items() if told["kind"] != CONSEQUENCE}
        if own:
            cause = min(own, key=lambda number: own[number]["time"])
            self._say(own[cause]["message"], cause)
            # Use the reported kind, because torch may have ended the rank before it could exit.
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
        elif left := [number for number in self._list_unfinished() if number not in failures]:
            self._say(_LEFT.format(left[0]), left[0])
        else:
            self._say(errors[rank]["message"], rank)
        return to_shell_code(failure.exitcode)

    def check_done(self) -> int:
        """Return exit code 0 only if all ranks have finished the run."""
        if unfinished := self._list_unfinished():
            self._say(_LEFT.format(unfinished[0]), unfinished[0])
            return FAILED
        return DONE

    def _list_unfinished(self) -> list[int]:
        """List the ranks that have started and have not reported the end of the run."""
        return sorted(number for number, told in self.ranks.read().items() if not told.get("done"))

    def end_stalled_run(self, message: str, blamed: list[int]) -> None:
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
        logs = list(self._logs.glob(f"*/attempt_*/{local_rank}/stderr.log")) if self._logs else []
        return max(logs, key=lambda path: path.stat().st_mtime, default=None)

    def _full_disks(self) -> str:
        return full_disks_here() or full_disks([self._logs] if self._logs else [])

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
        # torch ends ranks with SIGTERM. A SIGTERM from outside requests a save, as SIGUSR1 does.
        if self._saves:
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
        first = f"interrupted: {INTERRUPTED_IN.get(self._module, 'ended')}\n"
        start = "\n" if os.isatty(2) else ""  # on a terminal this line already shows ^C or the edge of the live display
        os.write(2, (start + (again if self._interrupted else first)).encode())
        os._exit(INTERRUPTED)


_LEFT = "rank {} ended with exit code 0 before the run was done; does code that the run calls use sys.exit or os._exit?"


def find_first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank and the failure of the worker that failed first. Workers that torch then ended by SIGTERM do not count."""
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM}
    return min((causes or failures).items(), key=lambda item: item[1].timestamp)


def forward_signals() -> None:
    """Forward SIGUSR1 and SIGUSR2 to the workers from now on. A signal that arrives before a worker exists is kept until then.

    This process blocks both signals, and workers inherit the block. A signal to a starting worker is therefore pending until the
    worker listens, and does not end it. SIGTERM is not blocked, because torch ends workers with it.
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
