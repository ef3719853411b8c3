"""Measure how good an engine's drafts were (arXiv 2211.17192)."""

from __future__ import annotations

from itertools import zip_longest

from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.types import Field, Ragged


def draft_metrics(drafts: Field) -> dict[str, float]:
    """Compute the share of drafts of each depth that were taken, and the tokens of a pass that had drafts. Collective over the world.

    ``drafts``: the field ``DRAFTS`` of this rank's tokens, [N, 2]. No draft is taken behind one that is not.
    """
    assert not isinstance(drafts, Ragged)
    depths = range(1, int(drafts.max()) + 1 if len(drafts) else 1)
    mine = [(drafts >= depth).sum(0).tolist() for depth in depths]
    ranks = zip_longest(*all_gather_json(mine), fillvalue=(0, 0))
    counts = [(sum(drafted for drafted, _ in of_depth), sum(taken for _, taken in of_depth)) for of_depth in ranks]
    if not counts:
        return {}
    shares = {f"rollout/draft_acceptance/{depth}": taken / drafted for depth, (drafted, taken) in enumerate(counts, 1)}
    return shares | {"rollout/draft_pass_tokens": 1 + sum(taken for _, taken in counts) / counts[0][0]}
