"""``rlhf-mcore multinode``: start an agent on every host over ssh. ``multinode.sh`` calls it.

The hosts need this directory under the same path. This process sends signals to an agent by name, through the agent's stdin.
If stdin closes because this process or the connection has ended, the agent ends its ranks.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from uuid import uuid4

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.agent import FORWARDED, TRAIN, with_restarts
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_processes import kill_group, start

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "node.sh"
GRACE_S = 30.0  # time for the other nodes to end by themselves after one node has ended
POLL_S = 0.1
MEETINGS = 3  # ports to try; another program may take a port before the ranks use it


def main(argv: Sequence[str] | None = None) -> int:
    """Train, restarting up to ``trainer.max_restarts`` times. Returns the exit code of the node that failed first."""
    args = _parser().parse_intermixed_args(argv)
    hosts = [host.strip() for host in args.hosts.split(",")]
    nodes = Nodes(
        hosts=hosts,
        shell=shlex.split(args.ssh),
        fixed=[f"--nodes={len(hosts)}", f"--ranks-per-node={args.ranks_per_node}", f"--module={args.module}"],
        arguments=[args.config, *args.overrides],
        grace_s=args.grace,
    )
    try:
        for host in hosts:
            if not host or host.startswith("-"):  # ssh would read it as an option
                raise ConfigError(
                    f"--hosts {args.hosts!r}: {host!r} is not a host name; separate names by single commas"
                )
        if args.ranks_per_node < 1:
            raise ConfigError(
                f"--ranks-per-node={args.ranks_per_node}: a host needs at least one process; give a number from 1"
            )
        return nodes.run(args.interface)
    except (ConfigError, OSError) as error:
        return terminal.report_of_tool(error)
    except KeyboardInterrupt:  # before the nodes start; later, Ctrl-C is forwarded to them
        say("\ninterrupted before any process was started", file=sys.stderr)
        return terminal.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore multinode",
        "Train on several machines over ssh. Every machine needs this directory under the same path.",
        examples=[
            "rlhf-mcore multinode --hosts node1,node2 --ranks-per-node 8 my_run.yaml",
            "rlhf-mcore multinode --hosts node1,node2 --ssh 'ssh -p 2222' my_run.yaml experiment=two",
        ],
        exits=terminal.EPILOG,
        config="YAML file, as for train",
    )
    parser.add_argument("--hosts", required=True, metavar="A,B", help="host names; the first host runs rank 0")
    parser.add_argument("--ranks-per-node", type=int, default=8, metavar="M", help="processes per host (default: 8)")
    parser.add_argument(
        "--interface", help="network interface of the first host (default: the route to the second host)"
    )
    parser.add_argument(
        "--ssh", default="ssh -o BatchMode=yes", metavar="COMMAND", help="ssh command (default: %(default)s)"
    )
    parser.add_argument("--grace", type=float, default=GRACE_S, metavar="S", help=argparse.SUPPRESS)
    parser.add_argument("--module", default=TRAIN, help=argparse.SUPPRESS)
    return parser


@dataclass(slots=True)
class Nodes:
    """The agents of a run. ``fixed``: options of every agent. ``arguments``: arguments of the ranks."""

    hosts: list[str]
    shell: list[str]
    fixed: list[str]
    arguments: list[str]
    grace_s: float
    _agents: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, interface: str | None) -> int:
        """Start the agents and wait for them. Restart after a failure, as often as the configuration allows."""
        _, _, max_restarts, _ = self._meet(interface, "meeting")
        return with_restarts(lambda number: self._attempt(interface, number), max_restarts)

    def _attempt(self, interface: str | None, number: int) -> int:
        for _ in range(MEETINGS):
            code = self._start(interface, number)
            if code != terminal.PORT_TAKEN:
                return code
            say("the nodes meet again, at another port", file=sys.stderr)
        return terminal.FAILED

    def _start(self, interface: str | None, number: int) -> int:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:6]}.{number}"
        address, port, _, logs = self._meet(interface, run_id)
        say(f"logs of all ranks: {logs}")
        options = [*self.fixed, f"--run-id={run_id}", f"--address={address}", f"--port={port}", "--control"]
        with self._forwarding():
            # Agents start in separate sessions, so Ctrl-C reaches them only through _forwarding.
            commands = [self._command(host, [*options, f"--node-rank={k}"]) for k, host in enumerate(self.hosts)]
            self._agents = [start(command, stdin=subprocess.PIPE, text=True) for command in commands]
            try:
                return self._wait()
            finally:
                self._end()

    def _meet(self, interface: str | None, run_id: str) -> tuple[str, int, int, str]:
        """Ask the first host for (address, port, trainer.max_restarts, log directory)."""
        peer = self.hosts[min(1, len(self.hosts) - 1)]
        options = [f"--meet={peer.rpartition('@')[2]}", f"--run-id={run_id}"]
        options += [f"--interface={interface}"] if interface else []
        done = subprocess.run(
            self._command(self.hosts[0], options), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        words = done.stdout.strip().rpartition("\n")[2].split(maxsplit=3)
        if done.returncode != terminal.DONE or len(words) != 4 or not (words[1] + words[2]).isdecimal():
            raise ConfigError(
                f"host {self.hosts[0]!r} gave no address for the ranks (exit code {done.returncode}); see the message above"
            )
        return words[0], int(words[1]), int(words[2]), words[3]

    def _command(self, host: str, options: list[str]) -> list[str]:
        agent = [str(SCRIPT), "rlhf_mcore.cli.agent", *options, *self.arguments]
        return [*self.shell, host, f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(agent)}"]

    def _wait(self) -> int:
        """Wait for all agents. After the first failure, print it and wait ``grace_s`` for the others."""
        while True:
            codes = [agent.poll() for agent in self._agents]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed or None not in codes:
                break
            time.sleep(POLL_S)
        if not failed:
            return terminal.DONE
        rank, code = failed[0], terminal.to_shell_code(self._agents[failed[0]].returncode)
        if code not in (terminal.REQUEUE, terminal.STOPPED):
            say(f"node {rank} ({self.hosts[rank]}) ended with exit code {code}", file=sys.stderr)
        end = time.monotonic() + self.grace_s
        while time.monotonic() < end and None in [agent.poll() for agent in self._agents]:
            time.sleep(POLL_S)
        return code

    def _end(self) -> None:
        """Close the stdin of the agents, which ends the agents that still run."""
        for agent in self._agents:
            if agent.stdin is not None:
                with suppress(OSError):
                    agent.stdin.close()
        for agent in self._agents:
            try:
                agent.wait(timeout=self.grace_s + 30)  # torchrun gives its workers 30 s
            except subprocess.TimeoutExpired:
                kill_group(agent)

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        def forward(number: int, _frame: FrameType | None) -> None:
            for agent in self._agents:
                if agent.stdin is not None:
                    with suppress(OSError, ValueError):
                        agent.stdin.write(f"{signal.Signals(number).name}\n")
                        agent.stdin.flush()

        previous = {number: signal.signal(number, forward) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
