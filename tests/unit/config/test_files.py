"""Check the files under configs/, printed configurations, and the time to import the package."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.keys import KEYS, is_group
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.redaction import redact
from tools import document_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def test_every_config_loads() -> None:
    for path in sorted(CONFIGS.rglob("*.yaml")):
        assert load_config(path, ["model.path=somewhere"]).model.path == "somewhere"


def test_the_base_holds_the_defaults() -> None:
    loaded = load_config(CONFIGS / "base.yaml", ["model.path=somewhere"])
    default = Config()
    default.model = default.model.model_copy(update={"path": "somewhere"})
    assert loaded == default


def test_the_base_is_what_the_schema_makes() -> None:
    assert (CONFIGS / "base.yaml").read_text(encoding="utf-8") == document_config.base_yaml()


def test_the_base_shows_every_key() -> None:
    text = (CONFIGS / "base.yaml").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\s*(?:# |- )?(\w+):", text, flags=re.MULTILINE))
    assert {key.rpartition(".")[2] for key in KEYS if not is_group(key)} - shown == set()


def test_the_base_does_not_stand_in_the_way_of_a_preset() -> None:
    for preset in PRESETS:
        cfg = load_config(CONFIGS / "base.yaml", ["model.path=m", f"algorithm={preset}"])
        assert {name: attrgetter(name)(cfg.algorithm) for name in PRESETS[preset]} == PRESETS[preset]


def test_the_quickstart_cuts_actor_and_engines_differently() -> None:
    cfg = load_config(CONFIGS / "quickstart" / "grpo.yaml")
    assert (cfg.actor.layout.tp, cfg.rollout.layout.tp, cfg.trainer.world_size) == (2, 1, 2)
    assert (cfg.model.path, cfg.data.train) == ("quickstart/model", ["quickstart/train.parquet"])


def test_a_printed_config_loads_again(workspace: Any) -> None:
    cfg = load_config("run.yaml", ["algorithm=dr_grpo", "logging.console=off", "project='1.10'", "seed=4"])
    workspace.write("printed.yaml", to_yaml(cfg))
    assert load_config("printed.yaml") == cfg


def test_secrets_are_redacted_and_token_counts_are_not() -> None:
    tree = {
        "hf_token": "abc",
        "wandb": {"api_key": "abc", "password": "abc", "empty_secret": ""},
        "max_prompt_tokens": 5,
        "prompt_key": "prompt",
        "loss_aggregation": "token",
        "urls": ["https://me:abc@host/x", "https://host/x"],
    }
    assert redact(tree) == {
        "hf_token": "<redacted>",
        "wandb": {"api_key": "<redacted>", "password": "<redacted>", "empty_secret": ""},
        "max_prompt_tokens": 5,
        "prompt_key": "prompt",
        "loss_aggregation": "token",
        "urls": ["https://<redacted>@host/x", "https://host/x"],
    }


def test_errors_are_listed_one_by_one() -> None:
    assert str(ConfigError.many(["a is wrong"])) == "a is wrong"
    error = ConfigError.many(["a is wrong", "b is wrong\nvery"])
    assert str(error) == "2 problems in the configuration:\n  - a is wrong\n  - b is wrong\n    very"
    assert error.problems == ["a is wrong", "b is wrong\nvery"]
    assert isinstance(error, ValueError)
