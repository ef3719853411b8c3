"""``rlhf-mcore migrate SRC.yaml|script.sh -o OUT.yaml``: the common part of a verl or OpenRLHF configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, write, and say what is missing. Returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return _migrate(args.source, args.output, args.kind)
    except ConfigError as error:
        return exit_codes.report(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf-mcore migrate",
        description=(
            "Carry a configuration of verl (YAML, or a launch script with key=value overrides) or of OpenRLHF (a launch script) "
            "over as far as both have the same thing. Every key that could not be is named, in the file and here."
        ),
        epilog=exit_codes.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="YAML file or launch script; nothing in it is run")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="file to write")
    parser.add_argument("--from", dest="kind", choices=("auto", "verl", "openrlhf"), default="auto")
    return parser


def _migrate(source: Path, output: Path, kind: str) -> int:
    from rlhf_mcore.config.load import load_config
    from rlhf_mcore.config.migration.convert import migrate, to_text
    from rlhf_mcore.config.validate import validate

    if output.exists():
        raise ConfigError(f"-o {output}: exists; remove it or name another file")
    migration = migrate(source, kind)
    output.write_text(to_text(migration), encoding="utf-8")
    print(f"{len(migration.carried)} keys of {migration.source} carried over to {output}")
    for key, (value, reason) in migration.lost.items():
        print(f"not carried over: {key}={value}: {reason}")
    for note in migration.notes:
        print(f"to do: {note}")
    try:
        validate(load_config(output))
    except ConfigError as error:
        print("\n".join(f"to mend: {problem}" for problem in error.problems))
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
