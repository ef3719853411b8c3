"""Store the results of an evaluation, so that a killed evaluation can continue.

settings.json    the settings that the results depend on; an evaluation with other settings must not continue here
parts/*.jsonl    during the evaluation: one line per prompt with all its samples, one file per engine, appended and fsynced
samples.jsonl    one line per response, sorted by prompt and sample
results.json     the statistics; written last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import read_json, shorten
from rlhf_mcore.observability.files import (
    cut_unfinished_line,
    full_disk_named,
    json_line,
    pretty_json,
    read_lines,
    write_atomically,
)
from rlhf_mcore.observability.run_directory import DirectoryLock
from rlhf_mcore.own_files import open_own, own_directory

FIELD = "evaluate.output_dir"
MAX_NAMED = 10
_REMEDY = f"remove the file to evaluate its prompts again, or choose another {FIELD}"
Sample = dict[str, Any]


class EvaluationDirectory:
    """The directory of one evaluation, locked by one job. Only one rank of a job may open it."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Create the directory, or continue an earlier job's evaluation without lines that a crash has cut.

        Raises:
            ConfigError: it is not writable, in use, or contains an evaluation with other settings.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            own_directory(path / "parts")
            self._lock = DirectoryLock(path / "evaluation.lock", f"change {FIELD}")
        except OSError as error:
            raise ConfigError(f"{FIELD}: cannot write to {path} ({error.strerror}); set {FIELD}") from error
        try:
            self._check_settings(settings)
            for part in self._parts():
                file = open_own(part, os.O_RDWR)
                try:
                    cut_unfinished_line(file, part)
                finally:
                    os.close(file)
        except BaseException:  # release the lock, because the process may try again later
            self.close()
            raise

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        file = self.path / "settings.json"
        if not file.exists():
            write_atomically(file, pretty_json(settings))
            return
        theirs = read_json(file, remedy=_REMEDY).content
        ours = json.loads(pretty_json(settings))
        different = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
        shown = [shorten(key) for key in different[:MAX_NAMED]]
        if different:
            raise ConfigError(
                f"{FIELD}: {self.path} contains an evaluation with another {' and another '.join(shown)}; "
                f"choose another {FIELD}, or remove the directory"
            )

    def _parts(self) -> list[Path]:
        return sorted((self.path / "parts").glob("*.jsonl"))

    def samples(self) -> list[Sample]:
        """Return all samples so far, sorted by prompt and sample."""
        whole = self.path / "samples.jsonl"
        records = [*read_lines(whole, _REMEDY)] if os.path.lexists(whole) else []
        for part in self._parts():
            records += (sample for line in read_lines(part, _REMEDY) for sample in line.objects("samples"))
        by_place = {(sample.integer("index"), sample.integer("sample")): dict(sample.content) for sample in records}
        return [by_place[key] for key in sorted(by_place)]

    def finish(self, samples: Sequence[Sample], results: Mapping[str, Any]) -> None:
        """Write the samples and the statistics, each atomically, and remove the parts."""
        write_atomically(self.path / "samples.jsonl", b"".join(map(json_line, samples)))
        write_atomically(self.path / "results.json", pretty_json(results))
        shutil.rmtree(self.path / "parts")

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()


class PartFile:
    """The file with one engine's scored prompts. Every batch is fsynced before it counts as scored."""

    def __init__(self, directory: Path, engine: int, num_engines: int) -> None:
        path = directory / "parts" / f"engine-{engine:05d}-of-{num_engines:05d}.jsonl"
        self._path = path
        self._file = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def append(self, samples: Sequence[Sample]) -> None:
        """Write one line per prompt, with all its samples. ``samples`` of a prompt must follow each other.

        Raises:
            FullDiskError: the disk is full.
        """
        prompts = groupby(samples, key=itemgetter("index"))
        content = memoryview(b"".join(json_line({"samples": list(own)}) for _, own in prompts))
        with full_disk_named(self._path, len(content)):
            while content:
                content = content[os.write(self._file, content) :]
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
