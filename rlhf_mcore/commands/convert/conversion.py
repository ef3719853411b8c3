"""The steps of ``rlhf-mcore convert``: open and check the source, write, check the result, and report."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from torch import Tensor

from rlhf_mcore.bridge.files.formats import fsdp, torch_dist
from rlhf_mcore.bridge.files.formats.convert import (
    Reading,
    agree,
    checked_types,
    main_dtype,
    num_parameters,
    transient_directory,
    whole_directory,
    write_hf,
    write_megatron,
)
from rlhf_mcore.bridge.files.formats.source import AdaptedSource, AverageSource, HFSource, ModelSource
from rlhf_mcore.bridge.files.formats.torch_dist_writer import targets
from rlhf_mcore.bridge.files.hf_files import adapter_companions, copy_companions, open_adapters
from rlhf_mcore.bridge.files.tensor_files import TensorTypes
from rlhf_mcore.bridge.map.rules import row_runs
from rlhf_mcore.checkpoint.delta import checked_model
from rlhf_mcore.checkpoint.layout import MANIFEST, scan
from rlhf_mcore.cli.terminal import progress_bar, say, working
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import FAMILIES, head_fields
from rlhf_mcore.families.mtp import mtp_tensors, num_mtp_layers
from rlhf_mcore.families.sizes import rope_type
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.machine import memory_bytes
from rlhf_mcore.observability.files import full_disk_named
from rlhf_mcore.platform import DTYPES
from rlhf_mcore.platform.cpu_libraries import declare_image_operators
from rlhf_mcore.readers.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapted_model,
    adapted_modules,
    base_model,
    holds_adapter,
)
from rlhf_mcore.readers.model_files import architecture, needs_own_code, read_config, read_geometry
from rlhf_mcore.readers.stored_formats import read_stored_format

_PROMPT_TOKENS = 8  # number of tokens for the comparison of logits


@dataclass(frozen=True, slots=True)
class Conversion:
    """The arguments of a conversion. ``destination`` may be None in a dry run."""

    source_format: str
    target_format: str
    source: Path
    destination: Path | None = None
    role: str = "actor"
    dtype: str | None = None
    shard_bytes: int = 4 * 2**30
    average: list[Path] = field(default_factory=list)
    hf_config: Path | None = None
    verify: bool = False
    dry_run: bool = False
    overwrite: bool = False
    allow_nonfinite: bool = False
    check_records: bool = True
    merge: bool = False  # merge the adapters into the weights of their base model


@dataclass(frozen=True, slots=True)
class Converted:
    """A converted model in ``directory``, and its size."""

    directory: Path
    num_tensors: int
    num_parameters: int
    num_bytes: int


def run(request: Conversion) -> Converted | None:
    """Convert a model, or print the map of tensors in a dry run and return None.

    Raises:
        ConfigError: the source is incomplete, unsafe or of an unknown family, or the destination cannot be created.
    """
    if request.destination is None and not request.dry_run:
        raise ConfigError("DST is missing; give the directory to create, or --dry-run")
    for path in (request.source, *request.average):
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory (looked from {Path.cwd()}); correct the path")
    if request.source_format == "checkpoint":
        given, average = request.source, [newest_checkpoint(path) for path in request.average]
        request = replace(request, source=newest_checkpoint(given), average=average)
        if request.source != given:
            _note(f"{given}: a run directory; converting {request.source.name}")
    # Shards contain device meshes of other processes. torch would warn about them, but here they are only read.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    root = _root(request)
    has_adapters = holds_adapter(root)
    if request.merge and not has_adapters:
        raise ConfigError(f"--merge: {root} holds no adapters; remove --merge")
    with ExitStack() as cleanup:
        if has_adapters and not request.merge:
            _copy_adapters(request, cleanup)
            return None
        companions = _companions(request)
        if request.merge:
            companions = _with_head(root, companions, cleanup)
        return _convert(request, companions, cleanup)


def _convert(request: Conversion, companions: Path, cleanup: ExitStack) -> Converted | None:
    geometry, hf_config = read_geometry(companions), read_config(companions, str(companions))
    directories = [request.source, *request.average]
    if request.source_format == "checkpoint":
        directories = _checked_models(request, directories, cleanup)
    sources = [_open(request, path, companions, geometry) for path in directories]
    source = AverageSource(sources) if len(sources) > 1 else sources[0]
    types = checked_types(source, geometry)
    if request.target_format == "megatron" and (mtp := mtp_tensors(types, hf_config)):
        _note(
            f"note: the MTP layers of {request.source} ({len(mtp)} tensors) are not converted, because this tool has no Megatron "
            "names for them"
        )
        types = {name: kind for name, kind in types.items() if name not in mtp}
    if request.dtype is not None:
        types = {name: (DTYPES[request.dtype], shape) for name, (_, shape) in types.items()}
    if request.dry_run:
        _print_map(request, source, geometry, types)
        return None
    assert request.destination is not None
    total = _num_bytes(types)
    with (
        full_disk_named(request.destination, total),
        whole_directory(request.destination, overwrite=request.overwrite) as directory,
    ):
        with progress_bar(Console(stderr=True), "converting", total) as advance:
            reading = Reading(source, types, advance, is_checked=not request.allow_nonfinite)
            if request.target_format == "hf":
                write_hf(reading, directory, request.shard_bytes)
                if request.merge:  # prefer the tokenizer in the adapters' directory, which was used for training
                    _copy(adapter_companions([directories[0]]), directory)
            else:
                write_megatron(reading, geometry, directory, request.shard_bytes)
        written = _check_written(request, directory, geometry, types)
        if request.verify:
            _verify(reading, written)
    for part in _unnamed_parts(geometry, hf_config) if request.target_format == "megatron" else ():
        _note(f"note: Megatron-LM's arguments have no name for {part}; set it where you load the checkpoint")
    size = f"{total / 1e9:.2f} GB" if total >= 1e8 else f"{total / 1e6:.2f} MB"
    verified = ", verified" if request.verify else ""
    converted = Converted(request.destination, len(types), num_parameters(types), total)
    _note(
        f"{converted.directory}: {converted.num_tensors} tensors, {converted.num_parameters:,} parameters, {size}{verified}"
    )
    return converted


def _note(text: str) -> None:
    say(text, file=sys.stderr)


def _num_bytes(types: TensorTypes) -> int:
    return sum(prod(shape) * dtype.itemsize for dtype, shape in types.values())


def _unnamed_parts(geometry: ModelGeometry, hf_config: Fields) -> Iterator[str]:
    """Yield the parts of a model that the arguments in a Megatron checkpoint cannot describe."""
    kind, family = rope_type(hf_config), FAMILIES[geometry.family]
    if kind not in ("default", "llama3"):
        yield f"rope type {kind!r}"
    if family.activation != "silu":
        yield f"activation {family.activation!r}"
    if family.norms != "inputs":
        yield "norms of the outputs of attention and MLP"
    if family.norm_of_projections:
        yield "norms of queries and keys of all heads together"
    if family.scales_embeddings:
        yield "scaled embeddings"


def _root(request: Conversion) -> Path:
    """Return the directory of the model in the source."""
    return _role_directory(request.source, request.role) if request.source_format == "checkpoint" else request.source


def _copy_adapters(request: Conversion, cleanup: ExitStack) -> None:
    """Copy a PEFT directory, after comparing it with its manifest and its base model.

    Raises:
        ConfigError: it is damaged, or the options ask for a conversion instead of a copy.
    """
    root = _root(request)
    asked = {
        "--dtype": request.dtype,
        "--average": request.average,
        "--to megatron": request.target_format == "megatron",
    }
    if given := [name for name, value in asked.items() if value]:
        raise ConfigError(f"{given[0]}: {root} contains adapters, which are only copied; leave it out, or add --merge")
    model = adapted_model(root, request.hf_config or base_model(root))
    if request.source_format == "checkpoint":
        [root] = _checked_models(request, [request.source], cleanup)
    _, adapters = open_adapters(root, model)
    files = [root / ADAPTER_CONFIG, root / ADAPTER_WEIGHTS, *adapter_companions([root])]
    if request.dry_run:
        say("\n".join(f"{file.name} <- {file}" for file in files))
        return
    assert request.destination is not None
    total = sum(file.stat().st_size for file in files)
    with (
        full_disk_named(request.destination, total),
        whole_directory(request.destination, overwrite=request.overwrite) as directory,
    ):
        _copy(files, directory)
    _note(
        f"{request.destination}: adapters of {len(adapted_modules(adapters))} layers, {total / 1e6:.2f} MB; --merge writes a whole "
        "model"
    )


def _copy(files: Sequence[Path], directory: Path) -> None:
    for file in files:
        shutil.copyfile(file, directory / file.name)


def _companions(request: Conversion) -> Path:
    """Return the directory with config.json: from the command line, in the source, or at its usual place in the source's format."""
    root = _root(request)
    places = [root, root / fsdp.COMPANIONS, root.parent / torch_dist.COMPANIONS]
    if request.hf_config:
        places = [request.hf_config]
    elif request.merge:
        places = [Path(base_model(root))]
    directory = next((place for place in places if (place / "config.json").is_file()), None)
    if directory is None:
        raise ConfigError(
            f"{places[0]}: no config.json; name the directory of the Hugging Face model with --hf-config DIR"
        )
    config = read_config(directory, str(directory))
    if needs_own_code(config):
        raise ConfigError(
            f"{directory}: config.json has auto_map, which would run code from the directory; use a model without it"
        )
    read_stored_format(config)  # raises for formats that are not dequantised
    return directory


def _with_head(adapters: Path, base: Path, cleanup: ExitStack) -> Path:
    """Return a directory with the config.json of ``base`` for the head of its adapters: ``base`` itself, or a changed copy."""
    geometry = adapted_model(adapters, base)
    if geometry == read_geometry(base):
        return base
    hf_config = read_config(base, str(base))
    fields = head_fields(architecture(hf_config), geometry.head, has_mtp=bool(num_mtp_layers(hf_config)))
    companions = Path(cleanup.enter_context(TemporaryDirectory(prefix="rlhf-mcore-convert-")))
    copy_companions([base], companions, main_dtype(HFSource(base, base).types), fields)
    return companions


def _open(request: Conversion, path: Path, companions: Path, geometry: ModelGeometry) -> ModelSource:
    if request.merge:
        return AdaptedSource(path, request.hf_config or Path(base_model(_root(request))), geometry, companions)
    if request.source_format == "megatron":
        return torch_dist.open_torch_dist(
            torch_dist.find_checkpoint(path), companions, geometry, check=request.check_records
        )
    if request.source_format == "fsdp":
        return fsdp.open_fsdp(path, companions, geometry, check=request.check_records)
    return HFSource(path, path if request.source_format == "checkpoint" and not request.hf_config else companions)


def _checked_models(request: Conversion, checkpoints: Sequence[Path], cleanup: ExitStack) -> list[Path]:
    """Verify the hashes of checkpoints. Returns for each a directory with the files of the role's model that its manifest names.

    Raises:
        ConfigError: a checkpoint is damaged.
    """
    for checkpoint in checkpoints:
        _role_directory(checkpoint, request.role)
    if request.destination is None:
        scratch = Path(cleanup.enter_context(TemporaryDirectory(prefix="rlhf-mcore-convert-")))
    else:  # the weights of a delta may not fit into the system's temporary folder
        beside = request.destination.absolute()
        if request.dry_run:  # a dry run creates no parent directories
            beside = next(folder for folder in beside.parents if folder.is_dir()) / beside.name
        scratch = cleanup.enter_context(transient_directory(beside, "source"))
    return [checked_model(checkpoint, request.role, scratch) for checkpoint in checkpoints]


def newest_checkpoint(directory: Path) -> Path:
    """Return ``directory`` if it is a checkpoint, else the newest checkpoint in it, if any."""
    checkpoints = scan(directory) if not (directory / MANIFEST).is_file() else []
    return checkpoints[-1].path if checkpoints else directory


def _role_directory(checkpoint: Path, role: str) -> Path:
    """Return the model directory of a role in ``checkpoint-<step>``.

    Raises:
        ConfigError: there is no committed checkpoint, or it does not contain the role.
    """
    if not (checkpoint / MANIFEST).is_file():
        raise ConfigError(
            f"{checkpoint}: no {MANIFEST}, so no committed checkpoint is here; give a checkpoint-<step> or a run directory, "
            "or use --from hf"
        )
    if not (checkpoint / role).is_dir():
        raise ConfigError(f"--role={role}: {checkpoint} does not contain a model {role}")
    return checkpoint / role


def _check_written(request: Conversion, directory: Path, geometry: ModelGeometry, types: TensorTypes) -> ModelSource:
    """Open the written model, and check its names, shapes, dtypes and number of parameters."""
    if request.target_format == "hf":
        companions = directory
        written: ModelSource = HFSource(directory, directory)
    else:
        companions = directory / torch_dist.COMPANIONS
        written = torch_dist.open_torch_dist(torch_dist.find_checkpoint(directory), companions, geometry)
    assert read_geometry(companions) == geometry
    assert checked_types(written, geometry) == types, "what was written is not what was meant"
    return written


def _verify(reading: Reading, written: ModelSource) -> None:
    again, total = Reading(written, reading.types), _num_bytes(reading.types)
    with progress_bar(Console(stderr=True), "verifying", total) as again.progress:
        for name in reading.types:
            for _ in again.blocks(name):
                pass
    agree(reading.digests, again.digests, written.directory)
    mtp = mtp_tensors(reading.types, read_config(reading.source.companions, str(reading.source.companions)))
    # transformers has no MTP layers.
    types = {name: described for name, described in reading.types.items() if name not in mtp}
    with working("comparing outputs in transformers"):
        skipped = compare_logits(Reading(reading.source, types), Reading(written, types), total)
    if skipped:
        _note(f"logits were not compared: {skipped}")


def _print_map(request: Conversion, source: ModelSource, geometry: ModelGeometry, types: TensorTypes) -> None:
    """Print every tensor of the destination with its source."""
    if request.target_format == "hf":
        for name, (dtype, shape) in types.items():
            say(f"{name} {list(shape)} {_short(dtype)} <- {source.origin(name)}")
    else:
        for target in targets(geometry):
            runs, shape = row_runs(target.parameter, geometry)
            names = dict.fromkeys(run.hf_name for run in runs)
            where = "".join(f"[{k}]" for k in target.lead)
            origins = ", ".join(f"{name} ({source.origin(name)})" for name in names)
            say(f"{target.key}{where} {list(shape)} {_short(types[next(iter(names))][0])} <- {origins}")
    say(f"{len(types)} tensors, {num_parameters(types)} parameters, {_num_bytes(types)} bytes")


def _short(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def compare_logits(source: Reading, written: Reading, total_bytes: int) -> str:
    """Compare the outputs of both models on a short prompt. Returns the reason if the comparison was skipped, else "".

    Raises:
        ConfigError: the outputs differ.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    needed, available = 3 * total_bytes, memory_bytes().get("MemAvailable", 0)
    if needed > available // 2:
        return f"the comparison needs twice {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"
    directory = written.source.directory
    before, after = _outputs(source), _outputs(written, reads_directory=written.source.companions == directory)
    if not torch.equal(before, after):
        largest = float((before.float() - after.float()).abs().max())
        raise ConfigError(f"{directory}: the outputs on a short prompt differ from the source's by up to {largest:.3g}")
    return ""


def _outputs(reading: Reading, *, reads_directory: bool = False) -> Tensor:
    """Compute outputs [1, tokens, vocabulary or labels] with transformers, from the model's directory or from its tensors."""
    import transformers

    declare_image_operators()
    files = reading.source.companions
    config = transformers.AutoConfig.from_pretrained(files, local_files_only=True)
    tensors = (
        None if reads_directory else {n: torch.cat([part for _, part in reading.blocks(n)]) for n in reading.types}
    )
    if tensors is not None and hasattr(config, "quantization_config"):
        del config.quantization_config  # the tensors are already dequantised
    given = {"config": config, "state_dict": tensors} if tensors is not None else {"use_safetensors": True}
    model_class, talk = getattr(transformers, config.architectures[0]), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # transformers skips MTP layers, and would report them as an error
    try:
        model = model_class.from_pretrained(
            None if tensors is not None else files, local_files_only=True, dtype=main_dtype(reading.types), **given
        ).eval()
    finally:
        transformers.logging.set_verbosity(talk)
    token_ids = torch.arange(_PROMPT_TOKENS).unsqueeze(0) % model.config.get_text_config().vocab_size
    with torch.no_grad():
        logits: Tensor = model(input_ids=token_ids).logits
    return logits
