"""What is printed and saved of values that are secret: by their key, by their origin, by the name of a variable."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rlhf_mcore.config.derive import resolve
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.show import redact_arguments, to_yaml, without_secrets

VALUE = "s3cret-value"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", VALUE)
    monkeypatch.setenv("PLACE", "/scratch/place")


def test_a_value_from_the_environment_is_shown_as_it_was_written(workspace: Any) -> None:
    overrides = ["experiment=${oc.env:SECRET}", "output_dir=${oc.env:PLACE}/runs", "project=x-${experiment}"]
    cfg = resolve(load_config("run.yaml", [*overrides, "data.eval=['${oc.env:PLACE}/a.jsonl',b.jsonl]"]))
    assert (cfg.experiment, cfg.project, cfg.output_dir) == (VALUE, f"x-{VALUE}", "/scratch/place/runs")
    text = to_yaml(cfg)
    assert VALUE not in text and "/scratch/place" not in text
    shown = yaml.safe_load(text)
    assert (shown["experiment"], shown["project"]) == ("${oc.env:SECRET}", "x-${experiment}")
    assert shown["output_dir"] == "${oc.env:PLACE}/runs"
    assert shown["data"]["eval"] == ["${oc.env:PLACE}/a.jsonl", "b.jsonl"]
    assert VALUE not in f"experiment={cfg.experiment!r}"


def test_what_is_saved_loads_again_to_the_same_values(workspace: Any) -> None:
    cfg = load_config("run.yaml", ["experiment=${oc.env:SECRET}"])
    workspace.write("printed.yaml", to_yaml(cfg))
    assert load_config("printed.yaml").experiment == VALUE


@pytest.mark.parametrize(
    "override", ["logging.api_key=hunter2hunter2", "wandb.password=hunter2hunter2", "hf_token=hunter2hunter2"]
)
def test_an_unknown_key_that_is_a_secret_is_named_without_its_value(workspace: Any, override: str) -> None:
    with pytest.raises(ConfigError, match="unknown key") as raised:
        load_config("run.yaml", [override])
    assert "hunter2" not in str(raised.value) and override.partition("=")[0] in str(raised.value)


def test_the_value_of_a_secret_variable_is_found_in_any_text(workspace: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config("run.yaml", [f"trainer.nun_steps={VALUE}"])
    assert VALUE not in str(raised.value)
    environment = {
        "HF_TOKEN": "abcdefgh",
        "MONKEY": "bananas",
        "TOKENIZERS_PARALLELISM": "false-and-long",
        "MY_KEY": "1234",
    }
    assert without_secrets("abcdefgh false-and-long 1234", environment) == "<redacted: HF_TOKEN> false-and-long 1234"


def test_arguments_of_a_command_line() -> None:
    given = ["run.yaml", "a.api_key=xyz", "b.max_tokens=7", "url=https://me:pw@host/", f"c={VALUE}"]
    assert redact_arguments(given) == [
        "run.yaml",
        "a.api_key=<redacted>",
        "b.max_tokens=7",
        "url=https://<redacted>@host/",
        "c=<redacted: SECRET>",
    ]
