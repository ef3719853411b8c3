"""Test the positions of images among tokens, and the angles of their rotation."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_mcore.families import FAMILIES
from rlhf_mcore.geometry import VisionSizes
from rlhf_mcore.mcore.image_features import StepFeatures, mask_with_images
from rlhf_mcore.mcore.vision import ModelVision, image_positions
from rlhf_mcore.platform import current_platform
from rlhf_mcore.types import Microbatch

IMAGE = 90
SIZES = VisionSizes(IMAGE, 32, 48, 1, patch_size=4, temporal_patch_size=2, channels=3, merge_size=2, sections=(2, 3, 3))


@dataclass
class Grids:
    grids: dict[str, tuple[int, int, int]]

    def features(self, digest: str) -> Any:
        return SimpleNamespace(grid_thw=self.grids[digest])


def test_text_counts_on_from_the_largest_position_of_an_image() -> None:
    """Two words, two rows of three image tokens, a word, an image of one token, a word, as in transformers' get_rope_index."""
    found = image_positions(11, torch.tensor([2, 3, 4, 5, 6, 7, 9]), [(1, 4, 6), (1, 2, 2)], 2)
    assert found.T.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]


def test_channels_rotate_in_blocks_or_in_turns() -> None:
    blocks, turns = FAMILIES["qwen2_5_vl"].vision, FAMILIES["qwen3_vl"].vision
    assert blocks is not None and turns is not None
    assert blocks.axes((2, 3, 3)) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert turns.axes((4, 2, 2)) == [0, 1, 2, 0, 1, 2, 0, 0]


def test_a_token_of_images_that_a_policy_draws_is_a_word() -> None:
    """Two packed rows: one with an image of two tokens and a sampled image token, padded to 8; one of text with a
    sampled image token.
    """
    groups: Any = SimpleNamespace()
    vision = ModelVision(SIZES, Grids({"a": (1, 2, 4)}), groups, False, current_platform(), 32, StepFeatures())
    ids = [5, IMAGE, IMAGE, 6, IMAGE, 7, 0, 0, 8, IMAGE, 9]
    microbatch = Microbatch(
        token_ids=torch.tensor([ids]),
        position_ids=torch.tensor([[*range(8), *range(3)]]),
        rows=[0, 1],
        lengths=[6, 3],
        cu_seqlens=torch.tensor([0, 8, 11], dtype=torch.int32),
        images=[("a",), ()],
    )
    found = vision.derive(microbatch, lambda values: values)
    assert found["image_places"].tolist() == [1, 2] and found["image_rows"].tolist() == [0, 1]
    assert found["rotary_positions"][0].T.tolist() == [
        [0, 1, 1, 3, 4, 5, 6, 7, 0, 1, 2],
        [0, 1, 1, 3, 4, 5, 6, 7, 0, 1, 2],
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2],
    ]
    assert "image_blocks" not in found
    vision.attends_within = True
    blocks = vision.derive(microbatch, lambda values: values)["image_blocks"]
    assert blocks.tolist() == [[-1, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1]]


@pytest.mark.parametrize(
    ("window", "rows"),
    [
        (None, ["x....", "xxx..", "xxx..", "xxxx.", "xxxxx"]),
        (2, ["x....", "xxx..", ".xx..", "..xx.", "...xx"]),  # itself and the previous token
    ],
)
def test_tokens_of_an_image_see_each_other_as_far_back_as_a_window_reaches(window: int | None, rows: list[str]) -> None:
    """A word, an image of two tokens, an image of one token, and a word."""
    mask = mask_with_images(torch.tensor([[-1, 0, 0, 1, -1]]), 5, window, None)
    assert ["".join(".x"[seen] for seen in row) for row in mask[0, 0].tolist()] == rows
