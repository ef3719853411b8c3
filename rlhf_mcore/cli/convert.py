"""``rlhf-mcore convert --from {checkpoint,hf,megatron,fsdp} --to {hf,megatron} SRC DST``: one process, no GPU, little memory."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.config import ConfigError

FORMATS = ("checkpoint", "hf", "megatron", "fsdp")
DTYPES = ("fp32", "bf16", "fp16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a model between formats. Returns the exit code (see ``exit_codes``)."""
    args = _parser().parse_args(argv)
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        if args.destination and not (args.overwrite or args.dry_run) and Path(args.destination).exists():
            # Said again where it is made; here before torch is imported and the source's checksums are compared.
            raise ConfigError(f"{args.destination} is there already; give another DST or --overwrite")
        from rlhf_mcore.cli.conversion import Request, run

        run(
            Request(
                source_format=args.source_format,
                target_format=args.target_format,
                source=Path(args.source),
                destination=Path(args.destination) if args.destination else None,
                role=args.role,
                dtype=args.dtype,
                shard_bytes=_size(args.shard_size),
                average=[Path(path) for path in args.average],
                hf_config=Path(args.hf_config) if args.hf_config else None,
                verify=args.verify,
                dry_run=args.dry_run,
                overwrite=args.overwrite,
                allow_nonfinite=args.allow_nonfinite,
                check_records=not args.skip_checksums,
            )
        )
    except ConfigError as error:
        return exit_codes.report(error)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return exit_codes.DONE


def _stop(number: int, _frame: FrameType | None) -> None:
    """End as after an exception, so that nothing half is left behind."""
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf-mcore convert",
        description=(
            "Convert a model between formats, a few tensors in memory at a time. Sources: checkpoint (of a run here; of a run "
            "directory the newest), hf (safetensors), megatron (torch_dist), fsdp (model_world_size_X_rank_Y.pt). Everything "
            "is checked against config.json before and after; DST appears whole or not at all."
        ),
        epilog=exit_codes.TOOL_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--from", dest="source_format", choices=FORMATS, required=True, help="format of SRC")
    parser.add_argument("--to", dest="target_format", choices=("hf", "megatron"), required=True, help="format of DST")
    parser.add_argument("source", metavar="SRC", help="directory to read")
    parser.add_argument("destination", metavar="DST", nargs="?", help="directory to make; not needed with --dry-run")
    parser.add_argument("--role", choices=("actor", "critic"), default="actor", help="which model of a checkpoint")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype to write; without it every tensor keeps its own")
    parser.add_argument("--shard-size", default="4GiB", metavar="SIZE", help="largest file, as 500MB or 4GiB (default)")
    parser.add_argument(
        "--average",
        nargs="+",
        default=[],
        metavar="DIR",
        help="more sources, of the same format: write the mean of all",
    )
    parser.add_argument("--hf-config", metavar="DIR", help="where config.json and the tokenizer are, if not with SRC")
    parser.add_argument(
        "--verify", action="store_true", help="read DST again: digests, and logits where the model fits"
    )
    parser.add_argument("--dry-run", action="store_true", help="check SRC and print what would go where")
    parser.add_argument("--allow-nonfinite", action="store_true", help="convert NaN and infinite weights as they are")
    parser.add_argument(
        "--skip-checksums", action="store_true", help="do not compare the checksums of FSDP and torch_dist files"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is there")
    return parser


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    size = int(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0
    if size < 1:
        raise ConfigError(f"--shard-size={text} is not a size; write it as 500MB or 4GiB")
    return size


if __name__ == "__main__":
    sys.exit(main())
