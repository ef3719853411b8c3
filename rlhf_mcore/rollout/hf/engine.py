"""A plain decoding loop over a transformers model: the reference engine, and the engine for models that vLLM does not support."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.images import ImageStore, ImageTokens, placeholders, whole_images
from rlhf_mcore.families import ARCHITECTURES
from rlhf_mcore.platform import DTYPES, current_platform
from rlhf_mcore.platform.base import preserved_rng
from rlhf_mcore.platform.cpu_libraries import declare_image_operators
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.rollout.engine import EngineModel, ExpectedTensors, LiveEngine, ragged_ids
from rlhf_mcore.rollout.hf.checkpoint_tensors import checkpoint_tensors
from rlhf_mcore.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig


class HFEngine(LiveEngine):
    """A full copy of the model on every rank, so one engine per rank. ``layout.tp`` is ignored.

    It also works without torch.distributed, as engine 0 of 1.
    """

    def __init__(self, cfg: RolloutConfig, model: EngineModel) -> None:
        """Build the model without weights. It decodes ``cfg.sequences`` rows at a time.

        Raises:
            ConfigError: a directory cannot be used, or the attention kernel is not installed or not supported by the model.
        """
        is_alone = not dist.is_initialized()
        rank = EngineRank() if is_alone else EngineRank(dist.get_rank(), dist.get_world_size())
        super().__init__(model, rank, cfg.at_publish)
        self._batch_size = cfg.sequences
        self._device = current_platform().device()
        self._model = _build_model(model).to(self._device)
        live, parts = self._model.state_dict(keep_vars=True), checkpoint_tensors(self._model)
        self._targets = {part.name: part.view(live[part.holder].data) for part in parts}
        self._expected = ExpectedTensors.of_model(self._model, parts)
        self._waiting: list[tuple[Request, int]] = []  # each with the maximum number of response tokens
        self._batch: _Batch | None = None
        self._model_images = (model.images, model.model_dir) if model.images is not None else None

    def _begin(self, requests: Sequence[Request], limits: Sequence[int]) -> list[str]:
        self._waiting += zip(requests, limits, strict=True)
        return [request.name for request in requests]

    @torch.no_grad()
    def _step(self) -> list[Completion]:
        """Decode a batch until its longest response ends, then start the next batch.

        The seeds equal vLLM's seeds, but the random numbers differ. The two engines agree in distribution only.
        """
        if self._batch is None or all(self._batch.finished):
            # All requests of a batch use the same sampling parameters.
            first = _distribution(self._waiting[0][0].sampling)
            same = [pair for pair in self._waiting if _distribution(pair[0].sampling) == first][: self._batch_size]
            taken = {request.request_id for request, _ in same}
            self._waiting = [pair for pair in self._waiting if pair[0].request_id not in taken]
            self._batch = _Batch(same, self._tokenizer.pad_token_id, self._device)
            if any(request.images for request, _ in same):
                self._batch.images = self._images_of(self._batch)
        batch = self._batch
        return [
            Completion(
                batch.requests[row].request_id,
                np.array([token for token, _ in batch.drawn[row]], np.int32),
                np.array([logprob for _, logprob in batch.drawn[row]], np.float32),
                tuple(self._in_flight[batch.requests[row].request_id].versions),
                batch.finished[row],
                support=ragged_ids(batch.supports[row]) if batch.requests[row].sampling.records_support else None,
            )
            for row in batch.step(self._model, self._stops)
        ]

    def _images_of(self, batch: _Batch) -> BatchImages:
        assert self._model_images is not None, "requests with images require a vision model"
        return BatchImages(self._model, batch, self._model_images)

    def _end(self, request_ids: Sequence[int]) -> None:
        dropped = set(request_ids)
        self._waiting = [pair for pair in self._waiting if pair[0].request_id not in dropped]
        if self._batch is not None:
            self._batch.drop(dropped)

    def _num_sampled(self) -> dict[int, int]:
        drawn = dict.fromkeys(self._in_flight, 0)
        if self._batch is not None:
            running = zip(self._batch.requests, self._batch.drawn, self._batch.finished, strict=True)
            drawn |= {request.request_id: len(tokens) for request, tokens, finished in running if not finished}
        return drawn

    def sampled_tokens(self, request_ids: Collection[int]) -> dict[int, Sequence[int]]:
        """See :class:`Engine`."""
        if self._batch is None:
            return {}
        rows = zip(self._batch.requests, self._batch.drawn, self._batch.finished, strict=True)
        return {
            request.request_id: [token for token, _ in drawn]
            for request, drawn, finished in rows
            if not finished and request.request_id in request_ids
        }

    def commit_load(self, version: int) -> None:
        """Mark the weights as complete after a load."""
        super().commit_load(version)
        if self._batch is not None and self._at_publish == "resubmit":
            self._batch.cache = None

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights by full tensors under Hugging Face names. Tied tensors may be given once.

        Raises:
            ValueError: a tensor is unknown, repeated, missing, or has a wrong shape. The engine is then unusable.
        """
        self.begin_load()
        for name, tensor in self._expected.check_each(weights):
            self._targets[name].copy_(tensor)
        self.commit_load(version)

    @contextmanager
    def begin(self, version: int) -> Iterator[torch.nn.Module]:
        """Yield the live model for writing. The engine is unusable until the block has ended without an error."""
        self.begin_load()
        yield self.model
        self.commit_load(version)

    @property
    def model(self) -> torch.nn.Module:
        """The live model."""
        return self._model

    def close(self) -> None:
        """Free the model."""
        self.abandon("it was closed")
        del self._model, self._targets


class _Batch:
    """Requests that are decoded together, left-padded. ``finished`` contains the finish reasons; finished rows stay."""

    def __init__(self, rows: Sequence[tuple[Request, int]], pad: int, device: torch.device) -> None:
        self.requests, self.limits = zip(*rows, strict=True)
        self.drawn: list[list[tuple[int, float]]] = [[] for _ in rows]
        self.supports: list[list[NDArray[np.int32]]] = [[] for _ in rows]  # for each sampled token, if it is recorded
        self.finished = [""] * len(rows)
        self.images: BatchImages | None = None  # images of the requests
        self.cache: Any = None  # keys and values of all tokens but the last; None: nothing is computed yet
        self._generators = [torch.Generator(device).manual_seed(request.seed) for request in self.requests]
        longest = max(len(request.prompt_ids) for request in self.requests)
        self.token_ids = torch.full((len(rows), longest), pad, device=device)  # [b, T] int64, like the mask
        self.mask = torch.zeros_like(self.token_ids)
        for row, request in enumerate(self.requests):
            length = len(request.prompt_ids)
            self.token_ids[row, longest - length :] = torch.tensor(request.prompt_ids)
            self.mask[row, longest - length :] = 1

    def step(self, model: torch.nn.Module, stops: Sequence[int]) -> list[int]:
        """Sample a token for each unfinished row. Return the rows that finish with it."""
        new = self.token_ids if self.cache is None else self.token_ids[:, -1:]
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        more = {} if self.images is None or self.cache is not None else self.images.pixels(new.shape[1])
        if self.images is not None:
            positions = self.images.positions(positions)
        output = model(
            input_ids=new,
            attention_mask=self.mask,
            position_ids=positions[..., -new.shape[1] :],
            past_key_values=self.cache,
            use_cache=True,
            **more,
        )
        self.cache = output.past_key_values
        sampling = self.requests[0].sampling
        distribution = log_distribution(output.logits[:, -1], sampling)
        chosen, logprobs = draw(distribution, sampling, self._generators)
        ended = []
        for row, (token, logprob) in enumerate(zip(chosen.tolist(), logprobs.tolist(), strict=True)):
            if self.finished[row]:
                continue  # tokens of a finished row are dropped
            self.drawn[row].append((token, logprob))
            if sampling.records_support:
                self.supports[row].append(distribution[row].isfinite().nonzero()[:, 0].int().cpu().numpy())
            if token in stops or len(self.drawn[row]) == self.limits[row]:
                self.finished[row] = "stop" if token in stops else "length"
                ended.append(row)
        self.token_ids = torch.cat([self.token_ids, chosen[:, None]], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(chosen[:, None])], dim=1)
        return ended

    def drop(self, request_ids: Collection[int]) -> None:
        """Mark the rows of cancelled requests as finished."""
        for row, request in enumerate(self.requests):
            if request.request_id in request_ids and not self.finished[row]:
                self.finished[row] = "cancelled"


class BatchImages:
    """The images of a batch of left-padded requests: pixels for the first pass, and positions for all passes.

    Some models have positions in 3D.
    """

    def __init__(self, model: Any, batch: _Batch, images: tuple[str, str]) -> None:
        """Read the images. ``images`` contains the directories of their store and of the model.

        Raises:
            OSError: the store does not contain an image.
            ValueError: a prompt lacks the tokens of its images.
        """
        folder, model_dir = images
        store, tokens, device = ImageStore(Path(folder)), ImageTokens.of(model_dir), batch.token_ids.device
        kinds = torch.zeros_like(batch.token_ids)  # 1 for image tokens
        all_images = []
        for row, request in enumerate(batch.requests):
            own = [store.features(digest) for digest in request.images]
            counts = [image.num_tokens(tokens.merge_size) for image in own]
            padding = batch.token_ids.size(1) - len(request.prompt_ids)
            for first, number in placeholders(request.prompt_ids, tokens.token_id, counts):
                kinds[row, padding + first : padding + first + number] = 1
            all_images += own
        self._kinds, pixels = kinds, torch.cat([image.pixel_values for image in all_images]).to(device, model.dtype)
        self._rotates = hasattr(model.model, "get_rope_index")
        if not self._rotates:
            tower = model.config.vision_config
            self._pixels = {"pixel_values": whole_images(pixels, all_images[0].grid_thw, tower.num_channels)}
            return
        grids = torch.tensor([image.grid_thw for image in all_images], device=device)
        self._pixels = {"pixel_values": pixels, "image_grid_thw": grids}
        # [3, b, T], and the offset [b, 1] between the position of a later token and the number of tokens before it.
        self._prompts, self._shift = model.model.get_rope_index(
            batch.token_ids, mm_token_type_ids=kinds, image_grid_thw=grids, attention_mask=batch.mask
        )

    def pixels(self, num_tokens: int) -> dict[str, Tensor]:
        """Return the image arguments of a pass over the prompts and their sampled tokens, ``num_tokens`` per row."""
        kinds = F.pad(self._kinds, (0, num_tokens - self._kinds.size(1)))
        return {**self._pixels, "mm_token_type_ids" if self._rotates else "token_type_ids": kinds}

    def positions(self, places: Tensor) -> Tensor:
        """Return the positions [3, b, T], or [b, T], of tokens from their indices [b, T] within their rows."""
        if not self._rotates:
            return places
        later = (places[:, self._prompts.size(2) :] + self._shift).expand(3, -1, -1)
        return torch.cat([self._prompts, later], dim=-1)


def _distribution(sampling: Sampling) -> tuple[float, float, int, bool]:
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.records_support


def _build_model(model: EngineModel) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model.model_dir, trust_remote_code=False, local_files_only=True)
    known = ARCHITECTURES.get((config.architectures or ("none",))[0])
    for key, value in known[0].of_transformers.items() if known is not None else ():
        setattr(config, key, value)
    if model.images is not None:
        declare_image_operators()
    kind = AutoModelForCausalLM if model.images is None else AutoModelForImageTextToText
    with preserved_rng():
        torch.manual_seed(model.seed)
        kernel = {} if model.attention == "auto" else {"attn_implementation": model.attention}
        dtype = DTYPES[model.dtype]
        try:
            return kind.from_config(config, dtype=dtype, trust_remote_code=False, **kernel).eval()
        except (ImportError, ValueError) as error:
            if model.attention == "auto":
                raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"model.attention={model.attention} cannot be used here ({reason}); set model.attention=auto"
            ) from error


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the logprobs [b, V] float32 for sampling, from logits [b, V]; -inf outside the support.

    ``sampling`` provides temperature (0: logprobs at temperature 1), top_k (-1: off) and top_p (1.0: off).
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    return truncate(logits / sampling.temperature, sampling.top_k, sampling.top_p).log_softmax(-1)


def draw(distribution: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Sample one token per row. Return ids [b] int64 and their logprobs [b] float32.

    Args:
        distribution: [b, V], from ``log_distribution``.
        sampling: provides the temperature; at 0 the most likely token is taken.
        generators: one per row. Each advances by V numbers.
    """
    chosen = distribution.argmax(-1) if sampling.temperature == 0 else _gumbel_max(distribution, generators)
    return chosen, distribution.gather(-1, chosen[:, None])[:, 0]


def _gumbel_max(logprobs: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Sample from softmax by argmax(logprobs - log(noise)) with noise from Exp(1) (Maddison et al., arXiv 1411.0030)."""
    noise = torch.empty_like(logprobs)
    for row, generator in enumerate(generators):
        noise[row].exponential_(generator=generator)
    return (logprobs - noise.log()).argmax(-1)


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set logits [b, V] to -inf outside the ``top_k`` largest, then outside the smallest set with mass >= ``top_p``."""
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # Mass before a token; the first token is always kept.
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits
