"""Check a checkpoint whose files match its manifest, but whose contents no run can have saved."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_mcore.bridge.files import saved_model
from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.checkpoint.manifest import (
    DELTA,
    Base,
    CheckpointInfo,
    files_below,
    hash_files,
    read_manifest,
    write_manifest,
)
from rlhf_mcore.cli import saved_checkpoint
from rlhf_mcore.cli.main import main
from rlhf_mcore.cli.saved_checkpoint import SharedChecker, answer, check_saved
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore.trainer.resume import find_start
from rlhf_mcore.trainer.run_state import Start
from rlhf_mcore_contrib.deltas.write import encode
from tests.messages import expect_error

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "checkpoint_v1"
ASKED: list[Any] = []  # the request that the ranks are answering
STATE = "actor/training/state-00000.safetensors"
INDEX = "actor/training/index.json"
NORM = "model.norm.weight"


def change_tensor(file: str, name: str, change: Callable[[np.ndarray[Any, Any]], Any]) -> Callable[[Path], None]:
    def apply(checkpoint: Path) -> None:
        tensors = {key: np.array(tensor) for key, tensor in load_file(checkpoint / file).items()}
        (key,) = (key for key in tensors if key.startswith(name))
        if (changed := change(tensors.pop(key))) is not None:
            tensors[key] = changed
        save_file(tensors, checkpoint / file)

    return apply


def change_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(checkpoint: Path) -> None:
        index = json.loads((checkpoint / INDEX).read_text())
        change(index)
        (checkpoint / INDEX).write_text(json.dumps(index))

    return apply


def nan_at_two(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values[2] = np.nan
    return values


def no_training(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "actor" / "training")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN in the weights": (
        change_tensor("actor/model.safetensors", NORM, nan_at_two),
        rf"tensor {NORM} has values that are not finite",
    ),
    "NaN in a moment": (
        change_tensor(STATE, f"exp_avg/{NORM}", nan_at_two),
        rf"exp_avg of tensor {NORM} has values that are not finite",
    ),
    "a sign": (
        change_tensor(STATE, f"exp_avg_sq/{NORM}", lambda values: values - 1),
        rf"exp_avg_sq of tensor {NORM} is a mean of squares",
    ),
    "another shape": (
        change_tensor("actor/model.safetensors", NORM, lambda values: values[:-1]),
        rf"tensor {NORM} is F32 \[\d+\], but config.json requires",
    ),
    "integers": (
        change_tensor("actor/model.safetensors", NORM, lambda values: values.astype(np.int32)),
        rf"tensor {NORM} is I32",
    ),
    "a tensor less": (
        change_tensor("actor/model.safetensors", NORM, lambda values: None),
        rf"tensor {NORM} is missing",
    ),
    "a moment less": (
        change_tensor(STATE, f"exp_avg/{NORM}", lambda values: None),
        rf"exp_avg/{NORM}\[0:\d+\] is missing",
    ),
    "a region less": (
        change_index(lambda index: index["tensors"][NORM]["regions"].clear()),
        rf"tensor {NORM}: \d+ elements are missing",
    ),
    "a kind less": (
        change_index(lambda index: index["tensors"][NORM].update(kinds=["exp_avg"])),
        rf"tensor {NORM}: no exp_avg_sq",
    ),
    "a count": (change_index(lambda index: index["scalars"].update(step=10**6)), r"Adam's step=1000000 is more than"),
    "no state": (no_training, r"training is missing: the state of the optimizer"),
    "random generators": (
        change_tensor("rng.safetensors", "rank-0/numpy.place", lambda values: None),
        r"rank-0 has no valid state of random generators",
    ),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return checkpoints of steps 1 and 2, which differ only in the step number."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLE, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "outputs"
    for step in (1, 2):
        shutil.copytree(SAMPLE / "checkpoint-2", run / f"checkpoint-{step}")
    for name in ("trainer_state.json", "dataloader.json"):
        path = run / "checkpoint-1" / name
        content = json.loads(path.read_text())
        content["step"] = 1
        if "counters" in content["state"]:
            content["state"]["counters"]["steps"] = 1
        path.write_text(json.dumps(content))
    seal_again(run / "checkpoint-1", step=1)
    return run


def seal_again(checkpoint: Path, step: int = 2) -> None:
    """Write a manifest for the changed files, like a release without checks on saving."""
    info = read_manifest(checkpoint).info
    names = [name for name in files_below(checkpoint) if name != "manifest.json"]
    write_manifest(checkpoint, hash_files(checkpoint, names), type(info)(step, metrics=info.metrics), Disk())


def start(run: Path, **settings: Any) -> Start:
    config = (SAMPLE / "checkpoint-2" / "config.yaml").read_text()

    def ask(request: Any) -> list[Any]:
        ASKED.append(request)
        try:
            return [json.loads(json.dumps(answer(json.loads(json.dumps(request)), rank, 3))) for rank in range(3)]
        finally:
            ASKED.pop()

    checker = SharedChecker(ask, values=settings.get("verify", True))
    return find_start(run, CheckpointConfig(**settings), config, checker=checker)


def test_what_a_run_has_saved_is_fine(run: Path) -> None:
    assert start(run).step == 2
    assert main(["verify-checkpoint", str(run)]) == 0


@pytest.mark.parametrize("kind", DAMAGES)
def test_fault_11_and_23_a_resume_falls_back_says_why_and_keeps_it_aside(
    run: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGES[kind]
    damage(run / "checkpoint-2")
    seal_again(run / "checkpoint-2")
    assert main(["verify-checkpoint", str(run / "checkpoint-2")]) == 2
    capsys.readouterr()
    with pytest.raises(ConfigError, match=message) as of_all_ranks:
        start(run, resume=str(run / "checkpoint-2"))
    with pytest.raises(ConfigError) as of_one:
        check_saved(run / "checkpoint-2", {model: run / "checkpoint-2" / model for model in ("actor", "critic")})
    assert str(of_all_ranks.value) == f"{run / 'checkpoint-2'} is damaged: {of_one.value}"
    with pytest.raises(ConfigError, match=message):
        start(run, on_damaged="error")
    assert [checkpoint.step for checkpoint in scan(run)] == [1, 2], "nothing was touched"
    found = start(run)
    assert found.step == 1 and found.continues
    (note,) = (note for note in found.notes if "is damaged" in note)
    assert "checkpoint-2 is damaged" in note and note.endswith("Falling back to the checkpoint before it.")
    assert [checkpoint.step for checkpoint in scan(run)] == [1]
    assert [path.name.startswith("checkpoint-2-") for path in (run / "quarantine").iterdir()] == [True]


def test_without_values_a_nan_is_passed_and_a_shape_is_not(run: Path) -> None:
    """``checkpoint.verify=false`` reads names, shapes and places, but no tensor values."""
    checkpoint = run / "checkpoint-2"
    weights = {model: checkpoint / model for model in ("actor", "critic")}
    DAMAGES["NaN in the weights"][0](checkpoint)
    check_saved(checkpoint, weights, values=False)
    with pytest.raises(ConfigError, match="not finite"):
        check_saved(checkpoint, weights)
    damage, message = DAMAGES["another shape"]
    damage(checkpoint)
    with pytest.raises(ConfigError, match=message):
        check_saved(checkpoint, weights, values=False)


def test_after_the_first_damage_nothing_more_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a model takes minutes. A damage report and Ctrl-C do not wait for the rest."""
    looked, stopped = [], threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            stopped.set()
            super().shutdown(wait)

    def look(name: str, *_: object) -> str:
        looked.append(name)
        if len(looked) > 1:
            stopped.wait(10.0)
        return f"{name} is broken"

    monkeypatch.setattr(saved_model, "ThreadPoolExecutor", lambda _: Pool(1))
    monkeypatch.setattr(saved_model, "value_problem", look)
    with pytest.raises(ConfigError, match="is broken"):
        check_saved(run / "checkpoint-2", {"actor": run / "checkpoint-2" / "actor"})
    assert len(looked) <= 2


def test_a_tensor_in_two_shards_is_damage(run: Path) -> None:
    """The first sample is a valid save of a larger model in two files. The other has a tensor twice."""
    actor = run / "checkpoint-2" / "actor"
    tensors = load_file(actor / "model.safetensors")
    (actor / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (actor / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, actor / shard)
    seal_again(run / "checkpoint-2")
    assert start(run).step == 2
    save_file(
        {name: tensors[name] for name in [names[0], *shards["model-2.safetensors"]]}, actor / "model-2.safetensors"
    )
    seal_again(run / "checkpoint-2")
    found = start(run)
    assert found.step == 1
    assert f"tensor {names[0]} is in model-1.safetensors and in model-2.safetensors" in " ".join(found.notes)


def test_links_that_lead_to_themselves_are_damage(run: Path) -> None:
    for name in ("actor/training/index.json", "dataloader.json"):
        (run / "checkpoint-2" / name).unlink()
        (run / "checkpoint-2" / name).symlink_to(Path(name).name)
    found = start(run)
    assert found.step == 1
    (note,) = (note for note in found.notes if "is damaged" in note)
    assert "index.json: unreadable (Too many levels" in note and "dataloader.json: unreadable (Too many levels" in note
    (run / "checkpoint-3").symlink_to("checkpoint-3")
    with expect_error(ConfigError, field="checkpoint-3", value="link"):
        start(run)
    with pytest.raises(ConfigError, match=r"checkpoint-3 is damaged|is not a directory|no such file"):
        find_start(run.parent / "another", CheckpointConfig(resume=str(run / "checkpoint-3")), "")


def test_an_index_that_was_added_is_neither_resumed_from_nor_evaluated(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlhf_mcore.commands.evaluate.command.launch", lambda *arguments, **options: 7)
    arguments = ["evaluate", "run.yaml", "data.eval=[train.jsonl]", f"evaluate.checkpoint={run / 'checkpoint-2'}"]
    index = run / "checkpoint-2" / "actor" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "../../../model.safetensors"}}')
    found = start(run)
    assert found.step == 2 and index.name not in [path.name for path in found.weights["actor"].iterdir()]
    assert main(arguments) == 7
    seal_again(run / "checkpoint-2")  # now the manifest names it, so it counts
    assert main(arguments) == 2
    assert "a path outside the directory" in capsys.readouterr().err


def nothing_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the first rank fail if it reads a file again that the ranks have read together."""

    def only_in_an_answer(module: Any, name: str) -> None:
        read = getattr(module, name)

        def check(*arguments: Any) -> Any:
            assert ASKED, "this was read already"
            return read(*arguments)

        monkeypatch.setattr(module, name, check)

    only_in_an_answer(HFReader, "read")
    only_in_an_answer(saved_checkpoint, "hash_file")
    only_in_an_answer(saved_model, "value_problem")


def test_ranks_restore_a_delta_and_look_at_it_together(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = run / "checkpoint-2"
    whole = (checkpoint / "actor/model.safetensors").read_bytes()

    def save_as_delta() -> None:
        names = [name for name in files_below(checkpoint) if name != "manifest.json"]
        base = Base("checkpoint-1", read_manifest(run / "checkpoint-1").digest)
        paths = encode(checkpoint, names, run / "checkpoint-1")
        write_manifest(checkpoint, hash_files(checkpoint, paths), CheckpointInfo(2, DELTA, base), Disk())

    save_as_delta()
    with monkeypatch.context() as patches:
        nothing_is_read_again(patches)
        found = start(run)
    assert found.step == 2 and found.weights["actor"] != checkpoint / "actor"
    assert (found.weights["actor"] / "model.safetensors").read_bytes() == whole
    for path in checkpoint.glob("*/*.delta*"):
        path.unlink()
    for model in ("actor", "critic"):
        shutil.copy(SAMPLE / "checkpoint-2" / model / "model.safetensors", checkpoint / model)
    DAMAGES["NaN in the weights"][0](checkpoint)
    save_as_delta()
    found = start(run)
    assert found.step == 1
    assert f"tensor {NORM} has values that are not finite" in " ".join(found.notes)


def test_master_weights_are_what_the_weights_were_rounded_from(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample was changed to a save of a run with 16-bit parameters."""
    nothing_is_read_again(monkeypatch)
    checkpoint = run / "checkpoint-2"
    weights = load_file(checkpoint / "actor" / "model.safetensors")
    save_file(
        {name: values.astype(np.float16) for name, values in weights.items()}, checkpoint / "actor/model.safetensors"
    )
    index = json.loads((checkpoint / INDEX).read_text())
    state = {name: np.array(values) for name, values in load_file(checkpoint / STATE).items()}
    for key in [key for key in state if key.startswith("exp_avg/")]:
        name, spans = key.removeprefix("exp_avg/").removesuffix("]").split("[")
        index["tensors"][name]["kinds"] = ["master", "exp_avg", "exp_avg_sq"]
        place = tuple(slice(*map(int, span.split(":"))) for span in spans.split(","))
        state[key.replace("exp_avg", "master", 1)] = np.ascontiguousarray(weights[name][place])
    (checkpoint / INDEX).write_text(json.dumps(index))
    save_file(state, checkpoint / STATE)
    seal_again(checkpoint)
    assert start(run).step == 2
    change_tensor(STATE, f"master/{NORM}", lambda values: values * 1.5)(checkpoint)
    seal_again(checkpoint)
    found = start(run)
    assert found.step == 1
    assert f"master of tensor {NORM} does not round to the weights" in " ".join(found.notes)
