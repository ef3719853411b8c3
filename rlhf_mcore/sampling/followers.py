"""Engines of several ranks: the lead rank plans each pass of the engine, and the other ranks follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_mcore.parallel.collectives import broadcast_bytes
from rlhf_mcore.types import Completion, Request, Sampling

if TYPE_CHECKING:
    import torch.distributed as dist

    from rlhf_mcore.protocols import StepwiseEngine

_SIZE_BYTES = 8  # length of the size field at the start of a message


@dataclass(frozen=True, slots=True)
class EnginePass:
    """The work of all ranks of an engine: they cancel and submit requests, and then run one step.

    ``forgets``: forget cached prefixes before the new requests. ``until_finished``: run steps until a response has finished.
    ``pauses``: run no step; the ranks compare their tokens and stop to follow.
    """

    cancelled: Sequence[int] = ()
    requests: Sequence[Request] = ()
    forgets: bool = False
    until_finished: bool = False
    pauses: bool = False

    def begin(self, engine: StepwiseEngine) -> None:
        """Cancel and submit the requests."""
        if self.cancelled:
            engine.cancel(self.cancelled)
        if self.forgets:
            engine.forget_prefixes()
        if self.requests:
            engine.submit(self.requests)

    def step(self, engine: StepwiseEngine) -> list[Completion]:
        """Run the steps and return the completions. All ranks run equally many steps."""
        if self.pauses:
            engine.compare_ranks()
            return []
        finished = list(engine.step()) if engine.num_in_flight else []
        while self.until_finished and engine.num_in_flight and not finished:
            finished = list(engine.step())
        return finished

    def encode(self) -> bytes:
        """Return the message for the other ranks, or b"" for a step without changes. Prompt tokens are sent once for all samples."""
        flags = [self.forgets, self.until_finished, self.pauses]
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

    def send(self, ranks: dist.ProcessGroup) -> None:
        """Send the pass to the other ranks of the engine, which run ``follow``."""
        broadcast_bytes(self.encode(), 0, ranks)


def run_pass(engine: StepwiseEngine, ranks: dist.ProcessGroup | None, made: EnginePass) -> list[Completion]:
    """Run a pass on all ranks of an engine. For the lead rank. ``ranks``: None if there is no other rank."""
    if ranks is not None:
        made.send(ranks)
    made.begin(engine)
    return made.step(engine)


def follow(engine: StepwiseEngine, ranks: dist.ProcessGroup) -> None:
    """Run the passes that the engine's lead rank sends, until it pauses."""
    pauses = False
    while not pauses:
        made = EnginePass.decode(broadcast_bytes(None, 0, ranks) or b"")
        made.begin(engine)
        made.step(engine)
        pauses = made.pauses
