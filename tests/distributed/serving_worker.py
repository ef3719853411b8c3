"""Run the requested workers for ``World`` one after the other, under torchrun, until the tests have ended."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import time
from pathlib import Path

from rlhf_mcore.platform import eager_imports

with eager_imports():  # import the modules of workers before the ranks are forked
    from tests.distributed import models, mtp_worker, state_worker  # noqa: F401
    from tests.distributed.setting import start


def main(requests: Path, pid_of_tests: str) -> None:
    start()
    for number in itertools.count():
        request = requests / f"{number}.json"
        while not request.exists():
            if not Path(f"/proc/{pid_of_tests}").exists():
                return
            time.sleep(0.05)
        asked = json.loads(request.read_text())
        worker = importlib.import_module(f"tests.distributed.{asked['worker']}")
        worker.main(Path(asked["directory"]), *asked["arguments"])
        gc.collect()
