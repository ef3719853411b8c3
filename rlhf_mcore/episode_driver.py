"""The interface between an engine and the episodes that it plays, of which runs without an environment know nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlhf_mcore.types import Completion, Request


class EpisodeDriver(Protocol):
    """Episodes in an environment, in the process that leads their engine: what the engine draws next, and what comes of it."""

    @property
    def num_open(self) -> int:
        """Episodes that ``take`` has not returned."""
        ...

    @property
    def num_waiting(self) -> int:
        """Episodes that wait for their environment."""
        ...

    def watch(self, drawn: Callable[[Collection[int]], Mapping[int, Sequence[int]]], slots: int | None = None) -> None:
        """Get what tells the tokens drawn so far of requests in flight, by their ids; it may know of none.

        ``slots``: turns that the engine draws at a time; what is more is held back, for engines that have room. None: all are given.
        """
        ...

    def abandoned_turns(self) -> Collection[int]:
        """Ids of turns at the engine that nobody waits for any more, once: it need not draw them."""
        ...

    @property
    def num_held(self) -> int:
        """Turns that are held back."""
        ...

    def lend(self, most: int) -> list[Request]:
        """Give away turns that are held back. Their completions come to ``take``."""
        ...

    def begin(self, requests: Sequence[Request]) -> list[Request]:
        """Begin those that ask for episodes. Returns the others, which are for the engine as they are."""
        ...

    def cancel(self, request_ids: Collection[int]) -> None:
        """Forget these episodes; unknown ids are ignored."""
        ...

    def abandon(self) -> None:
        """Forget all episodes."""
        ...

    def due(self, engine_draws: bool, wait_s: float | None) -> list[Request] | None:
        """Turns that an engine begins to draw now. None: it must not draw before environments have answered.

        Waits for an environment where the engine has nothing to do, but no longer than ``wait_s``. ``engine_draws``: whether it has
        turns in flight.
        """
        ...

    def take(self, completions: Iterable[Completion]) -> list[Completion]:
        """Take what an engine has drawn. Returns ended episodes, and completions that are no turns of episodes."""
        ...
