"""Models beside a policy that reads images have to see in its rows what it sees."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.rules.parts import processor_problems, vision_problems
from rlhf_mcore.config.schema import Config, DataConfig, LayoutConfig, RewardModelConfig
from rlhf_mcore.readers.model_files import read_geometry
from tests.messages import assert_names

MODELS = Path(__file__).parents[4] / "configs" / "models"
PROCESSOR = {"patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "do_normalize": True, "max_pixels": 1000}
SCORER = {"architectures": ["Qwen2_5_VLWithImagesForSequenceClassification"], "id2label": {"0": "value"}}


def folder(path: Path, config: dict[str, Any], processor: dict[str, Any], name: str = "Qwen2.5-VL-3B-Instruct") -> Path:
    copytree(MODELS / name, path)
    held = json.loads((path / "config.json").read_text())
    tower = {**held.get("vision_config", {}), **config.pop("vision_config", {})}
    (path / "config.json").write_text(
        json.dumps({**held, **config, "vision_config": tower} if tower else held | config)
    )
    (path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **processor}))
    return path


def problems_of(tmp_path: Path, scorer: Path, **data: Any) -> list[str]:
    policy, cfg = folder(tmp_path / "policy", {}, {}), Config()
    cfg = cfg.model_copy(
        update={
            "model": cfg.model.model_copy(update={"path": str(policy)}),
            "data": DataConfig(**data),
            "reward": cfg.reward.model_copy(update={"model": RewardModelConfig(path=str(scorer))}),
        }
    )
    return list(vision_problems(cfg, read_geometry(policy)))


def test_a_reward_model_of_the_family_may_score_images(tmp_path: Path) -> None:
    """Bounds of pixels may be others: images come as the policy sees them."""
    scorer = folder(tmp_path / "scorer", dict(SCORER), {"max_pixels": 7})
    assert problems_of(tmp_path, scorer) == []


@pytest.mark.parametrize(
    ("config", "processor", "words"),
    [
        ({"image_token_id": 151656}, {}, ["image_token_id=151656", "has 151655"]),
        ({"vision_config": {"patch_size": 16}}, {}, ["patch_size=16", "has 14"]),
        ({}, {"image_mean": [0.1, 0.5, 0.5]}, ["image_mean=[0.1, 0.5, 0.5]", "preprocessor_config.json"]),
    ],
)
def test_one_that_would_see_something_else_is_refused(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], words: list[str]
) -> None:
    scorer = folder(tmp_path / "scorer", {**SCORER, **config}, processor)
    (problem,) = problems_of(tmp_path, scorer)
    assert all(word in problem for word in [f"reward.model.path={scorer}", "data.image_key=null", *words]), problem


def test_one_that_sees_nothing_is_refused_unless_images_are_left_out(tmp_path: Path) -> None:
    text = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "value"}}
    scorer = folder(tmp_path / "scorer", text, {}, "Qwen2.5-0.5B-Instruct")
    (problem,) = problems_of(tmp_path, scorer)
    assert "reads no images" in problem and "data.image_key=null" in problem
    assert problems_of(tmp_path / "without", scorer, image_key=None) == []


def test_a_directory_without_a_processor_is_named_with_the_remedy(tmp_path: Path) -> None:
    cfg, policy = Config(), folder(tmp_path / "policy", {}, {})
    cfg.model.path = str(policy)
    assert list(processor_problems(cfg)) == []
    (policy / "preprocessor_config.json").rename(policy / "processor_config.json")  # as transformers 5 saves it
    assert list(processor_problems(cfg)) == []
    (policy / "processor_config.json").unlink()
    (problem,) = processor_problems(cfg)
    assert_names(problem, field=f"model.path={policy}", value="preprocessor_config.json", remedy="copy")
    assert isinstance(problem, FileProblem)  # a plan is made without


def test_stages_of_models_beside_the_policy_are_checked(tmp_path: Path) -> None:
    """Features of three levels of the tower go to the first three layers of Qwen3-VL: a stage of two is too small."""
    policy, cfg = MODELS / "Qwen3-VL-4B-Instruct", Config()
    cfg = cfg.model_copy(
        update={
            "model": cfg.model.model_copy(update={"path": str(policy)}),
            "reward": cfg.reward.model_copy(
                update={
                    "model": RewardModelConfig(path=str(policy), layout=LayoutConfig(pp=2, layers_per_stage=[2, 34]))
                }
            ),
        }
    )
    (problem,) = vision_problems(cfg, read_geometry(policy))
    assert "reward.model.layout: the first pipeline stage has 2 layers" in problem and "reward.model.path" in problem
