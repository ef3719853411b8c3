"""Every file of configs/experiments loads, is valid and fits, on the geometry of its model alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_mcore.config.derive import default_world_size, resolve
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.planning.inputs import GPUS
from rlhf_mcore.planning.plan import make_plan
from rlhf_mcore.planning.report import refusal

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
EXPERIMENTS = sorted((CONFIGS / "experiments").glob("*.yaml"))


def described(path: str, tmp_path: Path) -> str:
    """The directory of configs/models that has a model's config.json. A reward model is described by the model that it began as."""
    name = Path(path).name
    if not name.endswith("-reward"):
        return str(CONFIGS / "models" / name)
    known = {folder.name.lower(): folder for folder in (CONFIGS / "models").iterdir()}
    source = known[name.removesuffix("-reward")]
    content = json.loads((source / "config.json").read_text(encoding="utf-8"))
    content["architectures"] = [content["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]
    content |= {"num_labels": 1, "id2label": {"0": "score"}}
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return str(tmp_path)


def load(path: Path, tmp_path: Path) -> Config:
    cfg = load_config(path)
    cfg.model.path = described(cfg.model.path, tmp_path)
    if cfg.reward.model.path is not None:
        cfg.reward.model.path = described(cfg.reward.model.path, tmp_path)
    return cfg


def test_the_promised_experiments_are_there() -> None:
    assert [path.stem for path in EXPERIMENTS] == [
        "deepseek-7b-chat-ppo-gsm8k",
        "llama-3-70b-ppo",
        "qwen2.5-0.5b-ppo-gsm8k",
        "qwen2.5-32b-dapo",
        "qwen2.5-7b-grpo-gsm8k-math",
        "qwen2.5-vl-3b-grpo-geo3k",
        "qwen3-30b-a3b-grpo-ep8",
        "qwen3-30b-a3b-grpo-lora",
        "qwen3-vl-4b-grpo-geo3k",
    ]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_it_is_valid_and_fits(path: Path, tmp_path: Path) -> None:
    cfg = load(path, tmp_path)
    validate(cfg, check_files=False)
    plan = make_plan(resolve(cfg), default_world_size(cfg), GPUS["H100"], exact_sync=False)
    assert plan.fits, refusal(plan)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_it_says_where_its_numbers_are_from(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "# Hyper-parameters: " in text
    assert text.count(f"experiment: {path.stem}\n") == 1


@pytest.mark.parametrize(
    ("stem", "world_size", "layout"),
    [
        ("qwen2.5-0.5b-ppo-gsm8k", 1, (1, 1, 1)),
        ("qwen2.5-7b-grpo-gsm8k-math", 8, (2, 2, 1)),
        ("qwen3-30b-a3b-grpo-ep8", 32, (4, 1, 8)),
        ("llama-3-70b-ppo", 64, (8, 8, 1)),
    ],
)
def test_it_is_cut_as_its_name_says(stem: str, world_size: int, layout: tuple[int, int, int]) -> None:
    cfg = load_config(CONFIGS / "experiments" / f"{stem}.yaml")
    assert default_world_size(cfg) == world_size
    assert (cfg.actor.layout.tp, cfg.actor.layout.pp, cfg.actor.layout.ep) == layout
