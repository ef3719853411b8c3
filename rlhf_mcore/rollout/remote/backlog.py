"""Requests that no engine draws yet, and which engine draws which."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rlhf_mcore.rollout.remote.parts import FleetEngine, Share

if TYPE_CHECKING:
    from rlhf_mcore.types import Completion, Request


class FreeBacklog:
    """Deals each request to an engine at once. All samples of a prompt go to one engine, the one with the fewest requests.

    ``FleetEngine.requests`` are those that an engine has been given and has not answered.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, requests: Sequence[Request], version: int) -> None:
        """Take requests in, which belong to a version of the weights."""
        self._requests.extend(requests)

    def deal(self, serving: Sequence[FleetEngine]) -> list[tuple[FleetEngine, list[Request]]]:
        """Give what waits to engines that may draw it."""
        if not serving:
            return []
        counts = [len(engine.requests) for engine in serving]
        shares = _shared(self._requests, counts)
        self._requests.clear()
        for engine, requests in zip(serving, shares, strict=True):
            engine.requests |= _by_id(requests)
        return [(engine, requests) for engine, requests in zip(serving, shares, strict=True) if requests]

    def take(self, engine: FleetEngine, completions: Sequence[Completion]) -> list[Completion]:
        """Return those of an engine's completions that are answers now. Called at each report, also without completions."""
        return _known(engine, completions)

    def put_back(self, engine: FleetEngine) -> None:
        """Take back the requests of an engine that is lost, for others."""
        self._requests.extendleft(reversed(engine.requests.values()))
        engine.requests = {}

    def drop(self, request_ids: Collection[int]) -> None:
        """Forget these."""
        self._requests = deque(request for request in self._requests if request.request_id not in request_ids)


class SharedBacklog:
    """Deals so that responses do not depend on what happens to engines, to the last bit.

    What an engine computes of a request depends in its last bits on what it draws beside it. So what is submitted together is cut into
    ``num_shares``, whatever engines there are. An engine draws a share alone, by the weights of the share's version. A share whose
    engine is lost is drawn again as a whole, also what was answered.
    """

    def __init__(self, num_shares: int) -> None:
        self._num_shares = num_shares
        self._shares: deque[Share] = deque()

    def add(self, requests: Sequence[Request], version: int) -> None:
        """See :class:`FreeBacklog`, as those that follow."""
        shares = _shared(requests, [0] * self._num_shares)
        self._shares.extend(Share(_by_id(share), version) for share in shares if share)

    def deal(self, serving: Sequence[FleetEngine]) -> list[tuple[FleetEngine, list[Request]]]:
        dealt = []
        for engine in serving:
            share = next((share for share in self._shares if share.version == engine.version), None)
            if share is not None and engine.share is None:
                self._shares.remove(share)
                engine.share, engine.requests = share, dict(share.requests)
                dealt.append((engine, list(share.requests.values())))
        return dealt

    def take(self, engine: FleetEngine, completions: Sequence[Completion]) -> list[Completion]:
        """Answers of a share that is drawn again come together, when its engine has nothing left to draw for nobody."""
        share, drawn = engine.share, _known(engine, completions)
        if share is None:
            return []
        share.held += [completion for completion in drawn if completion.request_id not in share.answered]
        answers: list[Completion] = []
        if not (share.is_repeated and engine.requests):
            answers, share.held = share.held, []
        share.answered |= {completion.request_id for completion in answers}
        if not engine.requests:
            engine.share = None
        return answers

    def put_back(self, engine: FleetEngine) -> None:
        if engine.share is not None:
            engine.share.is_repeated, engine.share.held = True, []
            self._shares.appendleft(engine.share)
        engine.share, engine.requests = None, {}

    def drop(self, request_ids: Collection[int]) -> None:
        for share in self._shares:
            share.drop(request_ids)
        self._shares = deque(share for share in self._shares if share.requests)


class OpenRequests:
    """The requests that have no answer yet, and the version of the weights that each was submitted for.

    ``note`` is told how many another version has drawn, because their engine was lost.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.versions: dict[int, int] = {}  # by request id
        self._note = note
        self._lost: set[int] = set()  # of these
        self._told = self._popped = self._other = 0  # responses that another version has drawn

    def submit(self, requests: Sequence[Request], version: int) -> None:
        """These are to be drawn by a version."""
        self.versions |= {request.request_id: version for request in requests}

    def lose(self, request_ids: Iterable[int]) -> None:
        """The engine of these is lost."""
        self._lost |= self.versions.keys() & set(request_ids)

    def drop(self, request_ids: Collection[int]) -> None:
        """Nobody waits for these."""
        self.versions = {number: version for number, version in self.versions.items() if number not in request_ids}
        self._lost -= set(request_ids)
        self._tell()

    def answer(self, completion: Completion) -> bool:
        """Whether somebody waits for this. It is answered now."""
        number = completion.request_id
        if (version := self.versions.pop(number, None)) is None:
            return False
        if number in self._lost:
            self._lost.remove(number)
            self._other += completion.versions[0][1] != version
            self._tell()
        return True

    def pop_other(self) -> int:
        """Return how many responses another version has drawn since the last call."""
        count, self._popped = self._other - self._popped, self._other
        return count

    def _tell(self) -> None:
        """Note all that was lost in one line, when it is answered."""
        if not self._lost and (count := self._other - self._told):
            self._told = self._other
            self._note(
                f"{count} responses were drawn by newer weights than they were begun with: their engine was lost"
            )


def _shared(requests: Iterable[Request], counts: list[int]) -> list[list[Request]]:
    """Requests by who gets them, each prompt's to the one that has the fewest. ``counts``: how many they have."""
    shares: list[list[Request]] = [[] for _ in counts]
    for _, group in groupby(requests, key=lambda request: list(request.prompt_ids)):
        samples = list(group)
        fewest = counts.index(min(counts))
        shares[fewest] += samples
        counts[fewest] += len(samples)
    return shares


def _by_id(requests: Iterable[Request]) -> dict[int, Request]:
    return {request.request_id: request for request in requests}


def _known(engine: FleetEngine, completions: Sequence[Completion]) -> list[Completion]:
    """Completions of what the engine was given: others were cancelled. They are no longer among its requests."""
    return [each for each in completions if engine.requests.pop(each.request_id, None) is not None]
