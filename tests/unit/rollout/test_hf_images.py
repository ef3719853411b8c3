"""Compare the logprobs of the reference engine's samples with a transformers pass over each whole sequence, for prompts
with images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_mcore.data.images import LEVELS, ImageStore
from rlhf_mcore.rollout.hf.engine import BatchImages, _Batch
from rlhf_mcore.types import Request, Sampling
from tests.distributed import models

GRIDS = {"wide": (4, 6), "small": (2, 2)}
PROMPTS = (("wide",), (), ("small", "wide"), ("small",))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3"])
@torch.no_grad()
def test_logprobs_of_what_is_drawn_are_those_of_a_pass_over_all(tmp_path: Path, name: str) -> None:
    """Prompts of different lengths with no, one and two images are in one batch."""
    model: Any = models.make_with_tower(name, tmp_path / "model")
    squares = name == "gemma3"
    store = make_store(tmp_path / "patches", squares)
    requests = [
        Request(n, str(n), prompt(images, store), Sampling(max_new_tokens=4), seed=n, images=images)
        for n, images in enumerate(PROMPTS)
    ]
    batch = _Batch([(request, 4) for request in requests], 0, torch.device("cpu"))
    batch.images = BatchImages(model, batch, (str(tmp_path / "patches"), str(tmp_path / "model")))
    while not all(batch.finished):
        batch.step(model, ())
    for request, drawn in zip(requests, batch.drawn, strict=True):
        tokens, logprobs = zip(*drawn, strict=True)
        assert models.IMAGE_TOKEN not in tokens, "choose other seeds: transformers would look for a further image"
        whole = torch.tensor([[*request.prompt_ids, *tokens]])
        given = models.image_arguments(whole, [store.features(digest) for digest in request.images], squares=squares)
        if name.startswith("qwen"):
            model.model.rope_deltas = None  # otherwise it reuses the value of the previous call
        expected = model(input_ids=whole, **given).logits[0, -5:-1].log_softmax(-1)[range(4), tokens]
        assert logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def make_store(folder: Path, squares: bool) -> ImageStore:
    folder.mkdir()
    np.save(folder / LEVELS, np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (3, 1)))
    rng = np.random.default_rng(0)
    for name, grid in GRIDS.items():
        shape = (6, 6, 3 * 4 * 4) if squares else (*grid, 3 * 2 * 4 * 4)
        np.save(folder / f"{name}.npy", rng.integers(0, 256, shape, dtype=np.uint8))
    return ImageStore(folder)


def prompt(images: tuple[str, ...], store: ImageStore) -> list[int]:
    tokens = [5, 7, 11]
    for image in images:
        tokens += [92, *[models.IMAGE_TOKEN] * store.features(image).num_tokens(2), 93]
    return [*tokens, 13]
