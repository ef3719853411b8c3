"""Base classes of engines: the model description, checks of requests and weights, and the state of the loaded weights."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.data.images import ImageStore
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.foreign import Fields, read_json
from rlhf_mcore.protocols import MEMORY, EngineRank
from rlhf_mcore.readers.model_files import end_tokens, needs_own_code, sees_images
from rlhf_mcore.types import Completion, Ragged, Request

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.config.schema import Config
    from rlhf_mcore.rollout.hf.checkpoint_tensors import CheckpointTensor


PROGRESS_S = 1.0  # minimum seconds between two progress reports


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The model of an engine, and the length limit.

    ``model_dir`` and ``tokenizer_dir`` are Hugging Face directories. Only the configuration is read from ``model_dir``. ``dtype`` is
    "fp32", "bf16" or "fp16". ``max_model_len`` limits the total tokens of a prompt and its response. ``seed`` is for random numbers
    of the engine itself; responses are sampled with the seeds of their requests.
    """

    model_dir: str
    tokenizer_dir: str
    dtype: str
    max_model_len: int
    seed: int
    # vLLM: names and shapes of the checkpoint's tensors. None: get them from transformers, which supports fewer models than vLLM.
    shapes: Mapping[str, tuple[int, ...]] | None = None
    # vLLM: names (as in PEFT) and shapes of the adapter tensors that the engine applies itself
    adapters: Mapping[str, tuple[int, ...]] | None = None
    attention: str = "auto"  # hf: name of the attention kernel in transformers; "auto": transformers chooses
    records_routes: bool = False  # whether requests may ask for the experts of each token
    num_adapters: int = 1  # with ``adapters``: number of adapters that the engine stores
    # Folder of an ImageStore with the images of requests; None: the model reads no images
    images: str | None = None
    max_images: int = 0  # maximum images per request

    @classmethod
    def of(
        cls,
        cfg: Config,
        dtype: str,
        shapes: Mapping[str, tuple[int, ...]],
        adapters: Mapping[str, tuple[int, ...]] | None = None,
    ) -> EngineModel:
        """Build the description from a resolved configuration."""
        assert cfg.rollout.max_model_len is not None, "resolved"
        tokenizer_dir = cfg.model.tokenizer_path or cfg.model.path
        model = cls(
            cfg.model.path,
            tokenizer_dir,
            dtype,
            cfg.rollout.max_model_len,
            cfg.seed,
            shapes,
            adapters,
            cfg.model.attention,
            records_routes=cfg.actor.router_replay == "rollout",
        )
        if not sees_images(cfg.model.path):
            return model
        images = ImageStore.of(cfg.run_directory, cfg.model.path, cfg.data.image_pixels)
        return replace(model, images=str(images.patches), max_images=cfg.data.max_images)


class VersionedWeights:
    """The version of an engine's weights, or the reason why they cannot be used.

    A load is a transaction. The weights are unusable from ``begin_load`` until ``commit_load``, even if an error occurs in
    between. ``policy_version`` is -1 before the first load, during a load, and after a failed load.
    """

    def __init__(self) -> None:
        self.policy_version = -1
        self._problem: str | None = "no weights were ever loaded"

    def begin_load(self) -> None:
        """Mark the old weights as unusable, at the start of a load."""
        self.abandon("the last load of weights did not finish")

    def abandon(self, problem: str) -> None:
        """Mark the weights as unusable, with the reason ``problem``."""
        self.policy_version = -1
        self._problem = problem

    def commit_load(self, version: int) -> None:
        """Mark the weights as complete, at the end of a load."""
        assert version >= 0, f"policy versions count from 0, got {version}"
        self.policy_version = version
        self._problem = None

    def require_weights(self) -> None:
        """Check that the weights are usable.

        Raises:
            RuntimeError: they are not. The message contains the reason.
        """
        if self._problem is not None:
            raise RuntimeError(
                f"the rollout engine cannot generate: {self._problem}; call load_weights with every tensor"
            )


@dataclass(slots=True)
class InFlight:
    """A request whose response is being sampled. ``versions`` as in the completion; ``handle`` is the engine's id of the request."""

    request: Request
    versions: list[tuple[int, int]]
    handle: str = ""


class BaseEngine(VersionedWeights, ABC):
    """The common part of all engines, on one rank: a WeightTarget and a Sleeper. An engine starts without weights."""

    on_progress: Callable[[], object] | None = None  # called while the engine makes progress, at most once a second
    warnings: Sequence[str] = ()  # warnings of the engine's library at its start, about kernels and communication
    _preemptions = 0  # number of preemptions since the last pop_preemptions

    def __init__(self, model: EngineModel, rank: EngineRank) -> None:
        super().__init__()
        refuse_foreign_code(model.model_dir)
        self.rank = rank
        self._max_model_len = model.max_model_len
        self._tokenizer = load_tokenizer(model.tokenizer_dir)
        self._stops = stop_token_ids(model.model_dir, self._tokenizer)

    def pop_preemptions(self) -> int:
        """Return the number of preemptions since the last call; 0 on ranks that do not lead.

        A response is preempted if the engine frees its cache for other responses.
        """
        count, self._preemptions = self._preemptions, 0
        return count if self.rank.is_lead else 0

    def kernels(self) -> dict[str, str]:
        """Return the name of the backend for each part of the engine; {} if the engine does not report them."""
        return {}

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of responses, without special tokens."""
        return self._tokenizer.batch_decode(responses, skip_special_tokens=True)

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of this engine."""
        return 1

    @cached_property
    def ranks(self) -> dist.ProcessGroup | None:
        """Return the gloo group of the engine's ranks, which are consecutive; None if the engine has one rank.

        The first access is collective over the engine's ranks.
        """
        if self.num_ranks == 1:
            return None
        import torch.distributed as dist

        first = dist.get_rank() // self.num_ranks * self.num_ranks
        own = list(range(first, first + self.num_ranks))
        return dist.new_group(own, backend="gloo", use_local_synchronization=True)

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None: ...

    def sleep(self, level: int = 2) -> None:
        """Free device memory between rollouts. This default does nothing."""

    def wake(self, tags: Sequence[str] = MEMORY) -> None:
        """Undo ``sleep``. This default does nothing."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources of the engine."""


class AnsweringEngine(BaseEngine):
    """The client of servers, which sample each request separately: an AsyncEngine."""

    @abstractmethod
    async def answer(self, request: Request) -> Completion: ...


class Engine(BaseEngine):
    """An engine that samples in steps: a StepwiseEngine.

    It generates only after all weights are loaded. Weights may be replaced while requests are in flight; later tokens are then
    sampled from the new weights. A completion stores the version of each token.
    """

    _reported: tuple[float, float] = (-math.inf, -1)  # time and value of the last progress check
    _digest = 0  # digest of the responses that finished since the last compare_ranks

    def __init__(self, model: EngineModel, rank: EngineRank, at_publish: str | None = None) -> None:
        super().__init__(model, rank)
        self._at_publish = at_publish or "continue"
        self._in_flight: dict[int, InFlight] = {}
        self._finished: list[Completion] = []  # finished, but not returned yet
        self._tokens_of_finished = 0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return a completion for each request, in the same order; [] on ranks that do not lead their engine.

        Each completion is sampled with the seed of its request. Except for rounding, it depends neither on the engine nor on the
        batch; kernels may sum in another order for another batch size. Logprobs are from the sampling distribution, after
        temperature, top-k and top-p. Greedy decoding (temperature 0) reports the logprobs at temperature 1.

        Raises:
            RuntimeError: the weights are not usable, or a rank of the engine sampled other tokens than the first rank.
            ValueError: a prompt is empty, or fills ``max_model_len``, or a request id is in flight.
        """
        from rlhf_mcore.platform.base import preserved_rng

        self.submit(requests)
        order = {request.request_id: place for place, request in enumerate(requests)}
        try:
            with preserved_rng():  # vLLM's sampler also uses torch's global generator
                while not order.keys().isdisjoint(self._in_flight):
                    self._finished = self.step()
        finally:
            self.cancel([request_id for request_id in order if request_id in self._in_flight])
        mine = [completion for completion in self._finished if completion.request_id in order]
        self._finished = [completion for completion in self._finished if completion.request_id not in order]
        self.compare_ranks()
        return sorted(mine, key=lambda completion: order[completion.request_id]) if self.rank.is_lead else []

    def submit(self, requests: Sequence[Request]) -> None:
        """Start to sample responses; ``step`` continues.

        Raises:
            RuntimeError, ValueError: as ``generate``.
        """
        self.require_weights()
        limits = new_token_limits(requests, self._max_model_len)
        ids = self._in_flight.keys() | {completion.request_id for completion in self._finished}
        for request in requests:
            if request.request_id in ids:
                raise ValueError(f"{request.name}: request id {request.request_id} is in flight")
            ids.add(request.request_id)
        for request, handle in zip(requests, self._begin(requests, limits), strict=True) if requests else ():
            self._in_flight[request.request_id] = InFlight(request, [(0, self.policy_version)], handle)

    def compare_ranks(self) -> None:
        """Check that the engine's ranks sampled the same tokens since the last call. All ranks of the engine call it together.

        Each rank samples separately. If a rank differs, its cache contains other tokens than the tokens that are trained on.

        Raises:
            RuntimeError: a rank differs from the first rank; raised on every rank.
        """
        if self.num_ranks == 1:
            return
        digests, self._digest = self._gather_digests(self._digest), 0
        if differing := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise RuntimeError(
                f"ranks {differing} of engine {self.rank.engine_index} sampled other tokens than its rank 0; start the run "
                "again, and check their devices if it happens again"
            )

    def _gather_digests(self, own: int) -> list[int]:
        """Return the digests of all ranks of the engine; only this rank's digest if the engine cannot gather them."""
        return [own]

    def step(self) -> list[Completion]:
        """Sample about one token for each request in flight. Returns all completions that were not returned yet, on every rank.

        A request can also finish between two steps, because a weight sync waits for the pass that vLLM started in advance. All ranks
        of an engine call ``step`` together, after the same submissions and cancellations.

        Raises:
            RuntimeError: the weights are not usable.
        """
        self.require_weights()
        finished, self._finished = self._finished, []
        finished += self._drop_finished(self._step() if self._in_flight else [])
        self._report_progress()
        return finished

    def _report_progress(self) -> None:
        now, (last, before) = time.monotonic(), self._reported
        if self.on_progress is None or now - last < PROGRESS_S:
            return
        self._reported = now, self.num_sampled_tokens
        if self._reported[1] != before:
            self.on_progress()

    def _drop_finished(self, finished: list[Completion]) -> list[Completion]:
        for completion in finished:
            del self._in_flight[completion.request_id]
            self._tokens_of_finished += len(completion.token_ids)
            self._digest = xxhash.xxh3_64_intdigest(completion.token_ids.tobytes(), self._digest)
        return finished

    def cancel(self, request_ids: Collection[int]) -> None:
        """Stop these requests, and drop their tokens. Ids that are not in flight are ignored."""
        in_flight = [request_id for request_id in request_ids if request_id in self._in_flight]
        if in_flight:
            self._end(in_flight)
        for request_id in in_flight:
            del self._in_flight[request_id]
        self._finished = [completion for completion in self._finished if completion.request_id not in request_ids]

    def begin_load(self) -> None:
        """Mark the old weights as unusable, at the start of a load.

        Raises:
            RuntimeError: requests are in flight, and ``rollout.at_publish`` is drain.
        """
        if self._in_flight and self._at_publish == "drain":
            raise RuntimeError(
                f"{len(self._in_flight)} requests are in flight, but rollout.at_publish=drain finishes all requests before a sync"
            )
        super().begin_load()

    def commit_load(self, version: int) -> None:
        """Mark the weights as complete, at the end of a load. Later tokens are sampled from ``version``."""
        super().commit_load(version)
        for request_id, number in self._num_sampled().items():
            begin_version(self._in_flight[request_id].versions, number, version)

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes of earlier requests. No request may be in flight. All ranks of an engine call it together."""

    @property
    def num_in_flight(self) -> int:
        """Return the number of requests whose completions were not returned yet."""
        return len(self._in_flight) + len(self._finished)

    @property
    def num_sampled_tokens(self) -> int:
        """Return the number of tokens sampled since the start, without tokens of cancelled requests.

        It does not change while the engine makes no progress.
        """
        return self._tokens_of_finished + sum(self._num_sampled().values())

    def sampled_tokens(self, request_ids: Collection[int]) -> dict[int, Sequence[int]]:
        """Return the tokens sampled so far for the requests in flight; {} if the engine does not report them."""
        return {}

    @abstractmethod
    def _begin(self, requests: Sequence[Request], limits: Sequence[int]) -> list[str]:
        """Start requests, and return their handles. ``limits`` are the maximum new tokens of each request."""

    @abstractmethod
    def _step(self) -> list[Completion]:
        """Run one forward pass over the requests in flight, and return the completions that finish in it."""

    @abstractmethod
    def _end(self, request_ids: Sequence[int]) -> None:
        """Drop requests in flight."""

    @abstractmethod
    def _num_sampled(self) -> dict[int, int]:
        """Return the number of tokens sampled so far for each request in flight, by request id."""


class LiveEngine(Engine):
    """An engine whose parameters are in this process. It is also a LiveWeights."""

    @property
    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def begin(self, version: int) -> AbstractContextManager[nn.Module]: ...


# The types of ``build_engine``.
AnyEngine = Engine | AnsweringEngine


class AddsAdapters(ABC):
    """An engine that was built with ``EngineModel.adapters``. All ranks of an engine call it together."""

    @abstractmethod
    def load_adapter(self, number: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Replace an adapter of the engine. ``pairs`` maps names of Hugging Face modules to full A and B; B includes the scale."""

    @abstractmethod
    def use_adapter(self, number: int | None) -> None:
        """Sample later requests with an adapter of the engine; None: without an adapter."""


def ragged_ids(parts: Sequence[Sequence[int] | NDArray[np.int32]]) -> Ragged[NDArray[np.int32]]:
    """Join lists of token ids, one list per token, into a Ragged."""
    ids = [np.asarray(part, np.int32) for part in parts]
    return Ragged(np.array([len(part) for part in ids], np.int32), np.concatenate([np.zeros(0, np.int32), *ids]))


def begin_version(versions: list[tuple[int, int]], first: int, version: int) -> None:
    """Record that tokens from ``first`` on are sampled from ``version``.

    ``versions``, the run-length code of a completion's versions, is changed in place.
    """
    if versions[-1][0] == first:
        versions.pop()  # no token was sampled from the previous version
    if not versions or versions[-1][1] != version:
        versions.append((first, version))


def new_token_limits(requests: Sequence[Request], max_model_len: int) -> list[int]:
    """Return the maximum number of tokens of each completion: ``max_new_tokens``, or less if ``max_model_len`` requires it.

    Raises:
        ValueError: a prompt is empty, or fills ``max_model_len``.
    """
    limits = []
    for request in requests:
        if not len(request.prompt_ids):
            raise ValueError(f"{request.name} is empty: an engine needs at least one token")
        room = max_model_len - len(request.prompt_ids)
        if room < 1:
            raise ValueError(
                f"{request.name} has {len(request.prompt_ids)} tokens, which fill "
                f"rollout.max_model_len={max_model_len}; raise it, or skip long prompts with data.max_prompt_tokens"
            )
        limits.append(min(request.sampling.max_new_tokens, room))
    return limits


def stop_token_ids(model_dir: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the sorted ids of the tokens that end a response: the tokenizer's EOS, and the ids in generation_config.json."""
    stops = {int(tokenizer.eos_token_id)}
    path = Path(model_dir) / "generation_config.json"
    declared = end_tokens(_read(path)) if path.is_file() else []
    return sorted(stops.union(declared))


def refuse_foreign_code(model_dir: str) -> None:
    """Reject a model directory whose config.json would run Python code from that directory.

    Raises:
        ConfigError: config.json does not exist, or loading the model would run code from the directory.
    """
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={model_dir!r}: no config.json there; give a Hugging Face model directory")
    if needs_own_code(_read(path)):
        raise ConfigError(
            f"model.path={model_dir!r}: config.json would run code from this directory (auto_map), which is not allowed; "
            "use an architecture that transformers supports"
        )


def _read(path: Path) -> Fields:
    return read_json(path, where=f"model.path={str(path.parent)!r}: {path.name}")


@dataclass(slots=True)
class ExpectedTensors:
    """The tensors of a complete model, under Hugging Face names.

    ``shapes`` contains every name that a checkpoint may use. Each of the ``groups`` contains the names of one tensor, several if
    names share a tensor (tied embeddings). One name of each group is required.
    """

    shapes: dict[str, tuple[int, ...]]
    groups: list[set[str]] = field(default_factory=list)

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> ExpectedTensors:
        """Build from the shapes of a checkpoint. Every tensor is required."""
        return cls(dict(shapes), [{name} for name in shapes])

    @classmethod
    def of_model(cls, model: torch.nn.Module, parts: Sequence[CheckpointTensor] | None = None) -> ExpectedTensors:
        """Build from a transformers model, which may be on the meta device. ``parts``: its ``checkpoint_tensors``, if known."""
        from rlhf_mcore.rollout.hf.checkpoint_tensors import checkpoint_tensors

        live = model.state_dict(keep_vars=True)
        shapes: dict[str, tuple[int, ...]] = {}
        groups: dict[tuple[int, int], set[str]] = {}
        for part in parts or checkpoint_tensors(model):
            shapes[part.name] = part.shape
            groups.setdefault((id(live[part.holder]), part.offset), set()).add(part.name)
        return cls(shapes, list(groups.values()))

    @classmethod
    def of_directory(cls, model_dir: str) -> ExpectedTensors:
        """Build from config.json with a model on the meta device. This needs no memory and no weight files."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            return cls.of_model(AutoModelForCausalLM.from_config(config, trust_remote_code=False))

    def check_each(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield ``weights`` unchanged, and check that each tensor of the model occurs exactly once, in its full shape.

        Raises:
            ValueError: a tensor is unknown, repeated, or has a wrong shape. After the last tensor: tensors are missing.
        """
        names: set[str] = set()
        for name, tensor in weights:
            self._check(name, tensor, names)
            names.add(name)
            yield name, tensor
        missing = sorted(min(group) for group in self.groups if not group & names)
        if missing:
            shown = join_first(missing, separator=", ")
            raise ValueError(f"{len(missing)} tensors of the model were not sent to the engine: {shown}")

    def _check(self, name: str, tensor: Tensor, seen: set[str]) -> None:
        shape = self.shapes.get(name)
        if shape is None:
            raise ValueError(f"tensor {name!r} is not part of the rollout engine's model")
        if name in seen:
            raise ValueError(f"tensor {name!r} was sent to the rollout engine twice")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the rollout engine's model needs {shape}"
            )


DEBUG_VARIABLE = "RLHF_MCORE_DEBUG"  # if set, logs of libraries are not suppressed
