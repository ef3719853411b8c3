"""The calculator: exact where people expect it, and no input makes it compute for long, raise or execute."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from rlhf_mcore.sandbox.calculator import calculator


def test_values() -> None:
    for expression, value in [
        ("2+3*4", "14"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 + 7 % 4", "6"),
        ("-7 // 2", "-4"),
        ("1/3", "0.333333333333333"),
        ("2^10", "1024"),
        ("2 ** -2", "0.25"),
        ("2**0.5", "1.4142135623731"),
        ("(48 \u00f7 2) \u00d7 3 \u2212 1", "71"),
        ("sqrt(2) ** 2", "2"),
        ("max(1, 2.5, -3) + abs(-4)", "6.5"),
        ("round(3.14159, 2)", "3.14"),
        ("round(2.5)", "2"),
        ("sin(pi / 2)", "1"),
        ("10**30 + 1", "1000000000000000000000000000001"),
        ("0 ** 10 + 1 ** 99999999999 + (-1) ** 99999999999", "0"),
        ("1e3", "1000"),
        ("1.50 * 2", "3"),
    ]:
        assert calculator(expression) == value


def test_errors() -> None:
    for expression, error in [
        ("1/0", "error: division by zero"),
        ("0 ** -1", "error: division by zero"),
        ("", "error: not an arithmetic expression"),
        ("two", "error: 'two' is no arithmetic"),
        ("9**9**9**9", "error: the result is too large"),
        ("9**99999", "error: the result is too large"),
        ("exp(1000)", "error: the result is too large"),
        ("1e999999999", "error: the result is too large"),
        ("1e4000 * 1e4000", "error: the result is too large"),
        ("(-2) ** 0.5", "error: a fractional power of a negative number"),
        ("__import__('os').system('true')", "error: \"__import__('os').system('true')\" is no arithmetic"),
        ("abs.__class__", "error: 'abs.__class__' is no arithmetic"),
        ("[1] * 9", "error: '[1]' is no arithmetic"),
        ("'a' * 9", "error: \"'a'\" is no arithmetic"),
        ("True + 1", "error: 'True' is no arithmetic"),
        ("1 if 1 else 2", "error: '1 if 1 else 2' is no arithmetic"),
        ("abs(x=1)", "error: 'abs(x=1)' is no arithmetic"),
        ("(" * 400 + "1" + ")" * 400, "error: more than 500 characters"),
        ("-" * 300 + "1", "error: nested more than 50 deep"),
        ("1\0", "error: not an arithmetic expression"),
        ("9" * 400 + "**9999999", "error: the result is too large"),
    ]:
        assert calculator(expression) == error


@given(st.text(string.digits + "+-*/%.()^e ", max_size=60) | st.text(max_size=60))
def test_any_text_gives_a_text(expression: str) -> None:
    assert calculator(expression)
