"""``rlhf-mcore convert --from {checkpoint,hf,megatron,fsdp} --to {hf,megatron} SRC DST``: one process, no GPU, little memory."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import working
from rlhf_mcore.config.errors import ConfigError

FORMATS = ("checkpoint", "hf", "megatron", "fsdp")
TARGETS = ("hf", "megatron")
ROLES = ("actor", "critic", "reward")
DTYPES = ("fp32", "bf16", "fp16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@exit_codes.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Convert a model between formats. Returns the exit code (see ``exit_codes``)."""
    args = _parser().parse_args(argv)
    args.shard_bytes = num_bytes(args.shard_size)
    if args.destination is not None:
        check_destination(args.destination, args.source, may_exist=args.overwrite or args.dry_run)

    with exit_codes.end_on_signals():
        with working("importing torch"):
            from rlhf_mcore.commands.convert.conversion import Conversion, run

        run(Conversion(**{field.name: getattr(args, field.name) for field in fields(Conversion)}))
    return exit_codes.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore convert",
        "Convert a model between formats, a few tensors in memory at a time. Sources: checkpoint (of a run here; of a run "
        "directory the newest), hf (safetensors), megatron (torch_dist), fsdp (model_world_size_X_rank_Y.pt). Everything "
        "is checked against config.json before and after; DST appears whole or not at all.",
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
        "destination", type=Path, metavar="DST", nargs="?", help="directory to make; not needed with --dry-run"
    )
    parser.add_argument("--role", choices=ROLES, default="actor", help="which model of a checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to write; without it every tensor keeps its own")
    parser.add_argument("--shard-size", default="4GiB", metavar="SIZE", help="largest file, as 500MB or 4GiB (default)")
    parser.add_argument(
        "--average",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="more sources, of the same format: write the mean of all",
    )
    parser.add_argument(
        "--hf-config", type=Path, metavar="DIR", help="where config.json and the tokenizer are, if not with SRC"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read DST again: digests, and logits where the model fits"
    )
    parser.add_argument("--dry-run", action="store_true", help="check SRC and print what would go where")
    parser.add_argument("--allow-nonfinite", action="store_true", help="convert NaN and infinite weights as they are")
    parser.add_argument(
        "--skip-checksums",
        dest="check_records",
        action="store_false",
        help="do not compare the checksums of FSDP and torch_dist files",
    )
    parser.add_argument(
        "--merge", action="store_true", help="of a directory of adapters (LoRA) write the whole model, with them added"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    return parser


def check_destination(destination: Path, source: Path, *, may_exist: bool) -> None:
    """Check DST before the source is read. Whether it is free is checked again where it is made.

    Raises:
        ConfigError: it is there already, or is a link, or replacing it would remove SRC or the working directory.
    """
    path = Path(os.path.abspath(destination))
    if path.is_symlink():
        raise ConfigError(f"{destination} is a link to {path.readlink()}; give a directory as DST")
    if path.exists() and not may_exist:
        raise ConfigError(f"{destination} already exists; give another DST or --overwrite")
    inside = {"SRC": Path(os.path.realpath(source)).parents, "the working directory": Path(os.getcwd(), "x").parents}
    for name, parents in inside.items():
        if path in parents:
            raise ConfigError(f"{destination} holds {name}, which would be replaced with it; give another DST")


def num_bytes(text: str) -> int:
    """Read a size such as 500MB or 4GiB.

    Raises:
        ConfigError: the text is no size.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    number = float(size[1]) * _UNITS[size[2]] if size else 0.0
    if not 1 <= number <= 2**63:
        raise ConfigError(f"--shard-size={text} is not a size; write it as 500MB or 4GiB")
    return int(number)
