"""Engines of several ranks: the lead rank plans each pass of the engine, and the other ranks follow."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_mcore.parallel.collectives import broadcast_bytes
from rlhf_mcore.types import Completion, Request, Sampling

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlhf_mcore.protocols import Generator

_SIZE_BYTES = 8  # length of the size field at the start of a message


@dataclass(frozen=True, slots=True)
class EnginePass:
    """The work of all ranks of an engine before a step: they cancel requests and submit new requests.

    A disaggregated engine can also forget cached prefixes (``forgets``), pause after this work (``pauses``), or wait for environments
    instead of a step (``waits``).
    """

    cancelled: Sequence[int] = ()
    requests: Sequence[Request] = ()
    forgets: bool = False
    pauses: bool = False
    waits: bool = False

    def apply(self, engine: Generator) -> None:
        """Cancel and submit the requests. All ranks of an engine must call it together, and then run the same steps."""
        if self.cancelled:
            engine.cancel(self.cancelled)
        if self.requests:
            engine.submit(self.requests)

    def encode(self) -> bytes:
        """Return the message for the other ranks, or b"" if there is nothing to do. Prompt tokens are sent once for all samples."""
        flags = [self.forgets, self.pauses, self.waits]
        if not self.cancelled and not self.requests and not any(flags):
            return b""
        samplings, prompts, tokens = dict[tuple[Any, ...], int](), dict[int, int](), [np.zeros(0, np.int32)]
        listed = []
        for request in self.requests:
            if id(request.prompt_ids) not in prompts:
                prompts[id(request.prompt_ids)] = len(prompts)
                tokens.append(np.array(request.prompt_ids, np.int32))
            prompt = prompts[id(request.prompt_ids)]
            sampling = samplings.setdefault(astuple(request.sampling), len(samplings))
            listed.append((request.request_id, request.name, prompt, sampling, request.seed, request.images))
        lengths = [len(ids) for ids in tokens[1:]]
        head = json.dumps([flags, list(self.cancelled), listed, list(samplings), lengths]).encode()
        return len(head).to_bytes(_SIZE_BYTES, "little") + head + np.concatenate(tokens).tobytes()

    @classmethod
    def decode(cls, message: bytes) -> EnginePass:
        """Decode a message from ``encode``."""
        if not message:
            return cls()
        size = int.from_bytes(message[:_SIZE_BYTES], "little")
        flags, cancelled, listed, samplings, lengths = json.loads(message[_SIZE_BYTES : _SIZE_BYTES + size])
        tokens = np.frombuffer(message[_SIZE_BYTES + size :], np.int32)
        prompts = [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])] if lengths else []
        known = [Sampling(*fields) for fields in samplings]
        requests = [
            Request(number, name, prompts[prompt], known[sampling], seed, images=tuple(images))
            for number, name, prompt, sampling, seed, images in listed
        ]
        return cls(cancelled, requests, *flags)


class LedEngine:
    """An engine of several ranks, on its lead rank. The other ranks run ``follow`` until ``release``."""

    def __init__(self, engine: Generator, ranks: dist.ProcessGroup) -> None:
        self._engine, self._ranks = engine, ranks
        self._next = EnginePass()
        self._has_failed = False

    @property
    def num_in_flight(self) -> int:
        """See :class:`rlhf_mcore.protocols.Generator`."""
        return self._engine.num_in_flight + len(self._next.requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests in the next pass."""
        self._next = replace(self._next, requests=[*self._next.requests, *requests])

    def cancel(self, request_ids: Collection[int]) -> None:
        """Cancel requests in the next pass."""
        kept = [request for request in self._next.requests if request.request_id not in request_ids]
        self._next = EnginePass([*self._next.cancelled, *request_ids], kept)

    def collect(self, timeout_s: float) -> Sequence[Completion]:
        """Run a pass on all ranks. ``timeout_s`` is ignored, because all ranks must run the same steps."""
        made, self._next = self._next, EnginePass()
        # Reset on success. After a failure, the other ranks have failed too and no longer follow.
        self._has_failed = True
        broadcast_bytes(made.encode(), 0, self._ranks)
        completions = _sample(self._engine, made)
        self._has_failed = False
        return completions

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See :class:`rlhf_mcore.protocols.Generator`."""
        self.submit(requests)
        completions: list[Completion] = []
        while self.num_in_flight:
            completions += self.collect(math.inf)
        return completions

    def drawn(self, request_ids: Collection[int]) -> Mapping[int, Sequence[int]]:
        """Return the tokens sampled so far for requests in flight; {} if the engine does not report them."""
        drawn = getattr(self._engine, "drawn", None)
        return {} if drawn is None else drawn(request_ids)

    def release(self) -> None:
        """Send pending cancellations, and end ``follow`` on the other ranks."""
        if self._has_failed:
            return
        if self._next.cancelled:
            self.collect(math.inf)
        broadcast_bytes(None, 0, self._ranks)


def follow(engine: Generator, ranks: dist.ProcessGroup) -> None:
    """Run the passes that the engine's lead rank sends, until ``release``."""
    while (message := broadcast_bytes(None, 0, ranks)) is not None:
        _sample(engine, EnginePass.decode(message))


def _sample(engine: Generator, made: EnginePass) -> Sequence[Completion]:
    """Run a pass: sample until a response has finished. Returns [] on ranks that do not lead."""
    made.apply(engine)
    return engine.collect(math.inf) if engine.num_in_flight else []
