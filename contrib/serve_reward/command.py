"""``rlhf-mcore serve-reward CONFIG``: serve the reward of a configuration over HTTP. It needs no model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.reward_pools import reward_pools
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.load import load_config
from rlhf_mcore.rewards.http_pool import token_of
from rlhf_mcore.rewards.reward import build_reward, scoring_keys
from rlhf_mcore_contrib.serve_reward.server import RewardServer
from rlhf_mcore_contrib.serving import check_host, serve

EXITS = """\
exit codes:
  0          stopped by Ctrl-C or SIGTERM
  2          a mistake in the configuration or the command line, or an address that cannot be used"""


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code."""
    args = _parser().parse_intermixed_args(argv)
    _serve(args.config, args.overrides, args.host, args.port, args.token_env)
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore serve-reward",
        "Score the responses that runs send over HTTP, with the group `reward` of CONFIG: rules, functions, a judge. POST /score "
        "scores a batch; GET /health answers while the server runs. docs/guide/rewards/services.md describes the format.",
        examples=[
            "rlhf-mcore serve-reward train.yaml --port 8900",
            "rlhf-mcore train train.yaml reward.remote.url=http://127.0.0.1:8900/score",
        ],
        exits=EXITS,
        config="YAML file; only its group `reward` is read",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="loopback or private address to listen on; a private address requires a token",
    )
    parser.add_argument("--port", type=int, default=8900, help="port to listen on; 0: a free port (default: 8900)")
    parser.add_argument(
        "--token-env", metavar="NAME", help="environment variable with the token that clients must send"
    )
    return parser


def _serve(path: str, overrides: Sequence[str], host: str, port: int, token_env: str | None) -> None:
    cfg = load_config(path, overrides, without_model=True).reward  # the file may contain only the reward
    token = token_of(token_env, "--token-env")
    check_host(host, token is not None)

    def tell(address: str) -> None:
        say(f"serving {scoring_keys(cfg)} on {address}/score (Ctrl-C ends it)")

    # A response without a score is reported to the client, where reward.on_error decides.
    with closing(build_reward(cfg.model_copy(update={"on_error": "zero"}), reward_pools(cfg))) as reward:
        serve(RewardServer(reward, token).application, host, port, tell)
