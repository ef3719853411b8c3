from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_mcore.config.schema import TrainerConfig
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.scalar_models import RewardModel
from tests.rows import padded_batch
from tests.unit.roles import lookup
from tests.unit.roles.lookup import Lookup

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("max_tokens", [8, 64])
def test_the_score_is_what_the_model_says_at_the_last_token(
    monkeypatch: pytest.MonkeyPatch, packing: bool, max_tokens: int
) -> None:
    model: Any = Lookup(width=1)
    made = lookup.batch()
    trainer, spec = TrainerConfig(max_tokens_per_microbatch=max_tokens, packing=packing), model.spec
    scores = RewardModel(RoleModel(model.layout, model, spec, trainer)).compute_scores(made)
    ids = padded_batch(made).token_ids.tolist()
    last = [row[length - 1] for row, length in zip(ids, made.lengths.tolist(), strict=True)]
    assert scores.dtype == torch.float32
    assert scores.tolist() == [model.table[token, 0].item() for token in last]
