"""Compare two answers: by what their forms decide, and by asking somebody who computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlhf_mcore.rewards.forms import COMMAND, LIST, ORDERED, SET, Answer, letters, names_differ

# ------------------------------------------------------------------------------------------------------------- comparing
Ask = Callable[[str, str], bool]  # whether two expressions, relations or equations in LaTeX are equal


def is_same(truth: Answer, answer: Answer, ask: Ask) -> bool:
    """Return whether two answers are mathematically the same. Whatever needs a solver is asked of ``ask``.

    With a constant ``ask`` the result is what is certain: True in spite of False, or False in spite of True.
    """
    if not truth.spelling or not answer.spelling:
        return False
    if names_differ(truth, answer):
        return _are_equations(truth, answer) and ask(truth.as_equation, answer.as_equation)
    if truth.spelling == answer.spelling:
        return True
    if "text" in (truth.kind, answer.kind):
        return False
    if truth.value is not None and answer.value is not None:
        return _are_equal_numbers(truth, answer)
    if "equation" in (truth.kind, answer.kind):
        return _are_equations(truth, answer) and ask(truth.as_equation, answer.as_equation)
    if truth.parts and answer.parts:
        return _are_same_collections(truth, answer, ask)
    for one, other in ((truth, answer), (answer, truth)):
        if one.brackets == SET and len(one.parts) == 1 and one.parts[0].spelling != r"\emptyset":
            return is_same(one.parts[0], other, ask) if one is truth else is_same(other, one.parts[0], ask)
    if {truth.kind, answer.kind} & {"relation", "collection"} and not (_is_range(truth) and _is_range(answer)):
        return False
    return not _is_other_case(truth, answer) and ask(truth.source, answer.source)


def _are_equations(truth: Answer, answer: Answer) -> bool:
    """Return whether two answers may be one equation: x = 3 is a value, and no equation of it is its solution."""
    return all(
        each.kind == "equation" or (each.name and each.kind == "expression" and each.has_variables)
        for each in (truth, answer)
    )


def _are_equal_numbers(truth: Answer, answer: Answer) -> bool:
    """Equal numbers; 50% is 50 and 1/2."""
    assert truth.value is not None and answer.value is not None
    if truth.is_percent == answer.is_percent:
        return truth.value == answer.value
    percent, other = (truth.value, answer.value) if truth.is_percent else (answer.value, truth.value)
    return other in (percent, percent / 100)


def _is_other_case(truth: Answer, answer: Answer) -> bool:
    """Return whether a letter is a capital in one answer, and none in the other."""
    ours, theirs = ({*letters(each.source), *COMMAND.findall(each.source)} for each in (truth, answer))
    return bool({name.lower() for name in ours - theirs} & {name.lower() for name in theirs - ours})


def _is_range(answer: Answer) -> bool:
    """Return whether an answer is an interval, a union of some, or a relation that says the same."""
    return (
        answer.kind == "relation"
        or answer.brackets in ORDERED[:4]
        or bool(re.search(r"\\(?:cup|cap|mathbb|setminus)", answer.source))
    )


def _are_same_collections(truth: Answer, answer: Answer, ask: Ask) -> bool:
    ours, theirs = _assignments(truth), _assignments(answer)
    if ours is not None and theirs is not None:
        return ours.keys() == theirs.keys() and all(is_same(ours[name], theirs[name], ask) for name in ours)
    if (ours is None) != (theirs is None):
        values, other = (ours, answer) if ours is not None else (theirs, truth)
        if values is None or other.brackets != "()" or len(other.parts) != len(values):
            return False
        pairs = [(values[name], part) for name, part in zip(sorted(values), other.parts, strict=True)]
        return all(is_same(a, b, ask) if other is answer else is_same(b, a, ask) for a, b in pairs)
    if truth.brackets in ORDERED or answer.brackets in ORDERED:
        same_shape = truth.brackets == answer.brackets and len(truth.parts) == len(answer.parts)
        return same_shape and all(is_same(a, b, ask) for a, b in zip(truth.parts, answer.parts, strict=True))
    return _are_matched(truth.parts, answer.parts, ask)


def _assignments(answer: Answer) -> dict[str, Answer] | None:
    """Return the values of several variables, x = 1, y = 2, by name; None: it is something else."""
    if answer.brackets == "()" and answer.name.startswith("("):
        return dict(zip(answer.name[1:-1].split(","), answer.parts, strict=False))
    names = [part.name for part in answer.parts]
    is_assignment = answer.brackets in (LIST, SET, "()") and all(names) and len(set(names)) == len(names) > 1
    return {part.name: replace(part, name="") for part in answer.parts} if is_assignment else None


def _are_matched(ours: Sequence[Answer], theirs: Sequence[Answer], ask: Ask) -> bool:
    """Return whether every element is the same as one of the other collection, each of another one (Kuhn's augmenting paths)."""
    if len(ours) != len(theirs):
        return False
    taken: dict[int, int] = {}  # of theirs, by which of ours

    def take(index: int, seen: set[int]) -> bool:
        for other in range(len(theirs)):
            if other in seen or (ours[index].brackets == SET) != (theirs[other].brackets == SET):
                continue
            if is_same(ours[index], theirs[other], ask):
                seen.add(other)
                if other not in taken or take(taken[other], seen):
                    taken[other] = index
                    return True
        return False

    return all(take(index, set()) for index in range(len(ours)))
