"""A plain decoding loop over a transformers model: the reference engine, and one for models that vLLM does not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.platform import current_platform
from rlhf_mcore.protocols import MEMORY, EngineRank
from rlhf_mcore.rollout.engine import Engine, EngineModel, ExpectedTensors
from rlhf_mcore.rollout.environment import preserved_rng
from rlhf_mcore.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HFEngine(Engine):
    """A full copy of the model on every rank (``layout.tp`` is not looked at), so as many engines as ranks.

    Works without torch.distributed too: then it is engine 0 of 1.
    """

    def __init__(self, cfg: RolloutConfig, model: EngineModel) -> None:
        """Build the model without weights; it decodes ``cfg.max_num_seqs`` rows at a time.

        Raises:
            ConfigError: a directory cannot be used, or the attention kernel is not installed or not the model's.
        """
        is_alone = not dist.is_initialized()
        super().__init__(model, EngineRank() if is_alone else EngineRank(dist.get_rank(), dist.get_world_size()))
        self._batch_size = cfg.max_num_seqs
        self._device = current_platform().device()
        self._model = _build_model(model).to(self._device)
        self._expected = ExpectedTensors.of_model(self._model)

    @torch.no_grad()
    def _draw(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Completion]:
        """The seeds are vLLM's, the draws are not: the two engines agree in distribution only."""
        completions: list[Completion] = []
        # What is decoded together is drawn in the same way.
        for _, group in groupby(zip(requests, limits, strict=True), key=lambda pair: _distribution(pair[0].sampling)):
            same = list(group)
            for start in range(0, len(same), self._batch_size):
                completions += self._decode(*zip(*same[start : start + self._batch_size], strict=True))
        return completions

    def _decode(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Completion]:
        """One batch, left-padded, to the end of its longest response."""
        token_ids, mask = self._left_pad(requests)
        generators = [torch.Generator(self._device).manual_seed(request.seed) for request in requests]
        drawn: list[list[tuple[int, float]]] = [[] for _ in requests]
        finished = [""] * len(requests)
        cache = None
        while not all(finished):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
            output = self._model(
                input_ids=token_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            chosen, logprobs = draw(output.logits[:, -1], requests[0].sampling, generators)
            for row, (token, logprob) in enumerate(zip(chosen.tolist(), logprobs.tolist(), strict=True)):
                if finished[row]:
                    continue  # a row that is done stays in the batch, and its tokens are dropped
                drawn[row].append((token, logprob))
                if token in self._stops:
                    finished[row] = "stop"
                elif len(drawn[row]) == limits[row]:
                    finished[row] = "length"
            token_ids = chosen[:, None]
            mask = torch.cat([mask, torch.ones_like(token_ids)], dim=1)
        return [
            Completion(
                request.request_id,
                np.array([token for token, _ in row], np.int32),
                np.array([logprob for _, logprob in row], np.float32),
                ((0, self.policy_version),),
                reason,
            )
            for request, row, reason in zip(requests, drawn, finished, strict=True)
        ]

    def _left_pad(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Prompts [b, T] and their mask [b, T], both int64, aligned at the right."""
        longest = max(len(request.prompt_ids) for request in requests)
        token_ids = torch.full((len(requests), longest), self._tokenizer.pad_token_id, device=self._device)
        mask = torch.zeros_like(token_ids)
        for row, request in enumerate(requests):
            length = len(request.prompt_ids)
            token_ids[row, longest - length :] = torch.tensor(request.prompt_ids)
            mask[row, longest - length :] = 1
        return token_ids, mask

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights by full tensors under Hugging Face names; tied tensors may be given once.

        Raises:
            ValueError: an unknown, repeated, wrongly shaped or missing tensor. The engine is then unusable.
        """
        self.begin_load()
        targets = self._model.state_dict()
        for name, tensor in self._expected.checked(weights):
            targets[name].copy_(tensor)
        self.commit_load(version)

    @contextmanager
    def begin(self, version: int) -> Iterator[torch.nn.Module]:
        """The live model, to be written from outside. The engine is unusable until the block has ended well."""
        self.begin_load()
        yield self.model
        self.commit_load(version)

    @property
    def model(self) -> torch.nn.Module:
        """The live model."""
        return self._model

    def sleep(self, level: int = 2) -> None:
        """Nothing: the model stays where it is."""

    def wake(self, tags: Sequence[str] = MEMORY) -> None:
        """Nothing, as ``sleep`` does nothing."""

    def close(self) -> None:
        """Free the model."""
        self.abandon("it was closed")
        del self._model


def _distribution(sampling: Sampling) -> tuple[float, float, int]:
    return sampling.temperature, sampling.top_p, sampling.top_k


def _build_model(model: EngineModel) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model.model_dir, trust_remote_code=False, local_files_only=True)
    with preserved_rng():
        torch.manual_seed(model.seed)
        kernel = {} if model.attention == "auto" else {"attn_implementation": model.attention}
        dtype = _DTYPES[model.dtype]
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **kernel).eval()
        except (ImportError, ValueError) as error:
            if model.attention == "auto":
                raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"model.attention={model.attention} cannot be used here ({reason}); set model.attention=auto"
            ) from error


def draw(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
    """One token per row.

    Args:
        logits: [b, V].
        sampling: temperature, top_k (-1: off), top_p (1.0: off).
        generators: one per row; each is advanced by one draw of V numbers.

    Returns:
        Tokens [b] int64 and their logprobs [b] float32 under the distribution that was sampled from (temperature 0:
        argmax of the logits, and its logprob at temperature 1).
    """
    logits = logits.float()
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        chosen = logits.argmax(-1)
    else:
        logprobs = truncate(logits / sampling.temperature, sampling.top_k, sampling.top_p).log_softmax(-1)
        chosen = _gumbel_max(logprobs, generators)
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]


def _gumbel_max(logprobs: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """argmax(logprobs - log(noise)), noise from Exp(1), is a draw from softmax (Maddison et al., arXiv 1411.0030)."""
    noise = torch.empty_like(logprobs)
    for row, generator in enumerate(generators):
        noise[row].exponential_(generator=generator)
    return (logprobs - noise.log()).argmax(-1)


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits [b, V]; -inf outside the ``top_k`` largest, then outside the smallest set with mass >= ``top_p``."""
    if 0 < top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p  # mass before a token; the first is always kept
        logits = logits.masked_fill(outside.scatter(-1, order, outside), -torch.inf)
    return logits
