"""The routes of a batch's tokens, recorded in a pass over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf_mcore.data.collate import restore_tokens
from rlhf_mcore.mcore.route_replay import Routing
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.types import ROUTES, TrainBatch


def replay_routes(model: RoleModel) -> None:
    """Let a model replay the routes of batches that have some."""
    if model.model is not None:
        model.model.routing = Routing.of(model.model)


@contextmanager
def recorded_routes(model: RoleModel, batch: TrainBatch) -> Iterator[None]:
    """Set the batch's field ``ROUTES`` to the routes of the pass that is made in this block. Collective over the world."""
    routing = None if model.model is None else model.model.routing
    if routing is not None:
        routing.noted = {}
    yield
    experts = model.spec.geometry.experts
    assert experts is not None, "config.validate refuses dense models"
    tokens = torch.zeros(0, len(model.spec.geometry.moe_layers), experts.per_token, dtype=torch.int16)
    if routing is not None:
        wholes, microbatches = routing.recorded()
        if model.keeps_outputs:
            tokens = restore_tokens(wholes, microbatches, model.own_lengths(batch), torch.int16)
    batch.fields[ROUTES] = model.all_to_owners(batch, tokens)
