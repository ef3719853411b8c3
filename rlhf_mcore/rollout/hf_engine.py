"""A plain decoding loop over a transformers model: the reference engine, and one for models that vLLM does not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.platform import current_platform
from rlhf_mcore.rollout.environment import preserved_rng
from rlhf_mcore.rollout.requests import (
    Completion,
    Request,
    expand_requests,
    refuse_foreign_code,
    stop_token_ids,
    to_trajectories,
)
from rlhf_mcore.rollout.weights import ExpectedTensors, VersionedWeights
from rlhf_mcore.types import Prompt, Sampling, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HFEngine(VersionedWeights):
    """A full copy of the model on every rank (``layout.tp`` is not looked at), so as many engines as ranks.

    Works without torch.distributed too: then it is engine 0 of 1.
    """

    def __init__(
        self,
        cfg: RolloutConfig,
        *,
        model_dir: str,
        tokenizer_dir: str,
        dtype: str,
        max_model_len: int,
        seed: int,
        attention: str = "auto",
    ) -> None:
        """Build the model without weights. Arguments as for ``VLLMEngine``; batches of ``cfg.max_num_seqs`` rows.

        ``attention``: the kernel, by transformers' name; "auto" leaves it to transformers.

        Raises:
            ConfigError: the kernel is not installed, or the model cannot use it.
        """
        super().__init__()
        refuse_foreign_code(model_dir)
        self.is_lead = True
        self.num_engines = dist.get_world_size() if dist.is_initialized() else 1
        self.engine_index = dist.get_rank() if dist.is_initialized() else 0
        self._batch_size = cfg.max_num_seqs
        self._max_model_len = max_model_len
        self._device = current_platform().device()
        self._tokenizer = load_tokenizer(tokenizer_dir)
        self._stops = stop_token_ids(model_dir, self._tokenizer)
        self._model = _build_model(model_dir, _DTYPES[dtype], seed, attention).to(self._device)
        self._expected = ExpectedTensors.of_model(self._model)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """Draw ``sampling.n`` responses per prompt, in prompt order, each from a generator with its own seed.

        Logprobs are of the distribution that was sampled from (after temperature, top-k and top-p); for temperature 0,
        of the raw logits. The seeds are vLLM's, the draws are not: the two engines agree in distribution only.

        Raises:
            RuntimeError: the weights are not usable, or the model returned logprobs that must not be trained on.
            ValueError: an empty prompt, or one that leaves no room for a response.
        """
        self.require_weights()
        requests = expand_requests(prompts, sampling, step, self._max_model_len)
        completions: list[Completion] = []
        for start in range(0, len(requests), self._batch_size):
            completions += self._decode(requests[start : start + self._batch_size], sampling)
        return to_trajectories(requests, completions, self._tokenizer, self.policy_version)

    def _decode(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One batch, left-padded, to the end of its longest response."""
        token_ids, mask = self._left_pad(requests)
        generators = [torch.Generator(self._device).manual_seed(request.seed) for request in requests]
        drawn = [Completion([], [], "") for _ in requests]
        cache = None
        while any(not completion.finish_reason for completion in drawn):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -token_ids.shape[1] :]
            output = self._model(
                input_ids=token_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            chosen, logprobs = draw(output.logits[:, -1], sampling, generators)
            self._record(requests, drawn, chosen, logprobs)
            token_ids = chosen[:, None]
            mask = torch.cat([mask, torch.ones_like(token_ids)], dim=1)
        return drawn

    def _record(self, requests: Sequence[Request], drawn: list[Completion], chosen: Tensor, logprobs: Tensor) -> None:
        for request, completion, token, logprob in zip(
            requests, drawn, chosen.tolist(), logprobs.tolist(), strict=True
        ):
            if completion.finish_reason:
                continue  # a row that is done stays in the batch, and its tokens are dropped
            completion.token_ids.append(token)
            completion.logprobs.append(logprob)
            if token in self._stops:
                completion.finish_reason = "stop"
            elif len(completion.token_ids) == request.max_new_tokens:
                completion.finish_reason = "length"

    def _left_pad(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Prompts [b, T] and their mask [b, T], both int64, aligned at the right."""
        longest = max(len(request.prompt.prompt_ids) for request in requests)
        token_ids = torch.full((len(requests), longest), self._tokenizer.pad_token_id, device=self._device)
        mask = torch.zeros_like(token_ids)
        for row, request in enumerate(requests):
            length = len(request.prompt.prompt_ids)
            token_ids[row, longest - length :] = torch.tensor(request.prompt.prompt_ids)
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
    def updating(self, *, version: int) -> Iterator[torch.nn.Module]:
        """The live model, to be written from outside. The engine is unusable from here until the block has ended well."""
        self.begin_load()
        yield self.model
        self.commit_load(version)

    @property
    def model(self) -> torch.nn.Module:
        """The live model."""
        return self._model

    def sleep(self) -> None:
        """Nothing: the model stays where it is."""

    def wake(self) -> None:
        """Nothing, as ``sleep`` does nothing."""

    def close(self) -> None:
        """Free the model."""
        self.drop_weights("it was closed")
        del self._model


def _build_model(model_dir: str, dtype: torch.dtype, seed: int, attention: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
    with preserved_rng():
        torch.manual_seed(seed)
        kernel = {} if attention == "auto" else {"attn_implementation": attention}
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **kernel).eval()
        except (ImportError, ValueError) as error:
            if attention == "auto":
                raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"model.attention={attention} cannot be used here ({reason}); set model.attention=auto"
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
