"""Read damaged or hostile checkpoints of other trainers: shards (zips of pickles), indexes and directories."""

from __future__ import annotations

import pickle
import struct
import sys
import tracemalloc
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_mcore.bridge.files.formats import fsdp
from rlhf_mcore.bridge.files.formats.convert import Reading
from rlhf_mcore.bridge.files.formats.foreign_pickle import read_pickle
from rlhf_mcore.bridge.files.formats.foreign_tensors import load_file, load_part
from rlhf_mcore.bridge.files.formats.torch_dist import find_checkpoint, read_index
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.model_files import read_geometry
from tests.unit.hostile.refusals import refusal
from tests.unit.hostile.test_config_json import LLAMA, write

LONG = 2**40


# -------------------------------------------------------------------------------------------------------------- tensors
def _make_quantised() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "quantised": (_make_quantised, "a quantised tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "a sparse tensor"),
    "compressed sparse": (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor"),
    "without values": (lambda: torch.empty(3, device="meta"), "a meta tensor"),
    "a number": (lambda: 1, "not a tensor"),
    "nothing": (lambda: None, "not a tensor"),
    "a text": (lambda: "x", "not a tensor"),
    "a list": (lambda: [torch.ones(1)], "not a tensor"),
    "a dictionary": (lambda: {"a": torch.ones(1)}, "not a tensor"),
    "a dtype": (lambda: torch.float32, "not a tensor"),
    "a shape": (lambda: torch.Size([1]), "not a tensor"),
    "a path": (lambda: Path("x"), "refused"),  # this class is allowed by some libraries
    "a storage": (lambda: torch.ones(2).untyped_storage(), "not a tensor"),
    "a function": (lambda: print, "GLOBAL print was not an allowed global"),
    "an object": (
        lambda: ConfigError("x"),
        "GLOBAL rlhf_mcore.config.errors.ConfigError was not an allowed global",
    ),
    "a set": (lambda: {1, 2}, "not a tensor"),
    "bytes": (lambda: bytearray(b"x"), "not a tensor"),
}


def test_what_is_no_plain_tensor_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(VALUES):
        here = tmp_path / str(number)
        here.mkdir()
        make, message = VALUES[name]
        with patch.dict(sys.modules):
            # pickle asks all modules for a name. transformers would then import all its parts, some of which need torchvision.
            for module in [module for module in sys.modules if module.partition(".")[0] == "transformers"]:
                del sys.modules[module]
            torch.save({"model.norm.weight": make()}, here / "shard.pt")
        found = refusal(load_file, here / "shard.pt")
        assert message in found
        assert "shard.pt: refused" in found


def test_what_is_no_dictionary_of_tensors(tmp_path: Path) -> None:
    for number, value in enumerate([torch.ones(2), [], None, 7, {1: torch.ones(1)}, {("a", "b"): torch.ones(1)}]):
        here = tmp_path / str(number)
        here.mkdir()
        torch.save(value, here / "shard.pt")
        assert "refused" in refusal(load_file, here / "shard.pt")


def test_plain_tensors_are_read(tmp_path: Path) -> None:
    for number, tensor in enumerate(
        [
            torch.arange(12.0).view(3, 4),
            torch.arange(12.0).view(3, 4).t(),
            torch.arange(12.0)[3:7],
            torch.tensor(3.0),
            torch.ones(0, 4),
            torch.nn.Parameter(torch.arange(3.0)),
            torch.arange(4).to(torch.bfloat16),
            torch.arange(4.0).to(torch.float8_e4m3fn),
            torch.arange(6, dtype=torch.int64),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        path = here / "shard.pt"
        torch.save(OrderedDict(a=torch.ones(5), b=tensor), path)
        values = load_file(path)["b"].local
        assert torch.equal(values.float(), tensor.detach().float())
        assert values.dtype == tensor.dtype


# --------------------------------------------------------------------------------------------------------------- zips
def pickle_description(**changes: Any) -> bytes:
    """Pickle the description of one float tensor of four elements as torch writes it, with some changes."""
    said = {"kind": "torch FloatStorage", "key": "0", "numel": 4, "first": 0, "size": (4,), "stride": (1,), **changes}

    def value(item: Any) -> bytes:
        if isinstance(item, tuple):
            return b"(" + b"".join(map(value, item)) + b"t"
        if isinstance(item, str):
            return b"X" + struct.pack("<I", len(item)) + item.encode()
        return b"\x8a\x09" + item.to_bytes(9, "little", signed=True)

    module, name = said["kind"].split()
    storage = b"(" + value("storage") + f"c{module}\n{name}\n".encode() + value(said["key"]) + value("cpu")
    storage += value(said["numel"]) + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + value(said["first"]) + value(said["size"])
    tensor += value(said["stride"]) + b"\x89}tR"
    return b"\x80\x02}" + value("a") + tensor + b"s."


def zip_shard(
    path: Path, data: bytes, *, storage: bytes = bytes(16), order: bytes = b"little", method: int = 0
) -> Path:
    with zipfile.ZipFile(path, "w", compression=method) as archive:
        archive.writestr("shard/data.pkl", data)
        archive.writestr("shard/version", b"3\n")
        archive.writestr("shard/byteorder", order)
        archive.writestr("shard/data/0", storage)
    return path


def test_the_description_that_is_changed_below(tmp_path: Path) -> None:
    path = zip_shard(tmp_path / "shard.pt", pickle_description(), storage=struct.pack("<4f", 1, 2, 3, 4))
    assert load_file(path)["a"].local[1:3].tolist() == [2.0, 3.0]


def test_descriptions_that_do_not_fit_their_storage(tmp_path: Path) -> None:
    for number, (changes, message) in enumerate(
        [
            ({"numel": 5}, "its storage is not as large as its description states"),
            ({"numel": -4}, "refused"),
            ({"numel": LONG}, "its storage is not as large as its description states"),
            ({"numel": "4"}, "refused"),
            ({"key": "1"}, "failed locating file data/1"),
            ({"key": "../../etc/passwd"}, "failed locating file data/../../etc/passwd"),
            ({"first": 1}, "refused"),
            ({"first": -1}, "invalid storage offset"),
            ({"size": (LONG, LONG), "stride": (1, 1)}, "overflow"),
            ({"size": (-4,)}, "refused"),
            ({"size": 4}, "refused"),
            ({"stride": (1, 1)}, "stride length"),
            ({"stride": (-1,)}, "refused"),
            ({"kind": "torch QInt8Storage"}, "quantised"),
            ({"kind": "torch DoubleStorage"}, "its storage is not as large as its description states"),
            ({"kind": "torch Storage\x1b[2J"}, "GLOBAL torch.Storage\\x1b[2J was not an allowed global"),
            ({"kind": "os system"}, "GLOBAL os.system"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        path = zip_shard(here / "shard.pt", pickle_description(**changes))
        assert message in refusal(load_file, path)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


VALUES_OF_A = bytes(range(16))


def _storage_at(path: Path) -> int:
    return path.read_bytes().index(VALUES_OF_A)


def _huge_directory(path: Path) -> None:
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\x05\x06")
    data[at + 12 : at + 16] = struct.pack("<I", 2**31)
    path.write_bytes(bytes(data))


def test_files_that_are_damaged(tmp_path: Path) -> None:
    for number, (damage, message) in enumerate(
        [
            (lambda path: _flip(path, _storage_at(path)), "data/0 does not match its checksum"),
            (lambda path: zip_shard(path, pickle_description(), method=zipfile.ZIP_DEFLATED), "compressed"),
            (lambda path: zip_shard(path, pickle_description(), order=b"x" * 100), "refused"),
            (lambda path: zip_shard(path, b""), "refused"),
            (lambda path: path.write_bytes(b"PK\x05\x06" + bytes(18)), "refused"),
            (_huge_directory, "refused"),
            (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "a device, not a regular file"),
            (lambda path: (path.unlink(), path.mkdir()), "a directory, not a regular file"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        path = zip_shard(here / "shard.pt", pickle_description(), storage=VALUES_OF_A)
        damage(path)
        assert message in refusal(load_file, path)


def test_checksums_may_be_left_out(tmp_path: Path) -> None:
    path = zip_shard(tmp_path / "shard.pt", pickle_description(), storage=VALUES_OF_A)
    _flip(path, _storage_at(path))
    assert load_file(path, check=False)["a"].local.shape == (4,)


def test_a_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.distcp"
    whole = zip_shard(tmp_path / "shard.pt", pickle_description()).read_bytes()
    path.write_bytes(b"before" + whole + b"behind")
    for offset, length in [(0, len(whole)), (6, len(whole) - 40), (6, 0), (LONG, 10)]:
        assert f"no tensor at byte {offset}" in refusal(
            lambda offset=offset, length=length: load_part(path, offset, length)
        )
    torch.save(torch.arange(3.0), tmp_path / "t")
    path.write_bytes(b"before" + (tmp_path / "t").read_bytes())
    assert load_part(path, 6, path.stat().st_size - 6).tolist() == [0.0, 1.0, 2.0]
    for numel in (5, -4, LONG):
        lying = zip_shard(tmp_path / "lying.pt", pickle_description(numel=numel))
        assert "no tensor at byte 0" in refusal(load_part, lying, 0, lying.stat().st_size)


# ------------------------------------------------------------------------------------------------------------- pickles
NESTED = b"\x80\x02)" + b"\x85" * 20_000
PICKLES: dict[str, tuple[bytes, str]] = {
    "a memo index of 2**31": (b"\x80\x02Nr\xff\xff\xff\x7f.", "not the index"),
    "a memo index of 2**32": (b"\x80\x02Nr\xff\xff\xff\xff.", "not the index"),
    "a memo that is not there": (b"\x80\x02j\xff\xff\xff\x7f.", "refused"),
    "a text of 2**31 bytes": (b"\x80\x02X\xff\xff\xff\x7fx.", "refused"),
    "a text of 2**62 bytes": (b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.", "refused"),
    "bytes of 2**31 bytes": (b"\x80\x03B\xff\xff\xff\x7fx.", "refused"),
    "bytes of 2**62 bytes": (b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.", "refused"),
    "an array of bytes": (b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.", "is not supported"),
    "a frame of 2**62 bytes": (b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.", "refused"),
    "a long integer": (b"\x80\x02\x8b\xff\xff\xff\x7f\x01.", "is not supported"),
    "tuples in tuples as a key": (b"\x80\x02}" + NESTED[2:] + b"Ns.", "a dictionary with unsupported keys"),
    "tuples in tuples in a set": (b"\x80\x04\x8f(" + NESTED[2:] + b"\x90.", "a malformed set"),
    "tuples in tuples": (NESTED + b".", "not the index"),
    "no pickle": (b"hello", "refused"),
    "nothing": (b"", "refused"),
    "an end": (b".", "refused"),
    "a protocol of tomorrow": (b"\x80\xffN.", "refused"),
    "a call": (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "os.system is not allowed"),
    "a call by stack": (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "builtins.eval is not allowed"),
    "a call of a dictionary": (b"\x80\x02})R.", "a call of something other than a name"),
    "a call with no arguments": (b"\x80\x02ctorch\nload\nNR.", "a call of something other than a name"),
    "an instance": (b"\x80\x02(ios\nsystem\n.", "is not supported"),
    "an extension": (b"\x80\x02\x82\x01.", "is not supported"),
    "state of a name": (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}b.",
        "state of an object without state",
    ),
    "another object": (b"\x80\x02ctorch\nSize\n)R.", "not the index"),
    "an odd pid": (b"\x80\x02NQ.", "is not supported"),
}


def test_pickles(tmp_path: Path) -> None:
    for number, name in enumerate(PICKLES):
        here = tmp_path / str(number)
        here.mkdir()
        data, message = PICKLES[name]
        (here / ".metadata").write_bytes(data)
        tracemalloc.start()
        try:
            assert message in refusal(read_index, here / ".metadata", bool)
            assert tracemalloc.get_traced_memory()[1] < 2**22 + 200 * len(data)  # twelve bytes once took 4.4 GB
        finally:
            tracemalloc.stop()
        zip_shard(here / "shard.pt", data)
        refusal(load_file, here / "shard.pt")


def index_of(tmp_path: Path, edit: Callable[[Any], object]) -> Path:
    """Return torch's index of one tensor, edited."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    size = torch.Size([4])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    index = Metadata(
        {"w": TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk])},
        storage_data={MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 100)},
    )
    edit(index)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    return tmp_path / ".metadata"


def _first_storage(index: Any) -> Any:
    return next(iter(index.storage_data.values()))


def test_the_index_that_is_changed_below(tmp_path: Path) -> None:
    (found,) = read_index(index_of(tmp_path, lambda index: None), bool).values()
    assert (found.dtype, found.shape, found.parts[0].file, found.parts[0].length) == (
        torch.float32,
        (4,),
        "__0_0.distcp",
        100,
    )


def test_indexes_that_lie(tmp_path: Path) -> None:
    for number, (edit, message) in enumerate(
        [
            (lambda i: setattr(_first_storage(i), "offset", -1), "starts before its file"),
            (lambda i: setattr(_first_storage(i), "length", "100"), "has a malformed place"),
            (lambda i: setattr(i.state_dict_metadata["w"], "size", "4"), "a malformed shape"),
            (lambda i: setattr(i.state_dict_metadata["w"], "size", (2**60,)), "an impossible shape"),
            (lambda i: setattr(i.state_dict_metadata["w"], "chunks", None), "more parts than there are"),
            (lambda i: setattr(i.state_dict_metadata["w"], "chunks", [None]), "a part of w is malformed"),
            (lambda i: setattr(i.state_dict_metadata["w"].chunks[0], "offsets", (1,)), "is in no file"),
            (lambda i: setattr(i.state_dict_metadata["w"], "properties", None), "has no dtype"),
            (
                lambda i: setattr(i.state_dict_metadata["w"].properties, "dtype", "float32"),
                "is not supported for weights",
            ),
            (lambda i: setattr(i, "storage_data", []), "not the index"),
            (lambda i: i.storage_data.update(x=1), "an entry of storage_data is malformed"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        assert message in refusal(read_index, index_of(here, edit), bool)


# ---------------------------------------------------------------------------------------------------------- directories
def test_names_of_shards(tmp_path: Path) -> None:
    for number, (names, message) in enumerate(
        [
            (
                ["model_world_size_999999999_rank_0.pt"],
                "999999998 files are missing: model_world_size_999999999_rank_1.pt",
            ),
            (["model_world_size_1000000000_rank_0.pt"], "no model_world_size_X_rank_Y.pt found"),
            (["model_world_size_0_rank_0.pt"], "rank 0 is outside world size 0"),
            (["model_world_size_2_rank_0.pt", "model_world_size_2_rank_7.pt"], "rank 7 is outside world size 2"),
            (["model_world_size_2_rank_0.pt", "model_world_size_3_rank_1.pt"], "world sizes [2, 3] are mixed"),
            (["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"], "0 bytes, but at least 1 are required"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        for name in names:
            (here / name).touch()
        geometry = read_geometry(write(here / "huggingface", LLAMA))
        assert message in refusal(fsdp.open_fsdp, here, here / "huggingface", geometry)


def test_trackers(tmp_path: Path) -> None:
    for number, content in enumerate(["", "../..", "9" * 100, "x" * 5000, "\x1b[2J", "-1", "\u0661"]):
        here = tmp_path / str(number)
        here.mkdir()
        (here / "latest_checkpointed_iteration.txt").write_text(content)
        assert "latest_checkpointed_iteration.txt" in refusal(find_checkpoint, here)


def test_backends(tmp_path: Path) -> None:
    for number, content in enumerate(
        ["{}", "[]", '{"sharded_backend": 1}', '{"sharded_backend": "zarr"}', "{", '{"a": NaN}']
    ):
        here = tmp_path / str(number)
        here.mkdir()
        (here / ".metadata").touch()
        (here / "metadata.json").write_text(content)
        assert "metadata.json" in refusal(find_checkpoint, here)


# -------------------------------------------------------------------------------------------------------------- values
class _Source:
    directory = companions = Path("source")
    types = {"w": (torch.float32, (6, 2)), "v": (torch.float32, (3,))}  # noqa: RUF012

    def __init__(self, value: float):
        self._tensors = {"w": torch.zeros(6, 2), "v": torch.zeros(3)}
        self._tensors["w"][4, 1] = self._tensors["v"][2] = value

    def read(self, name: str, first: int, count: int) -> torch.Tensor:
        return self._tensors[name][first : first + count]

    def release(self) -> None:
        pass


def test_weights_that_are_not_finite_are_named() -> None:
    for value in [float("nan"), float("inf"), -float("inf")]:
        source: Any = _Source(value)
        checked = Reading(source, source.types, is_checked=True)
        assert "source: w has values that are not finite (NaN or infinite) from row 4 on" in refusal(
            checked.rows, "w", 3, 3
        )
        assert "v has values that are not finite (NaN or infinite) from row 2 on" in refusal(checked.rows, "v", 0, 3)
        assert checked.rows("w", 0, 3).shape == (3, 2)
        assert Reading(source, source.types).rows("w", 3, 3).shape == (3, 2)


# -------------------------------------------------------------------------------------------------------------- fuzzing
def _harmless(action: Callable[[], object]) -> None:
    try:
        action()
    except ConfigError as error:
        assert len(str(error)) < 2000


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_descriptions(tmp_path: Path, changes: list[tuple[float, int]]) -> None:
    data = bytearray(pickle_description())
    for where, byte in changes:
        data[int(where * len(data))] = byte
    _harmless(lambda: load_file(zip_shard(tmp_path / "shard.pt", bytes(data))))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=4), st.booleans())
def test_damaged_files(tmp_path: Path, changes: list[tuple[float, int]], check: bool) -> None:
    data = bytearray(zip_shard(tmp_path / "whole.pt", pickle_description()).read_bytes())
    for where, byte in changes:
        data[int(where * len(data))] = byte
    (tmp_path / "shard.pt").write_bytes(bytes(data))
    _harmless(lambda: load_file(tmp_path / "shard.pt", check=check))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_indexes(tmp_path: Path, changes: list[tuple[float, int]]) -> None:
    data = bytearray(index_of(tmp_path, lambda index: None).read_bytes())
    for where, byte in changes:
        data[int(where * len(data))] = byte
    (tmp_path / ".metadata").write_bytes(bytes(data))
    _harmless(lambda: read_index(tmp_path / ".metadata", bool))


@settings(max_examples=15, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    try:
        read_pickle(b"\x80\x04" + data)
    except ValueError as error:
        assert len(str(error)) <= 200
