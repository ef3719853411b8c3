"""A calculator for model output. The text is parsed, never evaluated, and bounded before any computation."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 500
MAX_DEPTH = 50
MAX_BITS = 4096  # for the numerator and the denominator of any intermediate result: about 1200 digits
_SHOWN_DIGITS = 15

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., float | Fraction | int]] = {
    "abs": abs,
    "max": max,
    "min": min,
    "round": round,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": math.log,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression, and return the result as text.

    It may contain ``+ - * / // % **`` (also ``^ × ÷``), brackets, decimals, and the functions abs, max, min, round, sqrt,
    exp, log, sin, cos, tan.

    Sums, products and integer powers of decimals are exact: 0.1 + 0.2 is 0.3. Other results have 15 digits. An invalid
    expression gives a text that starts with "error: ", which can be shown to the model. This function never raises.
    """
    try:
        if len(expression) > MAX_CHARS:
            raise ValueError(f"more than {MAX_CHARS} characters")
        text = (
            expression.strip().replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/").replace("\u2212", "-")
        )
        return _as_text(_value(ast.parse(text, mode="eval").body, 0))
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, RecursionError, MemoryError):
        return "error: not an arithmetic expression"
    except OverflowError:
        return "error: the result is too large"
    except (ValueError, TypeError) as error:
        return f"error: {error}"


def _value(node: ast.expr, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result: Fraction | float = Fraction(str(number)) if math.isfinite(number) else math.inf
        case ast.Name(id=name) if name in _CONSTANTS:
            result = _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _value(operand, depth + 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            result = _power(_value(left, depth + 1), _value(right, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = Fraction(_OPERATORS[type(op)](_value(left, depth + 1), _value(right, depth + 1)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS and arguments:
            values = [_value(argument, depth + 1) for argument in arguments]
            result = _FUNCTIONS[name](*(_digits(v) if name == "round" and i else v for i, v in enumerate(values)))
        case _:
            raise ValueError(f"{ast.unparse(node)[:40]!r} is no arithmetic")
    if isinstance(result, float) and not math.isfinite(result):
        raise OverflowError
    value = Fraction(result)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise OverflowError
    return value


def _digits(value: Fraction) -> int:
    if value.denominator != 1 or abs(value) > 1000:
        raise ValueError("round takes a whole number of digits")
    return int(value)


def _power(base: Fraction, exponent: Fraction) -> Fraction | float:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a fractional power of a negative number")
        return float(base) ** float(exponent)
    if abs(base) == 1:
        exponent %= 2
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * (bits - 1) > MAX_BITS:
        raise OverflowError
    return base ** int(exponent)


def _as_text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    rounded = float(f"{float(value):.{_SHOWN_DIGITS}g}")
    return repr(rounded).removesuffix(".0")
