from __future__ import annotations

import json
from collections import Counter

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.sampler import PromptSampler, WeightedSampler, epoch_order
from tests.messages import expect_error


def draw(sampler: PromptSampler, num_batches: int) -> list[int]:
    return [position for _ in range(num_batches) for position in sampler.next_batch()]


def test_without_shuffling_batches_walk_around_the_data() -> None:
    sampler = PromptSampler(5, 3, seed=0, shuffle=False)
    assert [sampler.next_batch() for _ in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    drawn = draw(PromptSampler(10, 4, seed=3, shuffle=True), 5)
    epochs = drawn[:10], drawn[10:]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    assert draw(PromptSampler(12, 4, seed=1, shuffle=True), 6) == draw(PromptSampler(12, 3, seed=1, shuffle=True), 8)
    assert draw(PromptSampler(12, 12, seed=1, shuffle=True), 1) != draw(PromptSampler(12, 12, seed=2, shuffle=True), 1)


def test_the_order_is_that_of_the_published_generator() -> None:
    # Philox4x64-10 with key (0, 0) from counter 1 on, computed from the paper's definition by the slow function below.
    words = [word for block in range(1, 4) for word in philox4x64(counter=block, key=(7, 2))][:10]
    assert epoch_order(10, seed=7, epoch=2).tolist() == sorted(range(10), key=lambda place: words[place])


def philox4x64(counter: int, key: tuple[int, int], rounds: int = 10) -> list[int]:
    """Return a block of Philox4x64 (Salmon et al. 2011, section 3.3), with the constants of its reference table."""
    mask = (1 << 64) - 1
    words, (low, high) = [counter, 0, 0, 0], key
    for _ in range(rounds):
        first, second = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(second >> 64) ^ words[1] ^ low, second & mask, (first >> 64) ^ words[3] ^ high, first & mask]
        low, high = (low + 0x9E3779B97F4A7C15) & mask, (high + 0xBB67AE8584CAA73B) & mask
    return words


def test_fewer_prompts_than_a_batch_repeat_evenly() -> None:
    assert Counter(PromptSampler(3, 7, seed=0, shuffle=True).next_batch()).most_common() in (
        [(first, 3), (second, 2), (third, 2)]
        for first, second, third in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    )


@pytest.mark.parametrize("num_batches", [0, 1, 3, 7])
def test_a_resumed_sampler_goes_on_as_the_first_would_have(num_batches: int) -> None:
    original = PromptSampler(10, 4, seed=5, shuffle=True)
    draw(original, num_batches)
    state = json.loads(json.dumps(original.state_dict()))
    resumed = PromptSampler(10, 4, seed=5, shuffle=True)
    resumed.load_state_dict(state)
    assert draw(resumed, 6) == draw(original, 6)
    assert resumed.state_dict() == original.state_dict()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"extra": 1}, "extra"),
        ({"num_prompts": 11}, "the number of prompts in data.train was 11 and is now 10"),
        ({"seed": 6}, "seed was 6 and is now 5"),
        ({"shuffle": False}, "data.shuffle was False and is now True"),
        ({"num_drawn": -1}, "num_drawn=-1"),
        ({"num_drawn": 1.0}, "num_drawn=1.0"),
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, object], message: str) -> None:
    sampler = PromptSampler(10, 4, seed=5, shuffle=True)
    with pytest.raises(ConfigError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_a_state_with_a_missing_key_is_refused() -> None:
    sampler = PromptSampler(10, 4, seed=5, shuffle=True)
    with pytest.raises(ConfigError, match="num_drawn"):
        sampler.load_state_dict({key: value for key, value in sampler.state_dict().items() if key != "num_drawn"})


@pytest.mark.parametrize("num_prompts, batch_size, seed", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_sizes_that_make_no_sense_are_refused(num_prompts: int, batch_size: int, seed: int) -> None:
    with pytest.raises(ConfigError):
        PromptSampler(num_prompts, batch_size, seed, shuffle=True)


def test_files_keep_their_shares_at_every_draw() -> None:
    sampler = WeightedSampler([5, 50, 7], [3, 1, 2], batch_size=1, seed=0, shuffle=True)
    held: Counter[int] = Counter()
    for drawn in range(1, 601):
        position = sampler.next_batch()[0]
        held[0 if position < 5 else 1 if position < 55 else 2] += 1
        for which, share in enumerate((1 / 2, 1 / 6, 1 / 3)):
            assert abs(held[which] - share * drawn) <= 1
    assert held == {0: 300, 1: 100, 2: 200}


def test_every_file_has_epochs_of_its_own() -> None:
    drawn = draw(WeightedSampler([4, 4], [1, 1], batch_size=4, seed=3, shuffle=True), 8)
    for first in (0, 4):
        mine = [position - first for position in drawn if first <= position < first + 4]
        assert all(sorted(mine[start : start + 4]) == [0, 1, 2, 3] for start in range(0, 16, 4))
    assert [p for p in drawn if p < 4] != [p - 4 for p in drawn if p >= 4], (
        "files of one size are walked in different orders"
    )


def test_a_weighted_sampler_goes_on_where_it_was() -> None:
    made = [WeightedSampler([5, 9], [2, 1], size, seed=1, shuffle=True) for size in (4, 4, 6)]
    draw(made[0], 3)
    for other in made[1:]:
        other.load_state_dict(json.loads(json.dumps(made[0].state_dict())))
    assert draw(made[0], 6) == draw(made[1], 6) == draw(made[2], 4)
    with expect_error(ConfigError, field="files", value=(2, 1)):
        WeightedSampler([5], [1], 4, seed=1, shuffle=True).load_state_dict(made[0].state_dict())
    with pytest.raises(ConfigError, match="number of prompts"):
        WeightedSampler([5, 8], [2, 1], 4, seed=1, shuffle=True).load_state_dict(made[0].state_dict())


def test_a_file_without_prompts_has_no_share() -> None:
    with expect_error(ConfigError, field="data.train[1]", value="no prompts"):
        WeightedSampler([5, 0], [1, 1], 4, seed=1, shuffle=True)
