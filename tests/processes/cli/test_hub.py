"""Use hub ids as paths of directories and files, with the hub's own client and a stand-in for its API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers import hub as hub_module
from rlhf_mcore.readers.hub_ids import data_id, id_of_snapshot, model_id
from tests.commands import ROOT
from tests.hub import COMMIT, Hub, stand_in

CONFIG_JSON = b'{"architectures": ["Qwen3ForCausalLM"]}'
CODE = """
import json, sys
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.hub import localize
from rlhf_mcore.config.schema import Config
cfg = Config()
for key, value in json.loads(sys.argv[1]).items():
    group, name = key.split(".")
    setattr(getattr(cfg, group), name, value)
try:
    print(json.dumps(localize(cfg)))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stand_in() as made:
        model = {"config.json": CONFIG_JSON, "model.safetensors": b"w", "tokenizer.json": b"{}"}
        made.files["models/Org/tiny"] = {
            **model,
            "pytorch_model.bin": b"no",
            "code.py": b"no",
            "original/model.safetensors": b"no",
        }
        names = [
            "main/train-00000-of-00002",
            "main/train-00001-of-00002",
            "main/test-00000-of-00001",
            "other/train-00000-of-00001",
        ]
        made.files["datasets/Org/math"] = {f"{name}.parquet": name.encode() for name in names}
        yield made


def localize(hub: Hub, folder: Path, *, offline: str = "0", **keys: object) -> object:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder / "cache")}
    environment |= {"HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1"}
    given = json.dumps({key.replace("__", "."): value for key, value in keys.items()})
    done = subprocess.run(
        [sys.executable, "-c", CODE, given], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def snapshot(folder: Path, name: str = "models--Org--tiny") -> str:
    return str(folder / "cache" / name / "snapshots" / COMMIT)


def test_a_model_is_downloaded_without_code_and_then_taken_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    assert localize(hub, tmp_path, model__path="Org/tiny") == {"model.path": snapshot(tmp_path)}
    assert {path.name for path in Path(snapshot(tmp_path)).rglob("*")} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    hub.asked.clear()
    for offline in ("0", "1"):
        assert localize(hub, tmp_path, model__path="Org/tiny", offline=offline) == {"model.path": snapshot(tmp_path)}
    assert hub.asked == []
    assert localize(hub, tmp_path, model__path=f"Org/tiny@{COMMIT}", offline="1") == {"model.path": snapshot(tmp_path)}


def test_a_model_of_which_a_part_is_here_is_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    localize(hub, tmp_path, model__path="Org/tiny")
    Path(snapshot(tmp_path), "model.safetensors").unlink()
    assert localize(hub, tmp_path, model__path="Org/tiny", offline="1") == {}
    assert localize(hub, tmp_path, model__path="Org/tiny") == {"model.path": snapshot(tmp_path)}
    assert Path(snapshot(tmp_path), "model.safetensors").read_bytes() == b"w"


def test_a_model_with_code_is_refused_before_its_weights_come(hub: Hub, tmp_path: Path) -> None:
    hub.files["models/Org/tiny"]["config.json"] = b'{"auto_map": {"AutoModel": "code.M"}}'
    message = localize(hub, tmp_path, model__path="Org/tiny")
    assert "model.path=Org/tiny: config.json has auto_map" in str(message)
    assert not any(".safetensors" in asked and "resolve" in asked for asked in hub.asked)


def test_what_the_hub_does_not_have_is_one_message(hub: Hub, tmp_path: Path) -> None:
    message = str(localize(hub, tmp_path, model__path="Org/none"))
    assert (
        message.startswith("model.path=Org/none: no such directory")
        and "`HF_HUB_OFFLINE=0 hf download Org/none`" in message
    )
    assert "\n" not in message


def test_a_quickstart_without_its_model_names_what_makes_it(hub: Hub, tmp_path: Path) -> None:
    message = str(localize(hub, tmp_path, model__path="quickstart/model"))
    assert (
        "model.path=quickstart/model: no such directory" in message and "`python tools/make_quickstart.py`" in message
    )


def test_a_local_folder_of_that_name_is_no_id(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert localize(hub, tmp_path, model__path="models/Qwen3") == {}
    assert hub.asked == []


def test_data_sets_by_split_and_configuration(hub: Hub, tmp_path: Path) -> None:
    folder = f"{snapshot(tmp_path, 'datasets--Org--math')}/main"
    found = localize(hub, tmp_path, data__train=["Org/math/main", "mine.jsonl"], data__eval=["Org/math/main"])
    parts = [f"{folder}/train-0000{number}-of-00002.parquet" for number in (0, 1)]
    expected = {"data.train": [*parts, "mine.jsonl"], "data.eval": [f"{folder}/test-00000-of-00001.parquet"]}
    assert found == expected
    hub.asked.clear()
    keys = {"data__train": ["Org/math/main:train", "mine.jsonl"], "data__eval": ["Org/math/main:test"]}
    assert localize(hub, tmp_path, offline="1", **keys) == expected
    assert hub.asked == []
    Path(parts[1]).unlink()  # an incomplete data set is not used
    assert "data.train" not in dict(localize(hub, tmp_path, offline="1", **keys))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ("Org/math", "several configurations with a split train; name one, as in Org/math/main:train"),
        ("Org/math/main:dev", "the data set has no .parquet or .jsonl file for the split dev"),
        ("Org/no", "`HF_HUB_OFFLINE=0 hf download Org/no --repo-type dataset`"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_named(hub: Hub, tmp_path: Path, data: str, part: str) -> None:
    assert part in str(localize(hub, tmp_path, data__train=[data]))


@pytest.mark.parametrize("key", ["model.path=Org/tiny", "data.train=Org/math", "model.tokenizer_path=Org/tiny"])
def test_without_the_hub_one_message_has_the_command(tmp_path: Path, key: str) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: m}\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "rlhf_mcore.cli.main", "train", "run.yaml", key]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    repo = key.partition("=")[2]
    assert done.stderr.count(f"HF_HUB_OFFLINE=0 hf download {repo}") == 1


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("Org/tiny", True),
        ("Org/tiny@v1", True),
        ("./Org/tiny", False),
        ("/Org/tiny", False),
        ("tiny", False),
        ("a/b/c", False),
        ("../a", False),
    ],
)
def test_what_has_the_form_of_an_id(path: str, is_id: bool) -> None:
    assert (model_id(path) is not None) == is_id
    assert data_id("Org/tiny/train.jsonl") is None and data_id("Org/a.parquet") is None


def test_a_snapshot_names_its_id_and_commit() -> None:
    found = id_of_snapshot(f"/x/hub/models--Qwen--Qwen3-1.7B/snapshots/{COMMIT}")
    assert found is not None and (found.kind, found.repo, found.revision) == ("model", "Qwen/Qwen3-1.7B", COMMIT)
    assert id_of_snapshot("/x/models/Qwen3-1.7B") is None


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["data/train-0.parquet", "data/test-0.parquet"], None, ["data/train-0.parquet"]),
        (["train.jsonl", "validation.jsonl"], "validation", ["validation.jsonl"]),
        (["default/train/0000.parquet", "default/test/0000.parquet"], None, ["default/train/0000.parquet"]),
        (["all.jsonl"], None, ["all.jsonl"]),
        (["training_log.jsonl", "train.jsonl"], None, ["train.jsonl"]),
        (["test.jsonl"], None, []),
        (["train.csv"], None, []),
    ],
)
def test_files_of_a_split(names: list[str], split: str | None, expected: list[str]) -> None:
    wanted = hub_module.HubId("dataset", "Org/x", split=split)
    assert hub_module._of_split(names, wanted, "data.train") == expected


def test_a_split_in_several_configurations_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"name one, as in Org/x/a:train\. There are: a, b"):
        hub_module._of_split(["a/train.jsonl", "b/train.jsonl"], hub_module.HubId("dataset", "Org/x"), "data.train")
