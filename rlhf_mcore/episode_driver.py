"""The interface between an engine and its episodes. Runs without an environment do not use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlhf_mcore.types import Completion, Request


class EpisodeDriver(Protocol):
    """Episodes in an environment, in the lead process of their engine. It chooses the turns to sample and takes the results."""

    @property
    def num_open(self) -> int:
        """Return the number of episodes that ``take`` has not returned yet."""
        ...

    @property
    def num_waiting(self) -> int:
        """Return the number of episodes that wait for their environment."""
        ...

    def watch(self, drawn: Callable[[Collection[int]], Mapping[int, Sequence[int]]], slots: int | None = None) -> None:
        """Set the function that returns the tokens sampled so far for requests in flight, by request id; it may return none.

        ``slots``: maximum number of turns in flight in the engine. Further turns are held back for engines with free slots. None: no
        limit.
        """
        ...

    def abandoned_turns(self) -> Collection[int]:
        """Return the ids of turns in the engine whose client has disconnected, each only once. The engine need not sample them."""
        ...

    @property
    def num_held(self) -> int:
        """Return the number of turns that are held back."""
        ...

    def lend(self, most: int) -> list[Request]:
        """Return at most ``most`` held-back turns for another engine. Their completions are passed to ``take``."""
        ...

    def begin(self, requests: Sequence[Request]) -> list[Request]:
        """Start the episodes among the requests. Returns the other requests, which the engine samples directly."""
        ...

    def cancel(self, request_ids: Collection[int]) -> None:
        """Drop these episodes; unknown ids are ignored."""
        ...

    def abandon(self) -> None:
        """Drop all episodes."""
        ...

    def due(self, engine_draws: bool, wait_s: float | None) -> list[Request] | None:
        """Return the turns that the engine should start now. None: it must not sample until environments have answered.

        If the engine is idle, this waits for an environment for at most ``wait_s``. ``engine_draws``: whether the engine has turns in
        flight.
        """
        ...

    def take(self, completions: Iterable[Completion]) -> list[Completion]:
        """Process completions of the engine. Returns ended episodes, and completions that do not belong to an episode."""
        ...
