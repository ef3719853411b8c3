"""What the engines share: what they are built for, what they refuse, and when they may generate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.tokenizer_files import end_tokens
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.foreign import Fields, read_json
from rlhf_mcore.protocols import MEMORY, EngineRank
from rlhf_mcore.rollout.weights import VersionedWeights
from rlhf_mcore.types import Completion, Request

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.config.schema import Config


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What an engine generates with, and how long it may get.

    ``model_dir`` and ``tokenizer_dir`` are Hugging Face directories; of the model's only the configuration is read. ``dtype`` is
    "fp32", "bf16" or "fp16". ``max_model_len`` limits the tokens of a prompt and its response together. ``seed`` is for what the
    engine draws by itself: responses are drawn with the seeds of their requests.
    """

    model_dir: str
    tokenizer_dir: str
    dtype: str
    max_model_len: int
    seed: int
    # vLLM: names and shapes of the checkpoint's tensors. None asks transformers, which has other names of experts than checkpoints.
    shapes: Mapping[str, tuple[int, ...]] | None = None
    attention: str = "auto"  # hf: the kernel, by transformers' name; "auto" leaves it to transformers

    @classmethod
    def of(cls, cfg: Config, dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> EngineModel:
        """The model of a resolved configuration."""
        assert cfg.rollout.max_model_len is not None, "resolved"
        tokenizer_dir = cfg.model.tokenizer_path or cfg.model.path
        return cls(
            cfg.model.path, tokenizer_dir, dtype, cfg.rollout.max_model_len, cfg.seed, shapes, cfg.model.attention
        )


class Engine(VersionedWeights, ABC):
    """A Generator, a WeightTarget and a Sleeper in the processes of the trainer.

    It starts without weights, and refuses to generate until it has all of them.
    """

    def __init__(self, model: EngineModel, rank: EngineRank) -> None:
        super().__init__()
        refuse_foreign_code(model.model_dir)
        self.rank = rank
        self._max_model_len = model.max_model_len
        self._tokenizer = load_tokenizer(model.tokenizer_dir)
        self._stops = stop_token_ids(model.model_dir, self._tokenizer)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Draw a completion for each request; [] on ranks that do not lead their engine.

        Each is drawn from a generator with the seed of its request, so it depends neither on the engine nor on the batch, up to
        rounding: a kernel may sum in another order for another batch size. Logprobs are of the distribution that was sampled from:
        after temperature, top-k and top-p. Greedy decoding (temperature 0) has none; its logprobs are those at temperature 1.

        Raises:
            RuntimeError: the weights are not usable.
            ValueError: an empty prompt, or one that leaves no room for a response.
        """
        self.require_weights()
        limits = new_token_limits(requests, self._max_model_len)
        completions = self._draw(requests, limits) if requests else []
        return completions if self.rank.is_lead else []

    @abstractmethod
    def _draw(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Completion]:
        """``limits``: most tokens of each."""

    @property
    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def begin(self, version: int) -> AbstractContextManager[nn.Module]: ...

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None: ...

    @abstractmethod
    def sleep(self, level: int = 2) -> None: ...

    @abstractmethod
    def wake(self, tags: Sequence[str] = MEMORY) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Free the engine."""


def new_token_limits(requests: Sequence[Request], max_model_len: int) -> list[int]:
    """Most tokens of each completion: what was asked for, or what the context has room for.

    Raises:
        ValueError: a prompt is empty, or leaves no room for a token in ``max_model_len``.
    """
    limits = []
    for request in requests:
        if not len(request.prompt_ids):
            raise ValueError(f"{request.name} is empty: an engine needs at least one token")
        room = max_model_len - len(request.prompt_ids)
        if room < 1:
            raise ValueError(
                f"{request.name} has {len(request.prompt_ids)} tokens, which leaves no room for a response in "
                f"rollout.max_model_len={max_model_len}; raise it or drop prompts by data.max_prompt_tokens"
            )
        limits.append(min(request.sampling.max_new_tokens, room))
    return limits


def stop_token_ids(model_dir: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a response, sorted: the tokenizer's and those of generation_config.json."""
    stops = {int(tokenizer.eos_token_id)}
    path = Path(model_dir) / "generation_config.json"
    declared = end_tokens(_read(path)) if path.is_file() else []
    return sorted(stops.union(declared))


def refuse_foreign_code(model_dir: str) -> None:
    """Refuse a model directory that wants Python code of its own to be run.

    Raises:
        ConfigError: there is no config.json, or it has an ``auto_map``.
    """
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={model_dir!r}: no config.json there; give a Hugging Face model directory")
    if "auto_map" in _read(path):
        raise ConfigError(
            f"model.path={model_dir!r}: config.json asks to run code of its own (auto_map), which is refused; "
            "use an architecture that transformers knows"
        )


def _read(path: Path) -> Fields:
    return read_json(path, where=f"model.path={str(path.parent)!r}: {path.name}")
