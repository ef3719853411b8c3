"""Queue requests and assign them to engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rlhf_mcore.rollout.remote.fleet_state import FleetEngine, Share

if TYPE_CHECKING:
    from rlhf_mcore.types import Completion, Request


class FreeBacklog:
    """Assigns each request to an engine at once. All samples of a prompt go to the engine with the fewest requests.

    ``FleetEngine.requests`` contains the engine's requests until it answers them.
    """

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, requests: Sequence[Request], version: int) -> None:
        """Add requests for a version of the weights."""
        self._requests.extend(requests)

    def deal(self, serving: Sequence[FleetEngine]) -> list[tuple[FleetEngine, list[Request]]]:
        """Assign waiting requests to engines that may sample them. Return the requests of each engine that receives some."""
        if not serving:
            return []
        counts = [len(engine.requests) for engine in serving]
        shares = _share_out(self._requests, counts)
        self._requests.clear()
        for engine, requests in zip(serving, shares, strict=True):
            engine.requests |= _by_id(requests)
        return [(engine, requests) for engine, requests in zip(serving, shares, strict=True) if requests]

    def take(self, engine: FleetEngine, completions: Sequence[Completion]) -> list[Completion]:
        """Return the answers among an engine's completions. Call this for each report, even without completions."""
        return _take_own(engine, completions)

    def put_back(self, engine: FleetEngine) -> None:
        """Queue the requests of a lost engine again, for other engines."""
        self._requests.extendleft(reversed(engine.requests.values()))
        engine.requests = {}

    def drop(self, request_ids: Collection[int]) -> None:
        """Remove these requests from the queue."""
        self._requests = deque(request for request in self._requests if request.request_id not in request_ids)


class SharedBacklog:
    """Assigns requests so that engine failures do not change any bit of a response.

    The last bits of a response depend on the other requests in the engine's batch. Requests that are submitted together are therefore
    split into ``num_shares``, regardless of the number of engines. An engine samples one share at a time, with the weights of the
    share's version. If the engine is lost, the whole share is sampled again, including its answered requests.
    """

    def __init__(self, num_shares: int) -> None:
        self._num_shares = num_shares
        self._shares: deque[Share] = deque()

    def add(self, requests: Sequence[Request], version: int) -> None:
        """See :class:`FreeBacklog`, also for the following methods."""
        shares = _share_out(requests, [0] * self._num_shares)
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
        """Return answers. A repeated share returns all its answers together, when its engine has answered every request."""
        share, drawn = engine.share, _take_own(engine, completions)
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
    """Requests without an answer, each with the version of the weights at its submission.

    ``note`` receives a message with the number of responses that another version sampled because their engine was lost.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.versions: dict[int, int] = {}  # by request id
        self._note = note
        self._lost: set[int] = set()  # ids whose engine was lost
        self._noted = self._popped = self._other = 0  # counts of responses that another version sampled

    def submit(self, requests: Sequence[Request], version: int) -> None:
        """Open requests that this version of the weights shall sample."""
        self.versions |= {request.request_id: version for request in requests}

    def lose(self, request_ids: Iterable[int]) -> None:
        """Mark requests whose engine is lost."""
        self._lost |= self.versions.keys() & set(request_ids)

    def drop(self, request_ids: Collection[int]) -> None:
        """Drop cancelled requests."""
        self.versions = {number: version for number, version in self.versions.items() if number not in request_ids}
        self._lost -= set(request_ids)
        self._tell()

    def answer(self, completion: Completion) -> bool:
        """Close an answered request. Return whether it was open."""
        number = completion.request_id
        if (version := self.versions.pop(number, None)) is None:
            return False
        if number in self._lost:
            self._lost.remove(number)
            self._other += completion.versions[0][1] != version
            self._tell()
        return True

    def pop_other(self) -> int:
        """Return the number of responses that another version has sampled since the last call."""
        count, self._popped = self._other - self._popped, self._other
        return count

    def _tell(self) -> None:
        """Write one note for all lost requests, after the last of them is answered."""
        if not self._lost and (count := self._other - self._noted):
            self._noted = self._other
            self._note(
                f"{count} responses were drawn by newer weights than they were begun with: their engine was lost"
            )


def _share_out(requests: Iterable[Request], counts: list[int]) -> list[list[Request]]:
    """Split requests into shares. All samples of a prompt join the share with the lowest of ``counts``, which are updated."""
    shares: list[list[Request]] = [[] for _ in counts]
    for _, group in groupby(requests, key=lambda request: list(request.prompt_ids)):
        samples = list(group)
        fewest = counts.index(min(counts))
        shares[fewest] += samples
        counts[fewest] += len(samples)
    return shares


def _by_id(requests: Iterable[Request]) -> dict[int, Request]:
    return {request.request_id: request for request in requests}


def _take_own(engine: FleetEngine, completions: Sequence[Completion]) -> list[Completion]:
    """Return the completions of the engine's requests and close these requests. Other completions were cancelled."""
    return [each for each in completions if engine.requests.pop(each.request_id, None) is not None]
