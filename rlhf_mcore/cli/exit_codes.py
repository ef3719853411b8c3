"""What a command's exit code means, and how an error reaches the user."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError

DONE = 0
USER_ERROR = 2
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: saved and not finished, start the same command again

EPILOG = """\
exit codes:
  0          done
  2          a mistake in the configuration, the command line or the data; the message says which
  75         a signal or the time limit ended the run after a save; start the same command again
  others     failure (128 + N: ended by signal N)"""


def of_process(returncode: int) -> int:
    """A child's return code as a shell would give it: -N (ended by signal N) becomes 128 + N."""
    return 128 - returncode if returncode < 0 else returncode


def report(error: ConfigError) -> int:
    """Print a user's mistake on stderr, on rank 0 only, and return the exit code for it.

    Under torchrun the message of every rank also goes into the file that torchrun reads when a worker has failed.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        Path(error_file).parent.mkdir(parents=True, exist_ok=True)
        Path(error_file).write_text(
            json.dumps({"message": str(error), "timestamp": int(time.time())}), encoding="utf-8"
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    return USER_ERROR
