"""Give `convert` damaged and hostile input. It exits with code 2 and one readable cause, and leaves no files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mcore.bridge.files.formats.torch_dist import read_index
from rlhf_mcore.commands.convert.command import main
from tests.unit.bridge.formats import foreign
from tests.unit.bridge.formats.conftest import HFModel

Get = Callable[[str], HFModel]
Capture = pytest.CaptureFixture[str]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


class Bomb:
    """Runs code if a reader unpickles it without restrictions."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def expect_refusal(capsys: Capture, *arguments: object) -> str:
    """Run convert, which must reject its input. Returns its message. ``DST`` is the last argument."""
    destination = Path(str(arguments[-1]))
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 2
    assert not destination.exists() and not list(destination.parent.glob(f".{destination.name}*"))
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    return message


# ---------------------------------------------------------------------------------------------------------- safetensors
@pytest.fixture
def sharded_model(llama: Path) -> Path:
    """Write the model in two shards."""
    tensors = load_file(llama / SINGLE)
    (llama / SINGLE).unlink()
    names = sorted(tensors)
    halves = {A: names[: len(names) // 2], B: names[len(names) // 2 :]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, llama / file)
    write_map(llama, {name: file for file, held in halves.items() for name in held})
    return llama


def write_map(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def read_map(directory: Path) -> dict[str, str]:
    return json.loads((directory / INDEX).read_text())["weight_map"]


def absent_shard(directory: Path) -> None:
    (directory / B).unlink()


def tensor_in_two_shards(directory: Path) -> None:
    save_file({**load_file(directory / B), "model.embed_tokens.weight": torch.zeros(97, 64)}, directory / B)


def tensor_unknown_to_the_index(directory: Path) -> None:
    save_file({**load_file(directory / B), "model.secret": torch.zeros(1)}, directory / B)


def path_with_dots(directory: Path) -> None:
    shutil.move(directory / B, directory.parent / B)
    write_map(directory, {name: f"../{B}" if file == B else file for name, file in read_map(directory).items()})


def absolute_path(directory: Path) -> None:
    write_map(directory, {n: str(directory / B) if file == B else file for n, file in read_map(directory).items()})


def path_through_a_link(directory: Path) -> None:
    shutil.move(directory / B, directory.parent / "elsewhere.safetensors")
    (directory / B).symlink_to(directory.parent / "elsewhere.safetensors")


def oversized_header(directory: Path) -> None:
    data = (directory / B).read_bytes()
    (directory / B).write_bytes((2**62).to_bytes(8, "little") + data[8:])


def overlapping_offsets(directory: Path) -> None:
    data = (directory / B).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second] = header[first]
    encoded = json.dumps(header).encode()
    (directory / B).write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + size :])


def truncate(directory: Path) -> None:
    os.truncate(directory / B, (directory / B).stat().st_size - 10)


def pickle_as_safetensors(directory: Path) -> None:
    (directory / B).write_bytes(pickle.dumps({"x": Bomb(directory / "exploded")}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (absent_shard, f"weight file {B} is missing"),
        (tensor_in_two_shards, f"tensor model.embed_tokens.weight is in {A} and in {B}"),
        (tensor_unknown_to_the_index, "holds tensor model.secret, which"),
        (path_with_dots, "is not a plain file name"),
        (absolute_path, "is not a plain file name"),
        (path_through_a_link, "outside of the directory"),
        (oversized_header, "not a readable safetensors file"),
        (overlapping_offsets, "not a readable safetensors file"),
        (truncate, "not a readable safetensors file"),
        (pickle_as_safetensors, "not a readable safetensors file"),
    ],
)
def test_shards(sharded_model: Path, capsys: Capture, damage: Callable[[Path], None], message: str) -> None:
    damage(sharded_model)
    assert message in expect_refusal(capsys, "--from", "hf", "--to", "hf", sharded_model, sharded_model.parent / "out")
    assert not (sharded_model / "exploded").exists()


def change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)
    return directory


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"missing tensors: {NORM}"),
        (lambda t: t.update(extra=torch.zeros(1)), "tensors that config.json does not declare: extra"),
        (
            lambda t: t.update({NORM: torch.zeros(63)}),
            f"tensors with a different shape than in config.json: {NORM} (63,) instead of (64,)",
        ),
        (lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int8)}), f"tensor {NORM} is I8"),
        (lambda t: t.update({NORM: torch.zeros(64, dtype=torch.float64)}), f"tensor {NORM} is F64"),
    ],
)
@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_tensors_that_are_not_the_configs(
    llama: Path, capsys: Capture, target: str, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    assert message in expect_refusal(
        capsys, "--from", "hf", "--to", target, change_tensors(llama, change), llama.parent / "out"
    )


def test_pickle_where_safetensors_are_expected(llama: Path, capsys: Capture) -> None:
    (llama / SINGLE).unlink()
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(llama / "exploded")))
    assert "pytorch_model.bin, which is pickle and is not read" in expect_refusal(
        capsys, "--from", "hf", "--to", "hf", llama, llama.parent / "out"
    )
    assert not (llama / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}, "model_type": "evil"}, "auto_map"),
        ({"quantization_config": {}}, "quantization_config.quant_method"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"num_hidden_layers": "4"}, "config.json has num_hidden_layers='4', not an integer"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the embedding, but config.json ties them"),
    ],
)
def test_configs(llama: Path, capsys: Capture, change: dict[str, Any], message: str) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **change}))
    assert message in expect_refusal(capsys, "--from", "hf", "--to", "hf", llama, llama.parent / "out")
    assert message in expect_refusal(
        capsys, "--from", "hf", "--to", "hf", "--hf-config", llama, llama, llama.parent / "out"
    )


def test_values_that_fp16_does_not_hold(llama: Path, capsys: Capture) -> None:
    change_tensors(llama, lambda t: t[NORM].fill_(1e6))
    assert f"{NORM} has values outside the range of fp16" in expect_refusal(
        capsys, "--from", "hf", "--to", "hf", "--dtype", "fp16", llama, llama.parent / "out"
    )


# ------------------------------------------------------------------------------------------------------------ torch_dist
@pytest.fixture
def megatron(hf_model: Get, tmp_path: Path, capsys: Capture) -> Path:
    assert main(["--from", "hf", "--to", "megatron", str(hf_model("llama")[0]), str(tmp_path / "megatron")]) == 0
    return tmp_path / "megatron"


def edit_index(directory: Path, edit: Callable[[Any], object]) -> None:
    path = directory / "release" / ".metadata"
    index = pickle.loads(path.read_bytes())
    edit(index)
    path.write_bytes(pickle.dumps(index))


def first_stored(index: Any) -> Any:
    return next(stored for key, stored in index.storage_data.items() if key.fqn == "embedding.word_embeddings.weight")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda i: setattr(first_stored(i), "relative_path", "../../etc/passwd"), "is not a plain file name"),
        (lambda i: setattr(first_stored(i), "relative_path", "/etc/passwd"), "is not a plain file name"),
        (lambda i: setattr(first_stored(i), "relative_path", "__9_9.distcp"), "__9_9.distcp is missing"),
        (lambda i: setattr(first_stored(i), "offset", 10**9), "The file is truncated"),
        (lambda i: setattr(first_stored(i), "offset", -5), "starts before its file"),
        (lambda i: i.state_dict_metadata.pop("decoder.final_layernorm.weight"), f"missing tensors: {NORM}"),
        (lambda i: i.state_dict_metadata["output_layer.weight"].chunks.pop(), "are in no file"),
        (lambda i: i.state_dict_metadata["output_layer.weight"].chunks.extend(
            i.state_dict_metadata["output_layer.weight"].chunks), "has more parts than there are in files"),
        (lambda i: i.state_dict_metadata.update(stray=i.state_dict_metadata["output_layer.weight"]), "is in no file"),
        (lambda i: i.storage_data.clear(), "is in no file"),
        (lambda i: setattr(i, "storage_data", None), "not the index of a checkpoint"),
    ],
)  # fmt: skip
def test_an_index_that_lies(megatron: Path, capsys: Capture, edit: Callable[[Any], object], message: str) -> None:
    edit_index(megatron, edit)
    assert message in expect_refusal(capsys, "--from", "megatron", "--to", "hf", megatron, megatron.parent / "out")


def test_an_index_that_runs_code(megatron: Path, capsys: Capture) -> None:
    mark = megatron / "exploded"
    for content in (pickle.dumps(Bomb(mark)), pickle.dumps({"x": Bomb(mark)}, protocol=0), b"", b"\x80\x05N."):
        (megatron / "release" / ".metadata").write_bytes(content)
        assert "refused" in expect_refusal(
            capsys, "--from", "megatron", "--to", "hf", megatron, megatron.parent / "out"
        )
        assert not mark.exists()


@pytest.mark.parametrize(
    "line", [b"cbuiltins\neval\n", b"cos\nsystem\n", b"ctorch.load\nx\n", b"cpathlib\nPath.unlink\n"]
)
def test_an_index_may_name_only_what_an_index_is_made_of(tmp_path: Path, line: bytes) -> None:
    """No name of other modules is read. Functions of torch and pathlib are neither looked up nor called."""
    (tmp_path / ".metadata").write_bytes(line + b"(X\x01\x00\x00\x001tR.")
    foreign = line.startswith((b"cbuiltins", b"cos"))
    with pytest.raises(
        ValueError, match="is not allowed in such a file" if foreign else "not the index of a checkpoint"
    ):
        read_index(tmp_path / ".metadata", bool)


def test_what_megatron_adds_to_an_index_is_an_inert_shell(tmp_path: Path) -> None:
    """Real indices contain names of Megatron's classes. They are never imported."""
    (tmp_path / ".metadata").write_bytes(b"cmegatron.core.os\nsystem\n(X\x07\x00\x00\x00touch xtR.")
    with pytest.raises(ValueError, match="not the index of a checkpoint"):
        read_index(tmp_path / ".metadata", bool)


def test_an_index_with_megatrons_plans_and_old_classes_is_read(megatron: Path) -> None:
    """Megatron-core may store the plans of all ranks in it, and torch a path. Before torch 2.3, a class was in another module."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    def edit(index: Any) -> None:
        index.all_local_plans = [SavePlan([WriteItem(MetadataIndex("x"), WriteItemType.SHARD)])]
        index.storage_meta = StorageMeta(checkpoint_id=Path("/somewhere"))
        index.state_dict_metadata["output_layer.weight"].properties = TensorProperties(torch.float32)

    edit_index(megatron, edit)
    assert main(["--from", "megatron", "--to", "hf", str(megatron), str(megatron.parent / "out")]) == 0


def test_a_part_that_is_pickle_and_no_tensor(megatron: Path, capsys: Capture) -> None:
    file = megatron / "release" / "__0_0.distcp"
    torch.save(Bomb(megatron / "exploded"), megatron / "bomb")
    content = (megatron / "bomb").read_bytes()
    file.write_bytes(content + bytes(file.stat().st_size - len(content)))
    edit_index(
        megatron, lambda i: (setattr(first_stored(i), "offset", 0), setattr(first_stored(i), "length", len(content)))
    )
    assert "no tensor at byte 0" in expect_refusal(
        capsys, "--from", "megatron", "--to", "hf", megatron, megatron.parent / "out"
    )
    assert not (megatron / "exploded").exists()


def test_directories_that_are_no_torch_dist_checkpoint(megatron: Path, capsys: Capture) -> None:
    out = megatron.parent / "out"
    (megatron / "latest_checkpointed_iteration.txt").write_text("../../x")
    assert "is neither a step nor 'release'" in expect_refusal(
        capsys, "--from", "megatron", "--to", "hf", megatron, out
    )
    (megatron / "latest_checkpointed_iteration.txt").write_text("1000")
    assert "iter_0001000: not a torch_dist checkpoint (no .metadata)" in expect_refusal(
        capsys, "--from", "megatron", "--to", "hf", megatron, out
    )
    (megatron / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "only 'torch_dist' is supported" in expect_refusal(
        capsys, "--from", "megatron", "--to", "hf", megatron / "release", out
    )


def test_a_checkpoint_of_another_model(megatron: Path, capsys: Capture) -> None:
    config = json.loads((megatron / "huggingface" / "config.json").read_text())
    for change in ({"num_hidden_layers": 3}, {"hidden_size": 32}, {"num_key_value_heads": 4}, {"vocab_size": 300}):
        (megatron / "huggingface" / "config.json").write_text(json.dumps({**config, **change}))
        message = expect_refusal(capsys, "--from", "megatron", "--to", "hf", megatron, megatron.parent / "out")
        assert "does not belong to this model" in message
    (megatron / "huggingface" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    message = expect_refusal(capsys, "--from", "megatron", "--to", "hf", megatron, megatron.parent / "out")
    assert "model.embed_tokens.weight is stored twice" in message and "tie_word_embeddings" in message


# ------------------------------------------------------------------------------------------------------------------ fsdp
@pytest.fixture
def fsdp(hf_model: Get, tmp_path: Path) -> Path:
    source, _, in_memory = hf_model("llama")
    foreign.write_fsdp(tmp_path / "fsdp", in_memory, (3,))
    shutil.copytree(source, tmp_path / "fsdp" / "huggingface")
    return tmp_path / "fsdp"


def edit_rank(directory: Path, rank: int, edit: Callable[[dict[str, Any]], object]) -> None:
    path = directory / f"model_world_size_3_rank_{rank}.pt"
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def test_every_ranks_files_are_needed(fsdp: Path, capsys: Capture) -> None:
    out = fsdp.parent / "out"
    (fsdp / "extra_state_world_size_3_rank_1.pt").unlink()
    assert "1 files are missing: extra_state_world_size_3_rank_1.pt" in expect_refusal(
        capsys, "--from", "fsdp", "--to", "hf", fsdp, out
    )
    (fsdp / "model_world_size_3_rank_2.pt").unlink()
    assert "2 files are missing: model_world_size_3_rank_2.pt" in expect_refusal(
        capsys, "--from", "fsdp", "--to", "hf", fsdp, out
    )
    (fsdp / "model_world_size_4_rank_0.pt").write_bytes(b"")
    assert "files of world sizes [3, 4] are mixed" in expect_refusal(capsys, "--from", "fsdp", "--to", "hf", fsdp, out)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop(NORM), f"tensor {NORM} is on this rank or on rank 0, but not on both"),
        (lambda c: c.update({NORM: c[NORM].to_local()}), "in different dtypes or forms"),
        (lambda c: c.update({NORM: c[NORM].bfloat16()}), "in different dtypes or forms"),
    ],
)
def test_ranks_that_disagree(
    fsdp: Path, capsys: Capture, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_rank(fsdp, 1, edit)
    assert message in expect_refusal(capsys, "--from", "fsdp", "--to", "hf", fsdp, fsdp.parent / "out")


def test_a_shard_that_runs_code_or_is_cut_short(fsdp: Path, capsys: Capture) -> None:
    edit_rank(fsdp, 1, lambda content: content.update(x=Bomb(fsdp / "exploded")))
    assert "rank_1.pt: refused" in expect_refusal(capsys, "--from", "fsdp", "--to", "hf", fsdp, fsdp.parent / "out")
    assert not (fsdp / "exploded").exists()
    os.truncate(fsdp / "model_world_size_3_rank_0.pt", 1000)
    assert "rank_0.pt: refused" in expect_refusal(capsys, "--from", "fsdp", "--to", "hf", fsdp, fsdp.parent / "out")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([(49, 64), (48, 64)], "neither whole (97, 64) nor flat"),
        ([(97, 32), (97, 32)], "neither whole (97, 64) nor flat"),
        ([(97 * 64,), (5,)], "have [6208, 5] elements"),
        ([(3000,), (3000,)], "have [3000, 3000] elements"),
    ],
)
def test_a_dimension_is_never_guessed(
    hf_model: Get, tmp_path: Path, capsys: Capture, shards: list[tuple[int, ...]], message: str
) -> None:
    source, tensors, _ = hf_model("llama")
    (tmp_path / "fsdp").mkdir()
    for rank, shape in enumerate(shards):
        foreign.save_rank(tmp_path / "fsdp", {**tensors, "lm_head.weight": torch.zeros(shape)}, rank, len(shards))
    config = ("--hf-config", source)
    assert message in expect_refusal(
        capsys, "--from", "fsdp", "--to", "hf", *config, tmp_path / "fsdp", tmp_path / "out"
    )


def test_whole_tensors_must_be_the_same_on_all_ranks(hf_model: Get, tmp_path: Path, capsys: Capture) -> None:
    source, tensors, _ = hf_model("llama")
    (tmp_path / "fsdp").mkdir()
    for rank in range(2):
        foreign.save_rank(tmp_path / "fsdp", {**tensors, NORM: tensors[NORM] + rank}, rank, 2)
    message = expect_refusal(
        capsys, "--from", "fsdp", "--to", "hf", "--hf-config", source, tmp_path / "fsdp", tmp_path / "out"
    )
    assert f"{NORM} is whole on every rank, but ranks hold different values" in message


def test_no_config_and_no_directory(fsdp: Path, capsys: Capture) -> None:
    shutil.rmtree(fsdp / "huggingface")
    assert "--hf-config DIR" in expect_refusal(capsys, "--from", "fsdp", "--to", "hf", fsdp, fsdp.parent / "out")
    assert "nowhere is not a directory" in expect_refusal(
        capsys, "--from", "hf", "--to", "hf", fsdp / "nowhere", fsdp.parent / "out"
    )
    (fsdp.parent / "empty").mkdir()
    assert "no config.json" in expect_refusal(
        capsys, "--from", "hf", "--to", "hf", fsdp.parent / "empty", fsdp.parent / "out"
    )
