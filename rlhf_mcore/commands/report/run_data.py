"""Read the files in a run's directory. The run may still be writing them."""

from __future__ import annotations

import io
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_mcore.checkpoint.layout import MANIFEST, scan
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import leaves
from rlhf_mcore.config.settings import load_yaml, read_yaml_text
from rlhf_mcore.foreign import read_bytes, read_json
from rlhf_mcore.observability.files import read_lines
from rlhf_mcore.observability.run_directory import METRICS, ROLLOUTS

_REMEDY = "name the directory of another run, or move the file away"
_OF_SAMPLES = (
    "sample",
    "response",
    "score",
    "parts",
    "failure",
    "num_tokens",
    "finish_reason",
    "policy_version",
    "turns",
)
MAX_TOKENS = 300_000  # tokens of a run in a page: about 10 MB
_OF_TOKENS = ("tokens", "advantages", "logprob_differences")
_OF_GROUPS = ("step", "prompt_id", "prompt", "ground_truth")
IMAGES = "images"  # in a run, the folder with a file for every digest; in a group, the key with its digests
MAX_IMAGES = 500  # images of a run in a page
MAX_BYTES = 8 * 2**20  # total size of these images as files
SIDE = 256  # pixels: a larger image is scaled down to it
_MAX_FILE_BYTES = 64 * 2**20
_MAX_PIXELS = 64 * 2**20
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of one run.

    ``metrics``: columns of equal length, including ``step``. None means that a step did not report the metric, or not a finite value.
    ``not_finite``: metrics whose last values are NaN or infinite, with the first such step.
    ``groups``: the prompts of steps with their ``samples``. They may contain fewer than the ``num_rollouts`` rollouts of the run.
    ``images``: data URLs by the digests in ``groups``. ``config``: values by dotted key. ``software``: versions in the last
    checkpoint.
    """

    name: str
    path: str
    metrics: dict[str, list[float | None]]
    not_finite: dict[str, int]
    groups: list[dict[str, Any]]
    num_rollouts: int
    images: dict[str, str]
    config: dict[str, Any]
    software: dict[str, str]
    checkpoints: list[int]

    @property
    def steps(self) -> list[float | None]:
        return self.metrics["step"]


def read_run(directory: Path, max_rollouts: int) -> RunData:
    """Read a run's directory.

    Raises:
        ConfigError: it is not a run directory, or a file in it is invalid.
    """
    if not (directory / METRICS).is_file():
        inside = sorted(path.parent for path in directory.glob(f"*/{METRICS}")) if directory.is_dir() else []
        hint = f"; did you mean {inside[0]}?" if inside else ""
        raise ConfigError(
            f"{directory}: not the directory of a run, because it contains no {METRICS}; "
            f"give <output_dir>/<project>/<experiment>{hint}"
        )
    groups, num_rollouts = _groups(directory / ROLLOUTS, max_rollouts)
    checkpoints, software = scan(directory), {}
    if checkpoints:
        software = read_json(checkpoints[-1].path / MANIFEST, remedy=_REMEDY).table("libraries")
    records = _records(directory / METRICS)
    return RunData(
        name=directory.resolve().name,
        path=str(directory),
        metrics=_columns(records),
        not_finite=_not_finite(records),
        groups=groups,
        num_rollouts=num_rollouts,
        images=images_of(directory, groups),
        config=_config(directory / "config.yaml"),
        software=software,
        checkpoints=[checkpoint.step for checkpoint in checkpoints],
    )


def find_runs(folder: Path) -> list[Path]:
    """Return the run directories at and below a folder, sorted by path. They may be three levels deep."""
    places = ("", "*/", "*/*/", "*/*/*/")
    return sorted({path.parent for place in places for path in folder.glob(f"{place}{METRICS}")})


def _records(path: Path) -> dict[int, dict[str, float | None]]:
    """Return the last record of every step. A step that was repeated after a kill replaces its earlier record."""
    by_step: dict[int, dict[str, float | None]] = {}
    for line in read_lines(path, _REMEDY, is_growing=True):
        numbers = {
            name: float(value) if value is not None else None
            for name, value in line.content.items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        }
        step = line.integer("step")
        earlier = by_step.get(step, {}) if any(name.startswith("final/") for name in numbers) else {}
        by_step[step] = earlier | numbers
    return dict(sorted(by_step.items()))


def _columns(records: Mapping[int, Mapping[str, float | None]]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for record in records.values() for name in record)
    return {"step": []} | {name: [record.get(name) for record in records.values()] for name in names}


def _not_finite(records: Mapping[int, Mapping[str, float | None]]) -> dict[str, int]:
    """Return the metrics whose last values are not finite (null in the file), with the first such step."""
    since: dict[str, int] = {}
    for step, record in records.items():
        for name, value in record.items():
            if value is not None:
                since.pop(name, None)
            else:
                since.setdefault(name, step)
    return since


def _groups(folder: Path, max_rollouts: int) -> tuple[list[dict[str, Any]], int]:
    """Read the groups of the first step and of as many of the newest steps as fit. Returns them with the number of all rollouts."""
    files = sorted(folder.glob("step-*.jsonl")) if folder.is_dir() else []
    kept: dict[Path, list[dict[str, Any]]] = {}
    total = used = num_tokens = 0
    for file in [*files[:1], *reversed(files[1:])]:
        if used < max_rollouts:
            kept[file] = list(_groups_of_step(file))
            if num_tokens < MAX_TOKENS:
                num_tokens += _add_tokens(kept[file], file.with_name(file.name.replace("step-", "tokens-")))
            _add_episodes(kept[file], file.with_name(file.name.replace("step-", "episodes-")))
            count = sum(len(group["samples"]) for group in kept[file])
            used += count
        else:
            with file.open("rb") as lines:
                count = sum(1 for _ in lines)
        total += count
    return [group for file in files for group in kept.get(file, [])], total


def _groups_of_step(file: Path) -> Iterator[dict[str, Any]]:
    by_prompt: dict[str, dict[str, Any]] = {}
    for line in read_lines(file, _REMEDY, is_growing=True):
        record = line.content
        group = by_prompt.setdefault(
            str(record.get("prompt_id")), {name: record.get(name) for name in _OF_GROUPS} | {"samples": []}
        )
        if isinstance(images := record.get(IMAGES), list):
            group[IMAGES] = images
        group["samples"].append({name: record[name] for name in _OF_SAMPLES if name in record})
    yield from by_prompt.values()


def _add_tokens(groups: Sequence[dict[str, Any]], file: Path) -> int:
    """Add the recorded tokens to the samples. Returns the number of tokens."""
    total = 0
    for sample, record in _records_of_samples(groups, file):
        columns = [column for name in _OF_TOKENS if isinstance(column := record.get(name), list)]
        if len(columns) == len(_OF_TOKENS) and len(set(map(len, columns))) == 1:
            sample |= dict(zip(_OF_TOKENS, columns, strict=True))
            total += len(columns[0])
    return total


def _add_episodes(groups: Sequence[dict[str, Any]], file: Path) -> None:
    """Add the turns of the episodes, with times, to the samples."""
    for sample, record in _records_of_samples(groups, file):
        nodes = record.get("nodes")
        if isinstance(nodes, list) and all(isinstance(node, dict) for node in nodes):
            sample["episode"] = record


def _records_of_samples(
    groups: Sequence[dict[str, Any]], file: Path
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (sample, record) for each record of a file that belongs to a sample; nothing if the file does not exist."""
    samples = {(g["prompt_id"], sample.get("sample")): sample for g in groups for sample in g["samples"]}
    for line in read_lines(file, _REMEDY, is_growing=True) if file.is_file() else ():
        sample = samples.get((line.content.get("prompt_id"), line.content.get("sample")))
        if sample is not None:
            yield sample, dict(line.content)


def _config(path: Path) -> dict[str, Any]:
    """Return the values of a configuration by dotted key; {} if the file does not exist."""
    if not path.is_file():
        return {}
    content = load_yaml(read_yaml_text(path, "config file"), str(path))
    values = leaves(content) if isinstance(content, dict) else ()
    return {key: value if isinstance(value, str | int | float | None) else json.dumps(value) for key, value in values}


_NAMES = {"experiment", "output_dir"}  # these keys differ even between runs of one configuration


def same_but_for_seeds(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the groups of at least two runs whose configurations differ only in seeds, as indices."""
    kinds: dict[str, list[int]] = {}
    for place, config in enumerate(configs):
        rest = {key: value for key, value in config.items() if key.split(".")[-1] != "seed" and key not in _NAMES}
        if rest:
            kinds.setdefault(json.dumps(rest, sort_keys=True), []).append(place)
    return [places for places in kinds.values() if len(places) > 1]


def different_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between the configurations, in the order of the configurations."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if any(config.get(key) != configs[0].get(key) for config in configs)]


# ------------------------------------------------------------------------------------------------------------- images
def images_of(directory: Path, groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the images of groups as data URLs by digest. The last groups come first, up to the limits of a page.

    Images with a missing or invalid file are skipped.
    """
    found: dict[str, str] = {}
    room = MAX_BYTES
    for digest in _digests(groups):
        if len(found) == MAX_IMAGES:
            break
        content = _small(directory / IMAGES / digest)
        if content is None:
            continue
        if len(content) > room:
            break
        room -= len(content)
        kind = "png" if content.startswith(b"\x89PNG") else "jpeg"
        found[digest] = f"data:image/{kind};base64,{b64encode(content).decode()}"
    return found


def _digests(groups: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Return each digest once. Strings that are not digests are skipped, because they could be paths of other files."""
    named = (digest for group in reversed(groups) for digest in group.get(IMAGES) or ())
    return dict.fromkeys(digest for digest in named if isinstance(digest, str) and _DIGEST.fullmatch(digest))


@lru_cache(maxsize=2 * MAX_IMAGES)  # a served page is built many times, and the file of a digest never changes
def _small(path: Path) -> bytes | None:
    """Return an image, upright and scaled down, as PNG if it is small, else as JPEG. Returns None if it cannot be read."""
    from PIL import Image

    from rlhf_mcore.data.image_rows import upright_rgb

    try:
        file = Image.open(io.BytesIO(read_bytes(path, limit=_MAX_FILE_BYTES)), formats=_FORMATS)
        if file.width * file.height > _MAX_PIXELS:
            return None
        file.draft("RGB", (SIDE, SIDE))
        image = upright_rgb(file)
    except Exception:  # a decoder may raise any error for an untrusted file
        return None
    image.thumbnail((SIDE, SIDE))
    content = io.BytesIO()
    image.save(content, "PNG" if image.width * image.height <= SIDE**2 // 4 else "JPEG", quality=80)
    return content.getvalue()
