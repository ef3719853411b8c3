"""``rlhf-mcore serve-containers``: serve containers over HTTP, for ``environment.container.url`` of runs on other machines."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.environments.containers.kinds import Containers
from rlhf_mcore.environments.containers.task import ContainerLimits
from rlhf_mcore.rewards.http_pool import token_of
from rlhf_mcore_contrib.containers.service import Service
from rlhf_mcore_contrib.serving import check_host, serve

KINDS = ("sandbox", "docker", "podman")
_HOUR = 3600.0
_MOST = 1_000_000  # GiB or cores: no machine has more
EXITS = """\
exit codes:
  0          stopped by Ctrl-C or SIGTERM
  2          a mistake in the command line, no such containers on this machine, or an address that cannot be used"""


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code."""
    _serve(_parser().parse_args(argv))
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore serve-containers",
        "Serve containers of this machine to the agents of runs. contrib/containers/README.md describes the protocol. A container "
        "ends with its episode, or after its time limit.",
        examples=["rlhf-mcore serve-containers --kind podman --host 10.0.0.7 --token-env CONTAINER_TOKEN"],
        exits=EXITS,
    )
    parser.add_argument("--kind", choices=KINDS, default="sandbox", help="kind of containers (default: sandbox)")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="loopback or private address to listen on; a private address requires a token",
    )
    parser.add_argument("--port", type=int, default=8910, help="port to listen on; 0: a free port (default: 8910)")
    parser.add_argument("--token-env", metavar="NAME", help="environment variable with the token that runs must send")
    parser.add_argument("--image", help="image for tasks that name none (default: python:3.11-slim)")
    parser.add_argument(
        "--memory-gib", type=_amount, default=2.0, help="memory limit per container, in GiB (default: 2)"
    )
    parser.add_argument("--cpus", type=_amount, default=1.0, help="limit of cores per container (default: 1)")
    parser.add_argument("--network", action="store_true", help="allow network access to containers that request it")
    return parser


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MOST:
        raise argparse.ArgumentTypeError(
            f"{text} is out of range; give a number above 0 and at most {_MOST:,}, such as 2.5"
        )
    return value


def _serve(args: argparse.Namespace) -> None:
    token = token_of(args.token_env, "--token-env")
    check_host(args.host, token is not None)
    most = ContainerLimits(_HOUR, _HOUR, int(args.memory_gib * 2**30), args.cpus, args.network, 24 * _HOUR)
    kind = Containers(args.kind, most, image=args.image)
    service = Service(kind.open_in, token, most)

    def tell(address: str) -> None:
        say(f"lending containers of {args.kind} on {address} (Ctrl-C ends it)")

    serve(service.application, args.host, args.port, tell)
