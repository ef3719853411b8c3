from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from rlhf_mcore.checkpoint.registry import Registry
from rlhf_mcore.config.errors import ConfigError
from tests.messages import expect_error


class Counter:
    """A state of two numbers."""

    def __init__(self, steps: int = 0, tokens: int = 0):
        self.steps, self.tokens = steps, tokens

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "tokens": self.tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.tokens = state["steps"], state["tokens"]


class Forgetful(Counter):
    """Saves a key that it does not read."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


def registry(**holders: Any) -> Registry:
    made = Registry()
    for name, holder in holders.items():
        made.register(name, holder)
    return made


def test_states_go_through_json_and_back() -> None:
    text = json.dumps(registry(a=Counter(3, 4), b=Counter(5, 6)).state_dict())
    a, b = Counter(), Counter()
    registry(a=a, b=b).load_state_dict(json.loads(text))
    assert (a.steps, a.tokens, b.steps, b.tokens) == (3, 4, 5, 6)


def test_a_state_that_nobody_claims_is_named() -> None:
    saved = registry(a=Counter(), critic=Counter()).state_dict()
    with expect_error(ConfigError, field=("trainer_state.json", "critic")):
        registry(a=Counter()).load_state_dict(saved, "trainer_state.json")


def test_an_object_without_a_state_is_named() -> None:
    saved = registry(a=Counter()).state_dict()
    with expect_error(ConfigError, field="state", value=("kl", "sampler"), remedy="new experiment"):
        registry(sampler=Counter(), a=Counter(), kl=Counter()).load_state_dict(saved)


def test_a_key_left_unread_is_named() -> None:
    with expect_error(ConfigError, field="'a'", value="['tokens']"):
        registry(a=Forgetful()).load_state_dict({"a": {"steps": 1, "tokens": 2}})
    with expect_error(ConfigError, field="'a'", value="['colour']"):
        registry(a=Counter()).load_state_dict({"a": {"steps": 1, "tokens": 2, "colour": 3}})


def test_a_key_that_is_not_there_is_named() -> None:
    with expect_error(ConfigError, field=("'a'", "'tokens'")):
        registry(a=Counter()).load_state_dict({"a": {"steps": 1}})


def test_a_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="'a' is not a mapping"):
        registry(a=Counter()).load_state_dict({"a": [1]})


def test_a_mistake_inside_an_object_is_not_taken_for_a_missing_key() -> None:
    class Broken(Counter):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            {}["other"]

    with pytest.raises(KeyError, match="other"):
        registry(a=Broken()).load_state_dict({"a": {"steps": 1, "tokens": 2}})


def test_a_name_is_registered_once() -> None:
    made = registry(a=Counter())
    with expect_error(AssertionError, field="a"):
        made.register("a", Counter())
