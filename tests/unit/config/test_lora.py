"""Keys of adapters: what they mean, and what they do not go together with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_mcore.config.implied import adapter_sizes, sends_adapters
from rlhf_mcore.config.rules.lora import lora_problems, target_problems
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import ExpertSizes, GroupedSizes, ModelGeometry


def configured(**changes: object) -> Config:
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
    return list(lora_problems(configured(**changes)))


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"actor__lora__targets": []}, "actor.lora.targets"),
        ({"actor__lora__init": "pissa"}, "actor.lora.init"),
        ({"actor__lora__use_dora": True}, "actor.lora.use_dora"),
        ({"algorithm__kind": "reward_model"}, "algorithm.kind"),
        ({"model__layer_spec": "te"}, "model.layer_spec"),
        ({"actor__freeze": ["model.norm.weight"]}, "actor.freeze"),
        ({"actor__mtp__mode": "train"}, "actor.mtp.mode"),
        ({"actor__moe__expert_bias_rate": 0.001}, "actor.moe.expert_bias_rate"),
        ({"actor__optimizer__name": "muon"}, "actor.optimizer.name"),
        ({"algorithm__kl__coef": 0.1, "reference__path": "other"}, "reference.path"),
        ({"algorithm__kl__coef": 0.1, "reference__refresh_steps": 5}, "reference.refresh_steps"),
        ({"algorithm__kl__coef": 0.1, "reference__offload": True}, "reference.offload"),
        ({"actor__lora__rank": None, "actor__lora__dropout": 0.1}, "actor.lora.dropout"),
    ],
)
def test_what_does_not_go_together_is_one_message(changes: dict[str, object], named: str) -> None:
    assert len(problems(**changes)) == 1
    assert named in problems(**changes)[0]


DENSE = ModelGeometry("qwen3", 1, 8, GroupedSizes(4, 2, 2), 16, 13, True)
MIXTURE = replace(DENSE, family="qwen3_moe", experts=ExpertSizes(4, 6, 2))


@pytest.mark.parametrize(
    ("geometry", "changes", "sends"),
    [
        (DENSE, {}, True),
        (DENSE, {"actor__lora__sync": "merge"}, False),
        (DENSE, {"rollout__engine": "hf"}, False),
        (DENSE, {"actor__lora__rank": 12}, False),
        (DENSE, {"actor__lora__rank": None}, False),
        (DENSE, {"rollout__speculative__method": "ngram"}, False),
        (replace(DENSE, tied_embeddings=False), {"actor__lora__targets": ["q_proj", "lm_head"]}, False),
        (MIXTURE, {}, False),
    ],
)
def test_engines_get_adapters_where_they_can_add_them(
    geometry: ModelGeometry, changes: dict[str, object], sends: bool
) -> None:
    cfg = configured(**changes)
    assert sends_adapters(cfg, geometry) is sends
    cfg.actor.lora.sync = "adapter"
    refused = [problem for problem in target_problems(cfg, geometry) if "sync=adapter" in problem]
    assert bool(refused) is (cfg.actor.lora.rank is not None and not sends and "actor__lora__sync" not in changes)
