"""The faults that tests inject, by number. ``test_fault_13_...`` tests fault 13. This file generates docs/reference/faults.md."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FAULTS = {  # number: (injected fault, expected outcome)
    1: ("SIGKILL at every write, fsync and rename of a save", "the previous or the new checkpoint is whole"),
    2: (
        "a kill while `latest` moves; a missing or broken link",
        "the link moves atomically, and is rebuilt from the disk",
    ),
    3: ("a kill while a step is saved again over its directory", "one complete copy remains"),
    4: ("a kill during an asynchronous save", "the link has not moved; the partial directory goes to quarantine"),
    5: ("a partial directory of the step to save", "the save succeeds on all ranks, and none waits"),
    6: ("weights change while an asynchronous save runs", "the saved bytes are the snapshot's"),
    7: ("every combination of the save options", "the link moves, or the configuration is rejected at the start"),
    8: ("a step raises and is retried in the same process", "the second save contains nothing from the first attempt"),
    9: (
        "the disk is full in a shard or at the manifest",
        "a clear error; the earlier checkpoint stays. `checkpoint.on_failed_save` decides; a run whose last save fails has failed",
    ),
    10: ("a truncated shard", "it is named and rejected; the previous checkpoint is used if requested"),
    11: ("one flipped bit in any file", "its hash names the file, which is rejected"),
    12: ("I/O errors, read-only or slow storage", "retries, then a clear failure"),
    13: (
        "one rank dies in a collective",
        "all ranks end before the deadline with an exit code other than 0; the dead rank is named",
    ),
    14: (
        "SIGSTOP on one rank or all; a library in user code that holds Python's lock",
        "the launcher prints the stacks, ends the job and names the rank that does not progress",
    ),
    15: ("SLURM's SIGUSR1 before the time limit, then SIGTERM", "the step ends, a save, requeue, exact resume"),
    16: ("a second signal during that save", "no damage, and the same exit code"),
    17: ("a time limit shorter than the next step and a save", "the run saves earlier, by measured times"),
    18: (
        "a disaggregated engine, or all of them, is killed or stopped while it generates",
        "it is restarted and gets weights first; other engines generate its requests with the same seeds, without duplicates; "
        "four failures in a row end the run",
    ),
    19: ("an engine answers and generates nothing", "detected within `rollout.engine_timeout_s`; then as fault 18"),
    20: (
        "a weight sync fails at a bucket; a disaggregated engine dies, stops or fails during one",
        "the engine refuses to generate until a whole sync. A lost engine is left out within `rollout.engine_timeout_s`, and the "
        "others get the weights in a new group",
    ),
    21: ("an engine wakes from sleep without a sync", "generation is rejected by version and digest"),
    22: ("weights change while the prefix cache is kept", "this cannot happen: every sync empties the cache"),
    23: (
        "NaN or infinity in loss, gradient, weights or moments, on one rank or all",
        "all ranks skip the same update; 5 in a row end the run. Weights and moments that are not finite end it at once: never "
        "synced, never saved. A resume skips a checkpoint that contains them",
    ),
    24: (
        "a reward raises, hangs, fills memory or leaves children; a program of the model loops, forks, allocates 100 GB, prints "
        "endlessly, ignores signals, leaves daemons, reads files, opens sockets, signals other processes, or exits with 0",
        "its process group ends; `reward.on_error` decides; one line per step reports count and first cause. A program of the "
        "model ends with its sandbox and is a wrong answer. A machine with too little isolation is rejected before ranks start",
    ),
    25: (
        "an engine returns too few responses, one twice, or one that was not requested",
        "an error names prompts and samples before training. A restarted run generates the same step",
    ),
    26: (
        "out of memory; a port in use",
        "the rank or reward is named and the saved state is valid; ports are chosen when they are bound. If the rendezvous port "
        "is taken, the nodes meet at another one",
    ),
    27: (
        "kill -9 at a random instant of any phase, and the same command again",
        "final weights and metrics equal an undisturbed run, bit for bit; the temporary folder is empty",
    ),
    28: (
        "the disk fills in a save, in metrics, in a rollout file, in an asynchronous save",
        "one message with path, needed and free bytes",
    ),
    29: ("a kill during retention", "no usable checkpoint loses the base of its deltas"),
    30: (
        "Ctrl-C once, and twice",
        "once: the step ends, a save, a message with the command that continues; twice: ends at once",
    ),
    31: (
        "a reward function exits, sleeps, closes descriptors, changes directory, forks, fills memory",
        "its worker dies; `reward.on_error` decides, and the run never ends with 0 before its last step",
    ),
    32: (
        "Ray's head, a node or an actor is lost",
        "another actor retries the reward work; without Ray the run ends with one message and resumes exactly",
    ),
    33: (
        "engines are added, drained and removed while they generate",
        "other engines take over requests; a new engine gets weights before its first request; each request is answered once",
    ),
    34: (
        "a kill at a random instant of a pipelined run",
        "every prompt is trained on exactly once; with `rollout.deterministic_order` the run stays exact",
    ),
    35: (
        "a reward server or judge hangs, closes the connection, redirects, or answers garbage, NaN, too much or other items",
        "retries until the deadline, then no score, by policy; one bad response does not affect its batch; a redirect gets "
        "neither responses nor token; a server that never answers ends the run with one message",
    ),
    36: (
        "with `rollout.deterministic_order` an engine is killed, stopped, drained or removed at any instant",
        "final weights and metrics equal an undisturbed run, bit for bit. Without the key, a line and `rollout/other_version` "
        "count responses from newer weights",
    ),
    37: (
        "no free byte on the disk of the run directory, the temporary folder or the output",
        "one message with the file or disk and the free bytes, which depends on no file of that disk",
    ),
    38: ("small program output that evaluates to a huge value", "bounded before the conversion"),
    39: (
        "the sandbox's interpreter dies",
        "it restarts and its program runs again, at most three times; other responses are not affected",
    ),
    40: (
        "a client of the agents' endpoint hangs, floods, sends junk, or uses another episode's key",
        "that episode fails by policy; no other notices",
    ),
    41: ("a rank has no message in a group's first exchange; a peer dies while connecting", "none waits forever"),
    42: (
        "lone surrogates, control tokens, NUL in observations and tool results",
        "encoded as text, never as control tokens, unless the environment's class allows it",
    ),
}


def find_fault_tests() -> dict[int, list[str]]:
    """Return fault number -> files with tests of this fault, as paths relative to the repository."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "contrib").rglob("test_*.py")]:
        for numbers in re.findall(r"def test_fault_(\d\d(?:_and_\d\d)*)", path.read_text(encoding="utf-8")):
            for number in numbers.split("_and_"):
                found[int(number)].add(path.relative_to(ROOT).as_posix())
    return {number: sorted(files) for number, files in sorted(found.items())}
