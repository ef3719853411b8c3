"""``rlhf-mcore convert --from {checkpoint,hf,megatron,fsdp} --to {hf,megatron} SRC DST``, in one process without a GPU."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import working
from rlhf_mcore.config.errors import ConfigError

FORMATS = ("checkpoint", "hf", "megatron", "fsdp")
TARGETS = ("hf", "megatron")
ROLES = ("actor", "critic", "reward")
DTYPES = ("fp32", "bf16", "fp16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Convert a model between formats. Returns the exit code (see ``terminal``)."""
    args = _parser().parse_args(argv)
    args.shard_bytes = num_bytes(args.shard_size)
    if args.destination is not None:
        check_destination(args.destination, args.source, may_exist=args.overwrite or args.dry_run)

    with terminal.end_on_signals():
        with working("importing torch"):
            from rlhf_mcore.commands.convert.conversion import Conversion, run

        run(Conversion(**{field.name: getattr(args, field.name) for field in fields(Conversion)}))
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore convert",
        "Convert a model between formats, with only a few tensors in memory. Source formats: checkpoint (a checkpoint of rlhf-mcore, "
        "or a run directory, which means its newest checkpoint), hf (safetensors), megatron (torch_dist), fsdp "
        "(model_world_size_X_rank_Y.pt). Names, shapes and dtypes are checked against config.json before and after the conversion. "
        "DST is created only if the conversion succeeds.",
        examples=[
            "rlhf-mcore convert --from checkpoint --to hf outputs/quickstart/grpo my-model --dtype bf16 --verify",
            "rlhf-mcore convert --from fsdp --to hf checkpoints/global_step_100/actor my-model",
            "rlhf-mcore convert --from checkpoint --to hf outputs/my/adapters my-model --merge",
            "rlhf-mcore convert --from hf --to megatron models/Qwen3-1.7B megatron/Qwen3-1.7B",
        ],
    )
    parser.add_argument("--from", dest="source_format", choices=FORMATS, required=True, help="format of SRC")
    parser.add_argument("--to", dest="target_format", choices=TARGETS, required=True, help="format of DST")
    parser.add_argument("source", type=Path, metavar="SRC", help="directory to read")
    parser.add_argument(
        "destination", type=Path, metavar="DST", nargs="?", help="directory to create; not needed with --dry-run"
    )
    parser.add_argument("--role", choices=ROLES, default="actor", help="model of the checkpoint (default: actor)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to write (default: keep the dtype of every tensor)")
    parser.add_argument(
        "--shard-size", default="4GiB", metavar="SIZE", help="maximum file size, such as 500MB (default: 4GiB)"
    )
    parser.add_argument(
        "--average",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="more sources of the same format: write the mean of all sources",
    )
    parser.add_argument(
        "--hf-config",
        type=Path,
        metavar="DIR",
        help="directory of config.json and the tokenizer, if SRC does not contain them",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read DST again and compare digests, and logits if the model fits into memory",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check SRC, and print source and destination of every tensor"
    )
    parser.add_argument("--allow-nonfinite", action="store_true", help="accept NaN and infinite weights")
    parser.add_argument(
        "--skip-checksums",
        dest="check_records",
        action="store_false",
        help="do not compare the checksums of FSDP and torch_dist files",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge the adapters (LoRA) in SRC into their base model, and write the whole model",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists")
    return parser


def check_destination(destination: Path, source: Path, *, may_exist: bool) -> None:
    """Check DST before the source is read. The writer checks again that DST does not exist.

    Raises:
        ConfigError: DST exists, or is a link, or replacing it would remove SRC or the working directory.
    """
    path = Path(os.path.abspath(destination))
    if path.is_symlink():
        raise ConfigError(f"{destination} is a link to {path.readlink()}; give a directory as DST")
    if path.exists() and not may_exist:
        raise ConfigError(f"{destination} already exists; give another DST or --overwrite")
    inside = {"SRC": Path(os.path.realpath(source)).parents, "the working directory": Path(os.getcwd(), "x").parents}
    for name, parents in inside.items():
        if path in parents:
            raise ConfigError(f"{destination} contains {name}, which would be removed with it; give another DST")


def num_bytes(text: str) -> int:
    """Parse a size such as 500MB or 4GiB, and return bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    number = float(size[1]) * _UNITS[size[2]] if size else 0.0
    if not 1 <= number <= 2**63:
        raise ConfigError(f"--shard-size={text} is not a size; write it as 500MB or 4GiB")
    return int(number)
