"""Test the JSON Schema for editors: accepted and rejected files. The committed file equals the generated one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from rlhf_mcore.commands.config import json_schema
from tools.document_config import SCHEMA, schema_text

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = [path for path in sorted((ROOT / "configs").rglob("*.yaml")) if "models" not in path.parts]

VALIDATOR = Draft202012Validator(json_schema())


def parse(text: str) -> Any:
    """Read YAML 1.2 like editors, in which 1e-6 is a number."""
    return OmegaConf.to_container(OmegaConf.create(text))


def wrong(tree: Any) -> list[str]:
    """Return the places of a tree that the schema rejects."""
    return [".".join(map(str, error.absolute_path)) for error in VALIDATOR.iter_errors(tree)]


def test_the_committed_schema_is_the_generated_one_and_valid() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_text()
    Draft202012Validator.check_schema(json_schema())


def test_our_configurations_are_accepted_and_name_the_schema() -> None:
    assert len(CONFIGS) > 20
    for path in CONFIGS:
        text = path.read_text(encoding="utf-8")
        first = text.partition("\n")[0]
        assert first.startswith("# yaml-language-server: $schema="), path
        assert (path.parent / first.partition("=")[2]).resolve() == SCHEMA, path
        assert wrong(parse(text)) == [], path


def test_what_users_may_write_is_accepted() -> None:
    for text in [
        "base: other.yaml",
        "base: [a.yaml, b.yaml]\nalgorithm: dr_grpo",
        "seed: ${trainer.num_steps}\ntrainer: {num_steps: '${oc.env:STEPS,5}'}",
        "reward: {rules: math}",
        "reward: {rules: [math, {name: format, weight: 0.1}]}",
        "reward: {sources: {gsm8k: final_number}}",
        "data: {train: one.parquet, prompt_key: [question, prompt]}",
        "rollout: {engine: mine}",  # an engine of an installed package
        "algorithm: {advantage: 'mine.py:estimate'}",
        "actor: {megatron: {bucket_size: 4, nested: {a: [1]}}}",
        "critic:",
    ]:
        assert wrong(parse(text)) == [], text


def test_mistakes_are_rejected() -> None:
    for text, place in [
        ("trainer: {num_stepz: 3}", "trainer"),
        ("trainer: {num_steps: 0}", "trainer.num_steps"),
        ("model: {dtype: int8}", "model"),  # a path or a group
        ("critic: {dtype: int8}", "critic.dtype"),
        ("seeed: 1", ""),
        ("data: {train: {a: 1}}", "data.train"),
        ("reward: {rules: [{nam: math}]}", "reward.rules"),
        ("algorithm: grpoo", "algorithm"),
    ]:
        assert wrong(parse(text)) == [place], text
