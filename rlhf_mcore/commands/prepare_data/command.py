"""``rlhf-mcore prepare-data SOURCE ... --out DIR``: convert data sets of other formats to parquet files in our schema."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say, show_progress
from rlhf_mcore.commands.prepare_data.prepare import TASKS, Options, prepare, read_source, write_splits
from rlhf_mcore.commands.prepare_data.recipes import RECIPES
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.tokenizer import load_tokenizer


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Prepare data. Returns the exit code."""
    args = _parser().parse_args(argv)
    if (args.max_prompt_tokens or args.max_response_tokens) and not args.tokenizer:
        raise ConfigError("--max-prompt-tokens and --max-response-tokens count tokens; add --tokenizer DIR")
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    options = Options(**{option.name: getattr(args, option.name) for option in fields(Options)})
    rows = chain.from_iterable(read_source(source, subset=args.subset, split=args.split) for source in args.sources)
    splits, report = prepare(show_progress(rows, "reading row"), options, tokenizer)
    say("\n".join(report.lines()))
    for path in write_splits(splits, args.out):
        say(f"wrote {path}")
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore prepare-data",
        "Convert data in the format of GSM8K, MATH, DAPO or OpenAssistant, chats, preference pairs, and tasks for agents in "
        "containers to train.parquet and eval.parquet. A parquet or jsonl file with other columns needs no preparation; set "
        "data.prompt_key and data.answer_key instead.",
        examples=[
            "rlhf-mcore prepare-data gsm8k/train.jsonl --out data/gsm8k",
            "rlhf-mcore prepare-data pairs.parquet --task preference --out data/pairs",
            "rlhf-mcore prepare-data outputs/grpo/rollouts --task preference --out data/own-pairs",
        ],
    )
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="file, directory, or Hub id of a data set (needs `datasets`)"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--task", choices=TASKS, default="rl", help="kind of training (default: rl)")
    parser.add_argument(
        "--format",
        choices=("auto", *RECIPES),
        default="auto",
        help="format of the rows (default: recognised from the first row)",
    )
    parser.add_argument(
        "--eval-share", type=_share, default=0.02, metavar="S", help="share of prompts held out (default: 0.02)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message for prompts without one")
    parser.add_argument("--tokenizer", metavar="DIR", help="tokenizer for the report and for the next two limits")
    parser.add_argument("--max-prompt-tokens", type=int, metavar="N", help="skip longer prompts")
    parser.add_argument(
        "--max-response-tokens", type=int, metavar="N", help="skip rows with longer responses to train on"
    )
    parser.add_argument("--lang", metavar="CODE", help="OpenAssistant: only this language")
    parser.add_argument("--skip-bad", action="store_true", help="skip unusable rows instead of stopping")
    parser.add_argument("--subset", metavar="NAME", help="configuration of a data set on the Hub")
    parser.add_argument(
        "--split", default="train", metavar="NAME", help="split of a data set on the Hub (default: train)"
    )
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is out of range; give a share from 0 to less than 1, such as 0.05")
    return value
