"""Seeds of requests."""

from __future__ import annotations

import itertools

import pytest

from rlhf_mcore.rollout.seeds import request_seed


@pytest.mark.parametrize(
    ("arguments", "digest"),
    [  # of the 32 bytes, by coreutils: b2sum -l 64
        ((0, 0, 0, 0), "c50d124a8aaf41a1"),
        ((7, 3, 11, 2), "04d06870f3b5aa95"),
        ((1, 0, 0, 0), "3eea3990185ec82c"),
    ],
)
def test_seed_is_the_digest_without_its_lowest_bit(arguments: tuple[int, int, int, int], digest: str) -> None:
    reversed_bytes = "".join(digest[i : i + 2] for i in range(14, -2, -2))
    assert request_seed(*arguments) == int(reversed_bytes, 16) // 2


def test_neighbours_have_seeds_of_their_own_that_fit_in_an_int64() -> None:
    seeds = {request_seed(*arguments) for arguments in itertools.product(range(8), repeat=4)}
    assert len(seeds) == 8**4
    assert all(0 <= seed < 2**63 for seed in seeds)
