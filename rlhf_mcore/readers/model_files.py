"""Read the small files of a Hugging Face model directory, for training or generation."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from os.path import exists, isdir, isfile
from pathlib import Path, PurePosixPath
from typing import Any

from rlhf_mcore.config.errors import ConfigError, FileProblem, join_first
from rlhf_mcore.families import ARCHITECTURES, FAMILIES, UNSUPPORTED, embedding_name
from rlhf_mcore.families.mtp import num_mtp_layers
from rlhf_mcore.families.sizes import size
from rlhf_mcore.foreign import INDEX, SMALL, Fields, MissingFile, ReadLimits, open_file, read_json, shorten
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.hub_ids import absent_hint
from rlhf_mcore.readers.stacked_experts import part_of_stack
from rlhf_mcore.readers.stored_formats import StoredFormat, read_stored_format

SINGLE_FILE = "model.safetensors"
WEIGHT_DTYPES = ("F32", "BF16", "F16")  # names in safetensors
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
CHAT_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Files that are copied with the weights, so that the copy can run the model.
_CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
COMPANIONS = (*_CONFIGS, "added_tokens.json", "merges.txt", *TOKENIZER_FILES, *CHAT_TEMPLATE_FILES, *PROCESSOR_FILES)
_MORE = ("model.language_model.", "language_model.", "model.visual.", "visual.", "model.vision_tower.", "vision_tower.")
_REMEDY = "download or export the model again"
_SAVE_ALONE = "save its language model alone (docs/models/supported.md, Models)"
_SHOWN = 3  # maximum number of tensors in a message
_HEAD = "lm_head.weight"
_PIECE_BYTES = 2**20


def read_geometry(directory: str | Path, head: str | None = None) -> ModelGeometry:
    """Read the geometry from ``config.json`` of a Hugging Face directory. ``head`` replaces its own kind of head.

    Raises:
        ConfigError: the file is missing, a size is missing or invalid, or the architecture is not supported.
    """
    hf_config = read_config(directory, str(directory))
    name = architecture(hf_config)
    if name not in ARCHITECTURES:
        supported = ", ".join(name for name, (_, kind) in ARCHITECTURES.items() if kind == "lm")
        unsupported = f"architecture {shorten(name)} is not supported"
        raise ConfigError(f"{hf_config.where}: {unsupported}; supported are: {supported}")
    family, own = ARCHITECTURES[name]
    geometry = family.geometry(hf_config, own)
    return geometry if head is None else with_head(geometry, head)


def sees_images(directory: str) -> bool:
    """Return whether the model of a Hugging Face directory has a vision tower and a token for images.

    Raises:
        ConfigError: config.json is missing or broken.
    """
    config = read_config(directory, directory)
    return "vision_config" in config and ("image_token_id" in config or "image_token_index" in config)


def with_head(geometry: ModelGeometry, head: str) -> ModelGeometry:
    """Return the geometry of the same model with another head. Only the head "lm" can be tied to the embedding."""
    return replace(geometry, head=head, tied_embeddings=geometry.tied_embeddings and head == "lm")


def inspect_model(path: str, field: str, heads: Collection[str] = ("lm",)) -> tuple[ModelGeometry | None, list[str]]:
    """Return the geometry of the model in directory ``path`` (None if it is unknown), and the problems of the directory.

    ``field`` is the directory's config key. ``heads`` are the allowed kinds of head.
    """
    prefix = f"{field}={path}"
    if not isdir(path):
        where = "is not a directory" if exists(path) else f"does not exist (looked from {Path.cwd()})"
        return None, [f"{prefix} {where}; give the path of a Hugging Face model directory{absent_hint(path)}"]
    problems: list[str] = []
    if model_in_run(path) is None:  # for a run directory, read_config already names its model
        problems += map(FileProblem, weight_problems(Path(path), prefix))
    try:
        hf_config = read_config(path, prefix)
        problems += _config_problems(hf_config, prefix, heads)
        if _is_more(hf_config):
            return None, problems
        geometry = sizes_of(hf_config)
    except ConfigError as error:
        return None, [*error.problems, *problems]
    try:
        different = [] if problems else list(_tensor_problems(Path(path), prefix, geometry, hf_config))
    except ConfigError as error:
        different = error.problems
    return geometry, [*problems, *map(FileProblem, different)]


def _is_more(hf_config: Fields) -> bool:
    """Return whether config.json describes an unsupported multimodal model, with the language model in ``text_config``."""
    return "text_config" in hf_config and architecture(hf_config) not in ARCHITECTURES


def sizes_of(hf_config: Fields) -> ModelGeometry:
    """Read the geometry from a config.json. Unsupported architectures are read by the usual key names."""
    family, _ = ARCHITECTURES.get(architecture(hf_config), (UNSUPPORTED, ""))
    size(family.text(hf_config), "max_position_embeddings")  # raises if it is missing: lengths are compared with it
    return family.geometry(hf_config)


def needs_own_code(hf_config: Fields) -> bool:
    """Return whether loading the model would run code from its directory (``auto_map``).

    The entry has no effect on a model type that transformers contains: without ``trust_remote_code`` its own class is
    used. DeepSeek-V3 is published with such an entry.
    """
    known = ARCHITECTURES.get(architecture(hf_config))
    is_known = known is not None and hf_config.text("model_type", default="").startswith(known[0].name)
    return "auto_map" in hf_config and not is_known


def stored_format_of(directory: str | Path) -> StoredFormat | None:
    """Return the quantised format of a directory's weights, or None if they are not quantised.

    Raises:
        ConfigError: the format is not supported, or config.json is broken.
    """
    if not isfile(Path(directory, "config.json")):
        return None
    return read_stored_format(read_config(directory, str(directory)))


def read_config(directory: str | Path, prefix: str) -> Fields:
    """Read ``config.json`` of a model directory. ``prefix`` names that directory in messages.

    Raises:
        ConfigError: it is missing or unreadable.
    """
    return _read(Path(directory) / "config.json", prefix, SMALL)


def _read(file: Path, prefix: str, limits: ReadLimits) -> Fields:
    try:
        return read_json(file, limits=limits, where=f"{prefix}: {file.name}", remedy=_REMEDY)
    except MissingFile as error:
        cure = "it is not a Hugging Face model directory"
        if isfile(file.parent / "adapter_config.json"):
            cure = "it contains adapters; use a whole model, written by rlhf-mcore convert --from hf --to hf --merge"
        elif model := model_in_run(file.parent):
            cure = f"it contains checkpoints; use the model of a checkpoint: {model}"
        raise ConfigError(f"{prefix} has no {file.name}; {cure}") from error


def model_in_run(directory: str | Path) -> Path | None:
    """Return the policy's directory in a run directory or a checkpoint, or None for other directories."""
    models = (Path(directory, "latest", "actor"), Path(directory, "actor"))
    return next((model for model in models if isdir(model)), None)


def tensor_names(folder: Path) -> set[str] | None:
    """Return the names of a model directory's weights, or None if it has none.

    Raises:
        ConfigError: a file is damaged.
    """
    if isfile(folder / INDEX_FILE):
        names = set(_read(folder / INDEX_FILE, str(folder), INDEX).table("weight_map"))
    elif isfile(folder / SINGLE_FILE):
        names = set(read_tensors(folder / SINGLE_FILE))
    else:
        return None
    stored = stored_format_of(folder)
    return names if stored is None else stored.weights(names)


def weight_problems(folder: Path, prefix: str) -> Iterator[str]:
    """List the problems of a directory's weight files. ``prefix`` names the directory in messages."""
    if isfile(folder / INDEX_FILE):
        yield from _index_problems(folder, prefix)
    elif not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
        pickles = f" (only {', '.join(pickled[:3])}; pickle files are not read)" if pickled else ""
        yield f"{prefix} has no *.safetensors{pickles}; save the model with safe_serialization=True"


def _tensor_problems(folder: Path, prefix: str, geometry: ModelGeometry, hf_config: Fields) -> Iterator[str]:
    """Check that the headers of the weights match config.json. ``_some_shapes`` lists the tensors."""
    indexed = isfile(folder / INDEX_FILE)
    files = set(_read(folder / INDEX_FILE, prefix, INDEX).table("weight_map").values()) if indexed else {SINGLE_FILE}
    if not all(isfile(folder / file) and os.path.getsize(folder / file) for file in files):
        return  # ``weight_problems`` reports it
    tensors = {name: tensor for file in sorted(files) for name, tensor in read_tensors(folder / file).items()}
    more = (name for name in tensors if name.startswith(_MORE))
    if geometry.vision is None and (other := next(more, None)) is not None:
        yield f"{prefix}: the weights contain more than a language model ({shorten(other)}); {_SAVE_ALONE}"
        return
    number = geometry.num_layers + num_mtp_layers(hf_config)
    embedding = embedding_name(geometry)
    if any(name.startswith(f"{embedding.rpartition('embed')[0]}layers.{number}.") for name in tensors):
        yield f"{prefix}: the weights have more layers than config.json's num_hidden_layers={geometry.num_layers}; {_REMEDY}"
    different, stored = [], read_stored_format(hf_config)
    matrices = stored.matrices(tensors.keys()) if stored is not None else {}
    for weight, shape in _some_shapes(geometry).items():
        shapes = {weight: [shape]}
        if stored is not None and weight in matrices:
            shapes = stored.part_shapes(matrices[weight], shape)
        for name, allowed in shapes.items():
            part = None if name in tensors else part_of_stack(name)
            if name not in tensors and (part is None or part.tensor not in tensors):
                different.append(f"{name} is missing")
            elif (
                found := tensors[name].shape if part is None else part.shape(tensors[part.tensor].shape)
            ) not in allowed:
                wanted = " or ".join(str(list(each)) for each in allowed)
                different.append(f"{name} is {list(found[:8])}, but config.json requires {wanted}")
    if different:
        yield f"{prefix}: the weights do not match config.json: {join_first(different, _SHOWN)}; {_REMEDY}"
    elif geometry.tied_embeddings and _HEAD in tensors:
        contents = [_content(tensors[name].path, name) for name in (embedding, _HEAD)]
        if any(one != other for one, other in zip_longest(*contents)):
            differs = f"config.json has tie_word_embeddings, but {_HEAD} differs from {embedding}"
            yield f"{prefix}: {differs}, and engines would not use it; set tie_word_embeddings to false, or export the model again"


def _some_shapes(geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors except the head, which may differ, towers, and experts after a layer's first."""
    family = FAMILIES[geometry.family]
    shapes = {
        name: dims for rule in family.rules if "{i}" not in rule.mcore for name, dims in rule.shapes(geometry).items()
    }
    for layer in range(geometry.num_layers):
        for rule in family.layer_rules(geometry, layer):
            shapes |= rule.shapes(geometry, layer)
    return shapes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file. ``dtype`` is safetensors' name (``BF16``)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file.

    Raises:
        ConfigError: it is not a safetensors file, or it is truncated.
    """
    from safetensors import SafetensorError, safe_open

    open_file(path, remedy=_REMEDY).close()
    try:
        with safe_open(path, "np") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: StoredTensor(path, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({shorten(str(error), 200)}); {_REMEDY}") from error


def _content(path: Path, name: str) -> Iterator[bytes]:
    """Yield the bytes of a tensor of a safetensors file in pieces. ``read_tensors`` has checked the header."""
    with open_file(path, remedy=_REMEDY) as file:
        length = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + start)
        for num_left in range(end - start, 0, -_PIECE_BYTES):
            yield file.read(min(num_left, _PIECE_BYTES))


def _index_problems(folder: Path, prefix: str) -> Iterator[str]:
    try:
        index = _read(folder / INDEX_FILE, prefix, INDEX)
        shards = sorted(set(index.table("weight_map").values())) if "weight_map" in index else []
    except ConfigError as error:
        yield str(error)
        return
    if not shards:
        yield f"{prefix}: {INDEX_FILE} has no weight_map; download or export the model again"
    for shard in shards:
        if PurePosixPath(shard).name != shard:
            yield f"{prefix}: {INDEX_FILE} names {shorten(shard)!r}, a path outside the directory; it must name files in it"
        elif not isfile(folder / shard):
            yield f"{prefix}: {INDEX_FILE} names {shorten(shard)}, which is missing; download the model again"


def _unusable(hf_config: Fields, prefix: str) -> Iterator[str]:
    """Report models with code, and quantised formats that loading does not dequantise."""
    if needs_own_code(hf_config):
        yield f"{prefix}: config.json has auto_map, which would run code from the directory; remove the entry"
    try:
        read_stored_format(hf_config)
    except ConfigError as error:
        yield from error.problems


def _config_problems(hf_config: Fields, prefix: str, heads: Collection[str]) -> Iterator[str]:
    yield from _unusable(hf_config, prefix)
    name = architecture(hf_config)
    family, head = ARCHITECTURES.get(name, (UNSUPPORTED, ""))
    if head not in heads:
        supported = (name for name, (_, kind) in ARCHITECTURES.items() if kind in heads)
        whole = f" because it is more than a language model; {_SAVE_ALONE}" if _is_more(hf_config) else ""
        yield f"{prefix}: architecture {shorten(name)} is not supported{whole}; supported are: {', '.join(supported)}"
        return
    text = family.text(hf_config)
    labels = hf_config.object("id2label", default=(0, 1))  # transformers' default is two
    num_labels = hf_config.integer("num_labels", default=len(labels))
    if head != "lm" and num_labels != 1:
        yield f"{prefix}: {name} with {num_labels} labels; a value or a score is one number, so use a model with one label"
    for key in ("hidden_act", "hidden_activation"):
        if (activation := text.text(key, default=family.activation)) != family.activation:
            yield f"{prefix}: {key} {shorten(activation)!r} is not supported, only {family.activation!r}; use another model"
    text.number("rms_norm_eps", 0.0, 1.0, default=None)
    yield from (f"{prefix}: {problem}" for problem in family.problems(hf_config, name))


def architecture(hf_config: Fields) -> str:
    """Return the name of the architecture, or "none" if config.json does not contain it."""
    names = hf_config.texts("architectures", default=None)
    return names[0] if names else "none"


def end_tokens(config: Fields) -> list[int]:
    """Return the tokens that end a response: ``eos_token_id`` of a config, which is a number or a list.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(config.content.get("eos_token_id"), list):
        return config.integers("eos_token_id")
    end = config.integer("eos_token_id", default=None)
    return [] if end is None else [end]


def tokenizer_contents(directory: str) -> Mapping[str, Any]:
    """Return the content of tokenizer.json, or {} if there is no readable file."""
    try:
        return read_json(Path(directory, "tokenizer.json"), limits=INDEX).content
    except ConfigError:
        return {}


def tokenizer_problems(path: str, field: str) -> Iterator[str]:
    """List the problems of a tokenizer directory. Missing directories and run directories are reported elsewhere."""
    folder = Path(path)
    if field != "model.tokenizer_path" and model_in_run(folder) is not None:
        return
    if isdir(folder) and not any(isfile(folder / name) for name in TOKENIZER_FILES):
        missing = f"has no tokenizer (none of {', '.join(TOKENIZER_FILES)})"
        yield f"{field}={path} {missing}; copy the model's tokenizer files there or set model.tokenizer_path"
    if isfile(folder / "tokenizer.json"):
        try:
            read_json(folder / "tokenizer.json", limits=INDEX, remedy="download or export the model again")
        except ConfigError as error:
            yield f"{field}={path}: {error}"


def inspect_generator(path: str, field: str, *, needs_weights: bool = True) -> tuple[ModelGeometry | None, list[str]]:
    """Inspect a directory for generation only, like ``inspect_model``. Any architecture of the engine is allowed.

    ``needs_weights``: whether the directory must contain weights. The geometry is None if config.json does not contain the sizes
    under the usual keys.
    """
    prefix = f"{field}={path}"
    is_delta = any(Path(path).glob("*.safetensors.delta"))  # delta checkpoints are restored before they are read
    problems = [] if is_delta or not needs_weights else list(weight_problems(Path(path), prefix))
    try:
        hf_config = read_config(path, prefix)
        problems += _unusable(hf_config, prefix)
    except ConfigError as error:
        return None, [*error.problems, *problems]
    try:
        return sizes_of(hf_config), problems
    except ConfigError:
        return None, problems
