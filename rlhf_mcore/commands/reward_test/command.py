"""``rlhf-mcore reward-test CONFIG``: check that the reward gives full marks to ground truths only. Needs no model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say, working
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.questions import grades
from rlhf_mcore.config.reward_sources import scores_alone
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.validate import reward_and_data_problems, warnings_of
from rlhf_mcore.readers.hub import DATA_KEYS, localize

EPISODES = 8  # number of episodes of the environment, for each of data.train and data.eval
EPILOG = """\
exit codes:
  0          ground truths score full marks, empty responses and answers of other rows do not; the environment works
  2          there are disagreements, or an error in the configuration, the command line or the data"""


@exit_codes.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Test the reward and print the reports. Returns the exit code."""
    args = _parser().parse_intermixed_args(argv)
    if args.limit < 1:
        _parser().error(f"--limit {args.limit} is out of range; it must be at least 1")
    return _try(args.config, args.overrides, args.limit)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore reward-test",
        "Score the ground truths in data.train and data.eval as if they were responses, in the notations that models use. Then score "
        "empty responses and the answers of other rows. Ground truths must get full marks, the others must not. Every disagreement is "
        "printed. If the run has an environment, reset it for some rows and take one empty turn. No model is loaded.",
        examples=[
            "rlhf-mcore reward-test configs/quickstart/grpo.yaml",
            "rlhf-mcore reward-test my_run.yaml reward.function=examples/own_reward.py:grade --limit 200",
        ],
        exits=EPILOG,
        config="YAML file of the training run",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=50,
        metavar="N",
        help="number of rows from each of data.train and data.eval (default: 50)",
    )
    return parser


def _try(path: str, overrides: Sequence[str], limit: int) -> int:
    from rlhf_mcore.commands.reward_test.trials import as_text, once_each, try_environment
    from rlhf_mcore.rewards.reward import scoring_keys
    from rlhf_mcore.rewards.trial import read_sample, refuse_unknown_sources, try_reward

    cfg = load_config(path, overrides, without_model=True)
    localize(cfg, DATA_KEYS)
    if not run_kind(cfg).generates:
        raise ConfigError(
            f"algorithm.kind={cfg.algorithm.kind} has no reward; reward-test is for reinforcement learning"
        )
    if problems := list(reward_and_data_problems(cfg)):
        raise ConfigError.many(problems)
    reports, failed, episodes = [], list[tuple[str, str]](), 0
    with working("trying the reward on rows of") as begin:
        for name in ("data.train", "data.eval"):
            if not getattr(cfg.data, name.partition(".")[2]):
                continue
            begin(name)
            rows, sources = read_sample(cfg.data, name, limit)
            if cfg.environment.function is not None:
                prompts = [row.prompt for row in rows[:EPISODES]]
                failed, episodes = failed + try_environment(cfg, prompts), episodes + len(prompts)
            if not grades(cfg):
                continue
            if not scores_alone(cfg.reward):
                refuse_unknown_sources(cfg.reward, sources, name)
            reports.append(try_reward(cfg.reward, rows, name, sources.total()))
    texts = [*map(as_text, reports)]
    if cfg.environment.function is not None:
        begun = f"environment.function={cfg.environment.function}: {episodes} episodes with one empty turn"
        lines = [line for _, line in once_each((place, error, error) for place, error in failed)]
        texts.append("\n".join([f"{begun}, {len(failed)} failed", *lines]))
    texts += [f"warning: {warning}" for warning in warnings_of(cfg)]
    say("\n\n".join(texts))
    if failed:
        say("\nthe environment fails, see above", file=sys.stderr)
        return exit_codes.USER_ERROR
    if all(report.is_sound for report in reports):
        return exit_codes.DONE
    say(f"\n{scoring_keys(cfg.reward)} does not agree with the data, see above", file=sys.stderr)
    return exit_codes.USER_ERROR
