"""Measure the cost of hashing, sealing and renaming in a checkpoint, compared with writing and fsyncing the same bytes.

The sides run in turn. For saving, one side writes and fsyncs files, and the other writes and commits them as a checkpoint. For
loading, one side reads files, and the other verifies and reads the checkpoint, both from disk. Both sides write parts of the
same size to the same file system. Our side uses the call that writes weights, which lets the disk start a part while the next
part is copied. The ratio is the ratio of speeds. 1 means that the protocol costs no more than this overlap saves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import Timing, report, time_call
from rlhf_mcore.bridge.files.tensor_files import write_at
from rlhf_mcore.checkpoint.commit import prepare, publish, seal, seal_files
from rlhf_mcore.checkpoint.disk import Disk, fsync
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, verify

GOAL, LOAD_GOAL = 0.8, 0.7
CHUNK_BYTES = 8 * 2**20


def write(folder: Path, data: memoryview, num_files: int) -> list[Path]:
    """Write the bytes, split into files."""
    folder.mkdir(parents=True, exist_ok=True)
    size = len(data) // num_files
    paths = [folder / f"model-{k}.safetensors" for k in range(num_files)]
    for k, path in enumerate(paths):
        with path.open("wb", buffering=0) as file:
            for begin in range(k * size, (k + 1) * size, CHUNK_BYTES):
                file.write(data[begin : min(begin + CHUNK_BYTES, (k + 1) * size)])
    return paths


def write_as_weights(folder: Path, data: memoryview, num_files: int) -> list[Path]:
    """Write the bytes, split into files, with the call that writes weights."""
    folder.mkdir(parents=True, exist_ok=True)
    size = len(data) // num_files
    paths = [folder / f"model-{k}.safetensors" for k in range(num_files)]
    for k, path in enumerate(paths):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        write_at(file, data[k * size : (k + 1) * size], 0)
        os.close(file)
    return paths


def raw_save(folder: Path, data: memoryview, num_files: int) -> None:
    """Write and fsync the files, as every program must."""
    for path in write(folder, data, num_files):
        fsync(path)


def save(run: Path, step: int, data: memoryview, num_files: int) -> Path:
    """Save a complete checkpoint."""
    disk = Disk()
    partial = prepare(run, step, "0", disk)
    entries = seal_files(partial, write_as_weights(partial / "actor", data, num_files), disk)
    seal(partial, entries, CheckpointInfo(step), disk)
    return publish(run, step, partial, disk)


def read(folder: Path) -> int:
    """Read every weight file once."""
    buffer, count = bytearray(CHUNK_BYTES), 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                count += got
    return count


def forget(folder: Path) -> None:
    """Ask the system to drop the files from the page cache."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def verify_and_read(checkpoint: Path) -> None:
    """Verify and read a checkpoint, as a resumed run does."""
    assert verify(checkpoint) == []
    read(checkpoint / "actor")


def measure(folder: Path, num_bytes: int, num_files: int, rounds: int) -> dict[str, list[tuple[Timing, Timing]]]:
    """Return (raw, ours) for each round of saving and of loading."""
    data = memoryview(os.urandom(2**20) * (num_bytes // 2**20))
    saves, loads = [], []
    for step in range(rounds + 1):
        # Remove the files of one side before the other side starts, so that both write to pages that the system has ready.
        os.sync()
        raw = time_call(lambda: raw_save(folder / "raw", data, num_files))[1]
        forget(folder)
        raw_load = time_call(lambda: read(folder / "raw"))[1]
        shutil.rmtree(folder / "raw")
        os.sync()
        checkpoint, ours = time_call(lambda step=step: save(folder / "run", step, data, num_files))  # type: ignore[misc]
        forget(folder)
        load = time_call(lambda path=checkpoint: verify_and_read(path))[1]  # type: ignore[misc]
        shutil.rmtree(checkpoint)
        saves.append((raw, ours))
        loads.append((raw_load, load))
    return {"save": saves[1:], "load": loads[1:]}  # the first round writes to pages that were never used before


def summary(pairs: list[tuple[Timing, Timing]], num_bytes: int) -> dict[str, float]:
    """Return the ratios of speeds and the speeds."""
    ratios = [raw.wall_s / ours.wall_s for raw, ours in pairs]
    gb = num_bytes / 1e9
    return {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "raw_gb_per_s": gb / statistics.median(raw.wall_s for raw, _ in pairs),
        "ours_gb_per_s": gb / statistics.median(ours.wall_s for _, ours in pairs),
        "raw_cpu_s": statistics.median(raw.cpu_s for raw, _ in pairs),
        "ours_cpu_s": statistics.median(ours.cpu_s for _, ours in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer bytes and rounds")
    parser.add_argument("--directory", default=None, help="where to write; the system's temporary directory by default")
    args = parser.parse_args()
    num_bytes, num_files, rounds = (64 * 2**20, 2, 3) if args.quick else (512 * 2**20, 4, 7)
    with TemporaryDirectory(dir=args.directory) as folder:
        pairs = measure(Path(folder), num_bytes, num_files, rounds)
    measured = {name: summary(found, num_bytes) for name, found in pairs.items()}
    details = {"bytes": num_bytes, "files": num_files, "rounds": rounds, **measured, "load_goal": LOAD_GOAL}
    report("save_speed", details, ratio=measured["save"]["ratio"], goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
