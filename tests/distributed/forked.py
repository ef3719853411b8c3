"""Run a test worker under torchrun. As in a training run, ranks are forks of a process that has imported the worker.

    python -m rlhf_mcore.cli.supervisor ... tests.distributed.forked MODULE ARGUMENT...

calls ``main(ARGUMENT...)`` of the module on every rank. Absolute paths are passed as ``Path``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rlhf_mcore.cli import rank
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.platform import eager_imports
from tests.distributed.nccl_rules import enforce
from tests.distributed.rank_failures import record_failure

MODULE = "tests.distributed.forked"


def preload(arguments: Sequence[str]) -> None:
    """Import the worker, the imports of its ``preload``, and vLLM if it belongs to an end-to-end test."""
    with eager_imports():
        worker = import_module(arguments[0])
        if hasattr(worker, "preload"):
            worker.preload(*arguments[1:])
    if arguments[0].startswith("tests.e2e."):
        engine_kind("vllm").preload()


def main() -> int:
    module, *arguments = sys.argv[1:]
    with eager_imports():
        worker = import_module(module)
    enforce()
    with record_failure():
        worker.main(*(Path(argument) if os.path.isabs(argument) else argument for argument in arguments))
    return 0


if __name__ == "__main__":
    sys.exit(rank.run(main))
