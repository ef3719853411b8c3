"""Test the keys of adapters: their meaning and rejected combinations."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf_mcore.bridge.plan.sent_weights import sends_adapters
from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.questions import adapter_sizes
from rlhf_mcore.config.rules.parts import lora_problems, target_problems
from rlhf_mcore.config.schema import Config
from rlhf_mcore.families import hf_shapes
from rlhf_mcore.geometry import AdapterSizes, ExpertSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def make_config(**changes: object) -> Config:
    cfg = Config()
    cfg.actor.lora.rank = 8
    for key, value in changes.items():
        group = cfg
        *names, last = key.split("__")
        for name in names:
            group = getattr(group, name)
        setattr(group, last, value)
    return cfg


def problems(**changes: object) -> list[str]:
    return list(lora_problems(make_config(**changes)))


def test_adapters_alone_are_no_problem() -> None:
    assert problems() == []


def test_alpha_is_twice_the_rank() -> None:
    cfg = Config()
    assert adapter_sizes(cfg.actor.lora) is None
    cfg.actor.lora.rank = 8
    sizes = adapter_sizes(cfg.actor.lora)
    assert sizes is not None
    assert (sizes.alpha, sizes.scale, sizes.targets) == (16.0, 2.0, ("all-linear",))
    cfg.actor.lora.alpha, cfg.actor.lora.use_rslora, cfg.actor.lora.rank = 12.0, True, 9
    sizes = adapter_sizes(cfg.actor.lora)
    assert sizes is not None and sizes.scale == 4.0


def test_what_begins_with_singular_vectors_has_twice_the_rank_and_the_same_scale() -> None:
    plain, pissa = (make_config(actor__lora__init=init) for init in ("gaussian", "pissa"))
    one, other = adapter_sizes(plain.actor.lora), adapter_sizes(pissa.actor.lora)
    assert one is not None and other is not None
    assert (one.rank, one.fixed) == (8, 0) and (other.rank, other.fixed) == (16, 8)
    assert other.scale == pytest.approx(one.scale, rel=1e-12)


def test_what_does_not_go_together_is_one_message() -> None:
    for changes, named in [
        ({"actor__lora__targets": []}, "actor.lora.targets"),
        ({"actor__lora__init": "pissa", "actor__lora__dropout": 0.1}, "actor.lora.dropout"),
        ({"actor__lora__init": "pissa", "actor__lora__path": "other"}, "actor.lora.path"),
        ({"actor__lora__init": "pissa", "actor__optimizer__weight_decay": 0.1}, "actor.optimizer.weight_decay"),
        ({"actor__lora__use_dora": True, "actor__lora__dropout": 0.1}, "actor.lora.dropout=0.1; set that to 0"),
        ({"actor__lora__use_dora": True, "actor__lora__init": "pissa"}, "actor.lora.init=pissa; set that to gaussian"),
        (
            {"actor__lora__use_dora": True, "actor__lora__sync": "adapter"},
            "sync=adapter is not possible; set that to merge",
        ),
        (
            {
                "algorithm__advantage": "gae",
                "critic__lora__rank": 4,
                "critic__lora__use_dora": True,
                "critic__lora__dropout": 0.1,
            },
            "critic.lora.use_dora=True is not supported with critic.lora.dropout",
        ),
        ({"algorithm__advantage": "gae", "critic__lora__rank": 4, "critic__lora__targets": []}, "critic.lora.targets"),
        (
            {"algorithm__advantage": "gae", "critic__lora__rank": 4, "critic__optimizer__name": "muon"},
            "critic.optimizer.name",
        ),
        ({"actor__freeze": ["model.norm.weight"]}, "actor.freeze"),
        ({"actor__mtp__mode": "train"}, "actor.mtp.mode"),
        ({"bridge__method": "gather"}, "set bridge.method=planned"),
        ({"bridge__method": "gather", "rollout__engine": "server"}, "set it to null"),
        ({"actor__moe__expert_bias_rate": 0.001}, "actor.moe.expert_bias_rate"),
        ({"actor__optimizer__name": "muon"}, "actor.optimizer.name"),
        ({"algorithm__kl__coef": 0.1, "reference__path": "other"}, "reference.path"),
        ({"algorithm__kl__coef": 0.1, "reference__refresh_steps": 5}, "reference.refresh_steps"),
        ({"algorithm__kl__coef": 0.1, "reference__offload": "always"}, "reference.offload"),
    ]:
        assert len(problems(**changes)) == 1
        assert named in problems(**changes)[0]


@pytest.mark.parametrize(("change", "name"), [("use_dora", "dora"), ("init", "pissa")])
def test_a_missing_plugin_is_named(monkeypatch: pytest.MonkeyPatch, change: str, name: str) -> None:
    monkeypatch.setattr("rlhf_mcore.plugins.entry_points", lambda group: [])
    (problem,) = problems(**{f"actor__lora__{change}": True if change == "use_dora" else "pissa"})
    assert f"actor.lora.{change}=" in problem and f"needs rlhf_mcore_contrib.{name}" in problem


DENSE = ModelGeometry("qwen3", 1, 8, GroupedSizes(4, 2, 2), 16, 13, True)
MIXTURE = replace(DENSE, family="qwen3_moe", experts=ExpertSizes(4, 6, 2))


def test_engines_get_adapters_where_they_can_add_them() -> None:
    for geometry, changes, sends in [
        (DENSE, {}, True),
        (DENSE, {"actor__lora__sync": "merge"}, False),
        (DENSE, {"rollout__engine": "hf"}, False),
        (DENSE, {"actor__lora__rank": 12}, False),
        (DENSE, {"actor__lora__use_dora": True}, False),
        (DENSE, {"actor__lora__rank": None}, False),
        (DENSE, {"rollout__speculative__method": "ngram"}, False),
        (replace(DENSE, tied_embeddings=False), {"actor__lora__targets": ["q_proj", "lm_head"]}, False),
        (MIXTURE, {}, False),
        (MIXTURE, {"actor__lora__targets": ["q_proj", "o_proj"]}, True),
        (MIXTURE, {"actor__lora__targets": ["*.self_attn.*"]}, True),
        (MIXTURE, {"actor__lora__targets": ["q_proj", "down_proj"]}, False),
    ]:
        cfg = make_config(**changes)
        assert sends_adapters(cfg, geometry) is sends
        cfg.actor.lora.sync = "adapter"
        refused = [problem for problem in target_problems(cfg, geometry) if "sync=adapter" in problem]
        if cfg.actor.lora.use_dora:  # rejected for every model
            refused = [problem for problem in lora_problems(cfg) if "sync=adapter" in problem]
        assert bool(refused) is (cfg.actor.lora.rank is not None and not sends and "actor__lora__sync" not in changes)


def test_experts_and_both_ends_have_no_magnitudes() -> None:
    for geometry, targets in [
        (MIXTURE, ["all-linear"]),
        (MIXTURE, ["q_proj", "down_proj"]),
    ]:
        changes = {"actor__lora__use_dora": True, "actor__lora__targets": targets}
        [problem] = target_problems(make_config(**changes), geometry)
        assert problem.startswith("actor.lora.targets: ") and problem.endswith("or set actor.lora.use_dora=false")
        assert "does not support DoRA" in problem and ("experts.0" in problem or targets[-1] in problem)
        assert not list(
            target_problems(make_config(actor__lora__use_dora=True, actor__lora__targets=["q_proj"]), geometry)
        )


def peft_directory(directory: Path, geometry: ModelGeometry, **changes: object) -> Path:
    """Write a PEFT directory with adapters of rank 8 and alpha 16 for every linear layer."""
    directory.mkdir()
    sizes = AdapterSizes(8, 16.0, ("all-linear",))
    (directory / ADAPTER_CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"} | changes)
    )
    shapes = hf_shapes(replace(geometry, adapter=sizes))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, directory / ADAPTER_WEIGHTS)
    return directory


def start_problems(path: Path, **changes: object) -> list[str]:
    return list(target_problems(make_config(actor__lora__path=str(path), **changes), DENSE))


def test_training_may_begin_with_adapters_of_the_same_layers_rank_and_scale(tmp_path: Path) -> None:
    path = peft_directory(tmp_path / "adapter", DENSE)
    assert start_problems(path) == []
    assert start_problems(path, actor__lora__alpha=16.0) == []


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (lambda path: None, {}, ("actor.lora.path=", "does not exist", "give the directory")),
        (lambda path: path.mkdir(), {}, ("actor.lora.path=", "has no adapter_config.json", "give the directory")),
        (
            lambda path: peft_directory(path, DENSE),
            {"actor__lora__rank": 4},
            ("actor.lora.path", "have rank 8", "asks for rank 4", "set actor.lora.rank"),
        ),
        (
            lambda path: peft_directory(path, replace(DENSE, hidden_size=16)),
            {},
            ("actor.lora.path", "[8, 16]", "[8, 8]", "name the model that the adapter was trained for"),
        ),
        (
            lambda path: peft_directory(path, replace(DENSE, num_layers=2)),
            {},
            ("actor.lora.path", "belong to no linear layer of the model", "layers.1"),
        ),
    ],
    ids=["absent", "empty", "rank", "width", "depth"],
)
def test_adapters_that_training_cannot_begin_with_are_one_message(
    tmp_path: Path, make: Callable[[Path], object], changes: dict[str, object], named: tuple[str, ...]
) -> None:
    make(tmp_path / "adapter")
    [problem] = start_problems(tmp_path / "adapter", **changes)
    assert all(text in problem for text in named), problem
    assert isinstance(problem, FileProblem), "a plan does not need the directory"
