"""Send preprocessed images to vLLM, with prompts that already contain all image tokens.

vLLM normally expects a prompt with one token per image, and replaces it by the full number. It would expand a complete prompt
once more, without an error. Requests therefore bypass its processor, in the format that its renderer would produce.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rlhf_mcore.data.images import ImageStore, ImageTokens, placeholders

if TYPE_CHECKING:
    from rlhf_mcore.rollout.engine import EngineModel
    from rlhf_mcore.types import Request


def options(model: EngineModel) -> dict[str, Any]:
    """Return the arguments of vllm.LLM for a vision model."""
    return {
        "skip_tokenizer_init": False,  # vLLM's image processor needs a tokenizer
        "tokenizer": model.tokenizer_dir,
        "limit_mm_per_prompt": {"image": model.max_images, "video": 0},
        "mm_processor_cache_gb": 0,  # with a cache, vLLM would not send cached images to the engine again
        "mm_device_do_normalize": False,  # pixels are already normalised
    }


@contextmanager
def inspected_here() -> Iterator[None]:
    """Let vLLM inspect a model class in this process, where torchvision's operators are declared, instead of in a subprocess."""
    from vllm.model_executor.models import registry

    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
        yield


class EngineImages:
    """The images of requests, from the run's store."""

    def __init__(self, model: EngineModel) -> None:
        assert model.images is not None, "requests with images require a vision model"
        self._store, self._tokens = ImageStore(Path(model.images)), ImageTokens.of(model.model_dir)

    def enqueue(
        self,
        llm: Any,
        requests: Iterable[tuple[Request, Any, Any]],
        version: int,
        named: Mapping[str, Any],
    ) -> list[str]:
        """Send requests to a vllm.LLM as its ``enqueue`` does, and return their handles.

        Args:
            requests: each request with its vLLM prompt without images, and its sampling parameters.
            version: version of the weights. It is part of the cache key, because vLLM caches image features of older weights.

        Raises:
            OSError: the store does not contain an image.
            ValueError: a prompt lacks the tokens of its images.
        """
        handles = []
        for request, prompt, own in requests:
            given = self._prompt(request, version, prompt.get("cache_salt")) if request.images else prompt
            handles.append(llm.llm_engine.add_request(str(next(llm.request_counter)), given, own, **named))
        return handles

    def _prompt(self, request: Request, version: int, salt: str | None) -> Any:
        from transformers import BatchFeature
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

        images = [self._store.features(digest) for digest in request.images]
        counts = [image.num_tokens(self._tokens.merge_size) for image in images]
        places = placeholders(request.prompt_ids, self._tokens.token_id, counts)
        grids = torch.tensor([image.grid_thw for image in images])
        features = {"pixel_values": torch.cat([image.pixel_values for image in images]), "image_grid_thw": grids}
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        return mm_input(
            list(request.prompt_ids),
            MultiModalKwargsItems.from_hf_inputs(BatchFeature(features), fields),
            {"image": [f"{digest} {version}" for digest in request.images]},
            {"image": [PlaceholderRange(offset=first, length=number) for first, number in places]},
            cache_salt=salt,
        )
