"""Hide secret values in printed and saved configurations: by their key, their origin or the name of a variable."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rlhf_mcore.checkpoint.config_changes import compare_configs
from rlhf_mcore.cli import agent
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.config.validate import validate
from rlhf_mcore.redaction import redact, redact_arguments, without_secrets
from tests.messages import expect_error

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
    workspace.write("printed.yaml", text)
    assert load_config("printed.yaml").experiment == VALUE


def test_an_unknown_key_that_is_a_secret_is_named_without_its_value(workspace: Any) -> None:
    with expect_error(ConfigError, field="logging.api_key") as raised:
        load_config("run.yaml", ["logging.api_key=hunter2hunter2"])
    assert "hunter2" not in str(raised.value)


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


HIDDEN = "hidden-9f3a"
TREES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"url": f"https://host:1/score?key={HIDDEN}&b=1"}, {"url": "https://host:1/score?<redacted>"}),
    ({"url": f"https://host/?a b={HIDDEN} c"}, {"url": "https://host/?<redacted>"}),
    ({"url": f"host/score?key={HIDDEN}"}, {"url": "host/score?<redacted>"}),
    ({"base_url": f"https://me:p@{HIDDEN}@host/#t={HIDDEN}"}, {"base_url": "https://<redacted>@host/#<redacted>"}),
    ({"note": f"see http://h/x?q={HIDDEN}, and more"}, {"note": "see http://h/x?<redacted> and more"}),
    ({"command": ["tell", "--key", HIDDEN]}, {"command": ["tell", "<redacted>", "<redacted>"]}),
    ({"command": f"tell --key {HIDDEN}"}, {"command": "tell <redacted>"}),
    ({"command": []}, {"command": []}),
    ({"headers": {"X-Team": HIDDEN, "n": 1}}, {"headers": {"X-Team": "<redacted>", "n": "<redacted>"}}),
    ({"headers": [f"X: {HIDDEN}"]}, {"headers": ["<redacted>"]}),
    ({"X-Api-Key": HIDDEN, "apiKey": HIDDEN}, {"X-Api-Key": "<redacted>", "apiKey": "<redacted>"}),
    ({"Authorization": HIDDEN}, {"Authorization": "<redacted>"}),
    ({"with": f"Bearer {HIDDEN}"}, {"with": "Bearer <redacted>"}),
    (
        {"credentials": {"user": HIDDEN, "password": 1234}},
        {"credentials": {"user": "<redacted>", "password": "<redacted>"}},
    ),
    (
        {"bytes_per_token": 2, "max_tokens": 3, "prompt_key": "p"},
        {"bytes_per_token": 2, "max_tokens": 3, "prompt_key": "p"},
    ),
    ({"path": "a?b", "question": "why? http://h/x"}, {"path": "a?b", "question": "why? http://h/x"}),
]


def test_what_may_hold_a_secret_is_hidden_wherever_it_stands() -> None:
    for tree, shown in TREES:
        assert redact(tree) == shown
        assert redact({"options": [{"deep": tree}]}) == {"options": [{"deep": shown}]}
        assert redact(shown) == shown  # a saved configuration is printed again


ADDRESSES = [
    f"reward.remote.url='http://h/s?key={HIDDEN}'",
    f"reward.judge.url='http://h/v1?key={HIDDEN}'",
    f"alarms.command=[/bin/true,{HIDDEN}]",
    f"environment.options={{headers: {{X-Team: {HIDDEN}}}, url: 'http://h/?k={HIDDEN}', args: [1]}}",
    f"environment.options.headers.X-Team={HIDDEN}",
]


def test_a_configuration_is_shown_and_saved_without_them(workspace: Any) -> None:
    for override in ADDRESSES:
        text = to_yaml(load_config("run.yaml", [override]))
        assert HIDDEN not in text and "<redacted>" in text
        workspace.write("saved.yaml", text)
        assert to_yaml(load_config("saved.yaml")) == text
        assert HIDDEN not in "".join(redact_arguments([override])) + this_command_of([override])


def this_command_of(arguments: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["x.py", *arguments])
        patch.setattr("sys.orig_argv", ["python", "x.py", *arguments])
        return agent.format_command()


def test_a_command_to_be_typed_again_tells_of_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "with_restarts", lambda attempt, number: agent.STOPPED)
    for override, hides in (("alarms.command=[/bin/true,agent.py]", True), ("seed=3", False)):
        monkeypatch.setattr("sys.orig_argv", ["python", "x.py", override])
        monkeypatch.setattr("sys.argv", ["x.py", override])
        assert agent.launch([override], 1, 1) == agent.STOPPED
        told = capsys.readouterr().err
        assert told.startswith("to continue: python x.py ") and ("replace <redacted>" in told) == hides


def test_errors_do_not_quote_them(workspace: Any) -> None:
    for override in [
        f"reward.remote.url='http://h/s?key={HIDDEN}'",
        f"reward.judge.url='https://me:{HIDDEN}@h/v1'",
        f"alarms.command='tell --key {HIDDEN}'",
    ]:
        with pytest.raises(ConfigError) as raised:
            validate(load_config("run.yaml", [override, "alarms.actions=[warn]"]), None)
        assert HIDDEN not in without_secrets(str(raised.value))


def test_a_saved_command_is_not_run_without_its_arguments(workspace: Any) -> None:
    with expect_error(ConfigError, field="alarms.command", value="<redacted>", remedy="write"):
        validate(load_config("run.yaml", ["alarms.command=[/bin/true,<redacted>]"]), None)


def test_a_run_with_hidden_arguments_resumes(workspace: Any) -> None:
    """The saved configuration is compared with a configuration hidden in the same way."""
    saved = to_yaml(load_config("run.yaml", ADDRESSES[2:4]))
    now = to_yaml(load_config("run.yaml", [text.replace(HIDDEN, "another") for text in ADDRESSES[2:4]]))
    assert compare_configs(saved, now) == ([], [])
