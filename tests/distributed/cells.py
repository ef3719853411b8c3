"""Check many cells of a world in one test. The error names all failing cells and shows the worst one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf, isfinite
from typing import Any

MOST_SHOWN = 12


class TooFar(AssertionError):
    """A number differs from its expected value. The distance is in multiples of the tolerance."""

    def __init__(self, message: str, ratio: float) -> None:
        super().__init__(message)
        self.ratio = ratio


def check_close(name: str, found: float, expected: float, rel: float = 0.0, abs_: float = 0.0) -> None:
    """Assert ``found == pytest.approx(expected, rel, abs)``. The error contains the distance."""
    allowed, distance = max(rel * abs(expected), abs_), abs(found - expected)
    if not distance <= allowed:  # NaN too
        ratio = distance / allowed if allowed and isfinite(distance) else inf
        raise TooFar(f"{name} is {found!r}, expected {expected!r}: {ratio:.3g} times the tolerance", ratio)


def check_below(name: str, found: float, bound: float) -> None:
    """Assert ``found < bound``. The error contains the distance."""
    if not found < bound:
        ratio = found / bound if bound and isfinite(found) else inf
        raise TooFar(f"{name} is {found!r}, allowed is less than {bound!r}", ratio)


def check_all(cells: Mapping[str, Any] | Iterable[str], check: Callable[..., None]) -> None:
    """Call ``check(found)`` for each value of ``cells``, or ``check(name)`` for names. Raise one error for all failing cells."""
    failures, count = [], 0
    for count, name in enumerate(cells, start=1):  # noqa: B007
        try:
            check(cells[name] if isinstance(cells, Mapping) else name)
        except (AssertionError, KeyError) as error:
            text = str(error) if isinstance(error, AssertionError) else f"no finding {error}"
            failures.append((getattr(error, "ratio", inf), name, text))
    assert count, "there are no cells"
    if failures:
        failures.sort(key=lambda failure: -failure[0])
        _, worst, text = failures[0]
        others = [f"  {name}: {text.splitlines()[0] if text else ''}" for _, name, text in failures[1:MOST_SHOWN]]
        left = [f"  and {len(failures) - MOST_SHOWN} more"] if len(failures) > MOST_SHOWN else []
        raise AssertionError(
            "\n".join([f"{len(failures)} of {count} cells fail, the worst is {worst}: {text}", *others, *left])
        )
