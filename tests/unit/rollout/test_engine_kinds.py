"""Test the capabilities that engines declare.

Only this table names engines, and unsupported settings are rejected before a start.
"""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlhf_mcore
from rlhf_mcore.config import engine_kinds
from rlhf_mcore.config.engine_kinds import ENGINES, EngineKind, engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.rules.rollout import rollout_problems
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import unused_problems
from tests.messages import expect_error

PACKAGE = Path(rlhf_mcore.__file__).parent
# In converters, "hf" also names a file format.
OTHER_MEANINGS = {
    "api/commands.py",
    "commands/convert/command.py",
    "commands/convert/conversion.py",
    "commands/evaluate/checkpoints.py",
    "commands/evaluate/weights.py",
}
DEFAULT = "config/schema/rollout.py"


def test_outside_of_rollout_no_engine_is_named() -> None:
    texts = {
        str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "rollout"
    }
    named = {
        path
        for path, text in texts.items()
        if any(f'"{engine}"' in text for engine in ENGINES)  # few files, because parsing all of them takes seconds
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and node.value in ENGINES
    }
    assert named - OTHER_MEANINGS == {DEFAULT}


def test_declarations_import_none_of_what_they_declare() -> None:
    code = (
        "import sys; from rlhf_mcore.config.engine_kinds import ENGINES; "
        "print(sorted(ENGINES), [m for m in ('torch', 'numpy', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['hf', 'server', 'vllm'] []"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Register an engine of an installed package with few capabilities."""

    class Point:
        def load(self) -> EngineKind:
            return EngineKind(
                "acme",
                runs_apart=False,
                weights="full",
                temperatures=(0.5, 1.0),
                own_keys=("rollout.speculative",),
            )

    monkeypatch.setattr(engine_kinds, "find_plugins", lambda kind: {"acme": Point()} if kind == "engines" else {})
    engine_kinds._load_installed.cache_clear()
    yield "acme"
    engine_kinds._load_installed.cache_clear()


def problems(cfg: Config) -> str:
    return "\n".join(map(str, [*rollout_problems(cfg), *unused_problems(cfg)]))


def test_an_installed_package_adds_an_engine(server: str) -> None:
    cfg = Config()
    cfg.rollout.engine = server
    cfg.bridge.method, cfg.rollout.speculative.method = "gather", "ngram"
    assert "rollout.engine" not in problems(cfg)
    with expect_error(ConfigError, field="rollout.engine", value="'acmes'", remedy="vllm"):
        cfg.rollout.engine = "acmes"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rollout.layout.tp", 2, "rollout.layout.tp=2: rollout.engine=acme is not sharded; set it to 1 or use vllm"),
        (
            "rollout.placement",
            "disaggregated",
            "rollout.placement=disaggregated: rollout.engine=acme does not run under Ray",
        ),
        ("bridge.method", "planned", "bridge.method=planned: rollout.engine=acme needs full tensors"),
        (
            "rollout.sampling.temperature",
            0.4,
            "rollout.sampling.temperature=0.4: rollout.engine=acme supports 0.5 to 1",
        ),
        ("evaluate.temperature", 1.5, "evaluate.temperature=1.5: rollout.engine=acme supports 0.5 to 1"),
        ("model.attention", "sdpa", "model.attention=sdpa needs rollout.engine=hf, found 'acme'"),
        (
            "rollout.max_num_batched_tokens",
            64,
            "rollout.max_num_batched_tokens=64 has no effect with rollout.engine=acme",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(server: str, key: str, value: Any, said: str) -> None:
    cfg = Config()
    cfg.rollout.engine, cfg.bridge.method = server, "gather"
    *groups, last = key.split(".")
    group: Any = cfg
    for name in groups:
        group = getattr(group, name)
    setattr(group, last, value)
    assert said in problems(cfg)


def test_a_name_that_is_no_engine_is_the_choices_problem_alone() -> None:
    assert engine_kind("vlm") == EngineKind("vlm")
    assert engine_kind("vlm").temperatures == (0.0, math.inf)
