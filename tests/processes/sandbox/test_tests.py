"""Functions and assert tests: the values that pass between code and its test, and code that wants to pass without being right."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest

from rlhf_mcore.sandbox.run import Limits, Program, Reason, Result, Sandbox
from rlhf_mcore.sandbox.values import from_json, refuse, to_json, update

pytestmark = pytest.mark.default
QUICK = Limits(cpu_s=1, wall_s=20.0, memory_bytes=256 * 2**20, output_bytes=2**16)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Sandbox, Sandbox]]:
    with Sandbox() as code, Sandbox() as test:
        yield code, test


def check(pair: tuple[Sandbox, Sandbox], code: str, test: str) -> Result:
    return pair[0].test(Program(code, "serve", prelude=True), Program(test, "test"), pair[1], QUICK)


def call(pair: tuple[Sandbox, Sandbox], code: str, name: str, *arguments: object) -> Result:
    program = Program(code, "call", name=name, prelude=True)
    return pair[0].run(program, QUICK, stdin=json.dumps(to_json(list(arguments))).encode())


# --------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**80), 10**5000, 1.5, float("inf"), "t\ud800", b"\x00\xff", 1 + 2j, [1, [2]], (1, (2,)), {1, 2}, frozenset("a"),
        {(1, 2): [3], None: {}}, range(1, 9, 2), Decimal("1.10"), Fraction(1, 3), [], (), {}, set(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_plain_values_arrive_as_they_are(value: object) -> None:
    arrived = from_json(json.loads(json.dumps(to_json(value))), lambda name, _: pytest.fail(name))
    assert (arrived, type(arrived)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        '{"Fraction": ["1e300000000"]}', '{"Fraction": ["1e300000000", 1]}', '{"Fraction": [{"Decimal": "1e300000000"}]}',
        '{"Fraction": [{"Fraction": ["1e9999999", 1]}, 3]}', '{"Fraction": [1.5, 2]}', '{"Fraction": [1]}', '{"Fraction": [true, 2]}',
        '{"Fraction": [{"int": "0x' + "f" * 10**6 + '"}, {"int": "0x' + "e" * 10**6 + '"}]}',
        '{"Decimal": "1e300000000"}', '{"Decimal": "1e-300000000"}', '{"Decimal": "' + "9" * 10**6 + '"}', '{"Decimal": 5}',
        '{"int": "0x' + "f" * 10**7 + '"}', '{"int": 5}', '{"int": "1_0z"}', '{"float": "1e999999999"}', '{"float": "' + "9" * 10**6 + '"}',
        '{"complex": ["1e300000000", 0]}', '{"complex": ["1+2j"]}', '{"complex": [{"int": "0x' + "f" * 10**6 + '"}, 0]}',
        '{"range": [0, 1.5, 1]}', '{"range": ["5"]}', '{"range": [{"Fraction": ["1e9", 1]}, 2, 3]}', '{"bytes": "zz"}', '{"bytes": 1000000000000}',
        '{"set": {"range": [0, 1000000000000, 1]}}', '{"tuple": {"tuple": []}}', '{"set": [[1]]}', '{"dict": [[1]]}', '{"dict": 3}',
        json.dumps({"set": [n * (2**61 - 1) for n in range(1, 50_000)]}),  # all have the hash 0: comparing them takes minutes
        json.dumps({"dict": [[n * (2**61 - 1), 0] for n in range(1, 50_000)]}),
        '{"tuple": [' * 5000 + "]}" * 5000, "[" * 100_000, "9" * 5000, '{"a": 1, "b": 2}', "{}",
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_fault_38_what_is_small_and_would_be_huge_is_no_value(text: str) -> None:
    def unknown(name: str, _: object) -> object:
        raise ValueError(name)

    with pytest.raises((ValueError, TypeError, KeyError, OverflowError, RecursionError)):
        from_json(json.loads(text), unknown)


@pytest.mark.parametrize(
    "value",
    [16**10**5, Fraction(10**4000, 3**4000), Decimal("1e-9999"), Decimal("NaN"), Decimal("-Infinity"), set(range(5000)), complex("inf"), range(0, 10**18, 7)],
    ids=range(8),
)  # fmt: skip
def test_ordinary_large_values_arrive(value: object) -> None:
    arrived = from_json(json.loads(json.dumps(to_json(value))), lambda name, _: pytest.fail(name))
    assert type(arrived) is type(value)
    assert arrived == value or str(arrived) == "NaN"


def test_what_is_more_than_plain_arrives_as_its_base_or_not_at_all() -> None:
    class Always(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    point = namedtuple("point", "x y")
    for value, base in ((Always(1), 1), (point(1, 2), (1, 2)), (OrderedDict(a=1), {"a": 1})):
        arrived = from_json(to_json(value), lambda name, _: pytest.fail(name))
        assert type(arrived) is type(base)
        assert base == arrived
    with pytest.raises(TypeError, match="a function cannot be passed"):
        to_json(lambda: 1, refuse)


def test_a_container_becomes_what_it_was_made() -> None:
    first, second = [3, 1], {"a": 1}
    update(first, [1, 3])
    update(second, {"b": 2})
    assert (first, second) == ([1, 3], {"b": 2})


# ------------------------------------------------------------------------------------------------------------ functions
def test_a_function_and_a_method_are_called(pair: tuple[Sandbox, Sandbox]) -> None:
    assert call(pair, "def f(a, b):\n    print('noise')\n    return a + b", "f", 2, 3).stdout == "5"
    leet = (
        "class Solution:\n    def two(self, n: List[int], t: Optional[int]) -> List[int]:\n        return sorted(n)[:t]"
    )
    assert json.loads(call(pair, leet, "two", [3, 1, 2], 2).stdout) == [1, 2]


@pytest.mark.parametrize(
    "code", ["def g(): pass", "def f(): raise ValueError", "import os\nos._exit(0)", "f = 3", "def f(): return f"]
)
def test_a_function_without_a_value(pair: tuple[Sandbox, Sandbox], code: str) -> None:
    assert call(pair, code, "f").stdout == ""


# -------------------------------------------------------------------------------------------------------------- asserts
@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2"),
        ("def f(*a, **k): return a, k", "assert f(1, b={2}) == ((1,), {'b': {2}})"),
        ("def f(x): x.sort(); x.append([1])", "a = [3, 1]\nassert f(a) is None and a == [1, 3, [1]]"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(): raise KeyError('k')", "try:\n    f()\n    assert False\nexcept KeyError as e:\n    assert 'k' in str(e)"),
        ("class Node:\n    def __init__(self, v): self.v, self.left = v, None\ndef depth(n): return 1 + depth(n.left) if n else 0",
         "root = Node(1)\nroot.left = Node(2)\nassert depth(root) == 2 and root.left.v == 2"),
        ("from dataclasses import dataclass\n@dataclass(order=True)\nclass P: x: int", "assert P(1) == P(1) and P(1) < P(2) and P(1) != P(2)"),
        ("def f(x): return x / 3", "assert abs(f(1) - 0.3333) < 1e-3 and math.isclose(f(3), 1)"),
        ("from math import gcd as g\ndef gcd(a, b): return g(a, b)", "def check(candidate):\n    assert candidate(4, 6) == 2\ncheck(gcd)"),
        ("class S:\n    def __init__(self): self.n = []\n    def push(self, x): self.n.append(x); return self\n    def __len__(self): return len(self.n)",
         "s = S()\nassert len(s.push(1).push(2)) == 2 and s.n == [1, 2]"),
        ("import numpy as np\ndef f(n): return np.arange(n), np.float64(1.5)", "a, b = f(3)\nassert np.allclose(a, [0, 1, 2]) and b == 1.5"),
        ("f = lambda x: 10 ** x", "assert f(3000) == 10 ** 3000"),
    ],
    ids=range(12),
)  # fmt: skip
def test_right_code_passes(pair: tuple[Sandbox, Sandbox], code: str, test: str) -> None:
    with_packages = "numpy" in code
    if with_packages:
        from rlhf_mcore.sandbox.run import site_packages

        with Sandbox(None, site_packages()) as first, Sandbox(None, site_packages()) as second:
            result = check((first, second), code, test)
    else:
        result = check(pair, code, test)
    assert result.reason is Reason.OK, result


ALWAYS = """
class Always:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __mul__ = __truediv__ = __abs__ = __round__ = __sub__
    def __lt__(self, other): return True
    __gt__ = __le__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return hash(2)
    def __iter__(self): return iter(())
    def __len__(self): return 2
class AlwaysInt(int):
    __eq__ = lambda self, other: True
    __hash__ = int.__hash__
class AlwaysStr(str):
    __eq__ = lambda self, other: True
    __hash__ = str.__hash__
"""


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (ALWAYS + "def f(x): return Always()", "assert f(1) == 2"),
        (ALWAYS + "def f(x): return Always()", "assert 2 == f(1)"),
        (ALWAYS + "def f(x): return Always()", "assert abs(f(1) - 2.0) < 1e-6"),
        (ALWAYS + "def f(x): return Always()", "assert f(1) < 3"),
        (ALWAYS + "def f(x): return Always()", "assert f(1) in {2: 1}"),
        (ALWAYS + "def f(x): return Always()", "assert 2 in f(1)"),
        (ALWAYS + "def f(x): return [Always()]", "assert f(1) == [2]"),
        (ALWAYS + "def f(x): return Always()", "assert isinstance(f(1), int)"),
        (ALWAYS + "def f(x): return AlwaysInt(7)", "assert f(1) == 2"),
        (ALWAYS + "def f(x): return AlwaysStr('x')", "assert f(1) == 'a'"),
        (ALWAYS + "def f(x): return Always()\nmath = Counter = abs = Always()", "assert math.isclose(f(1), 2)"),
        (ALWAYS + "def f(x): return {}\nCounter = Always()", "assert Counter(f(1)) == Counter('ab')"),
        (ALWAYS + "def f(x): return 9\nabs = len = int = Always()", "assert abs(f(1)) == 2"),
        ("import os\ndef f(x): os._exit(0)", "assert f(1) == 2"),
        ("import os\nos._exit(0)", "assert f(1) == 2"),
        ("import sys\ndef f(x): sys.exit(0)", "assert f(1) == 2"),
        ("def f(x): raise SystemExit(0)", "assert f(1) == 2"),
        ("import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\ndef f(x): raise AssertionError", "assert f(1) == 2"),
        ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 3", "assert f(1) == 2"),
        ("import sys, builtins\nbuiltins.exec = builtins.compile = print\nsys.settrace(lambda *a: None)\ndef f(x): return 3", "assert f(1) == 2"),
        ("import gc, sys\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'needle' + '-5' in str(o): return 2\n    return 3", "s = 'needle-5'; assert f(1) == 2"),
        ("import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n        for v in frame.f_locals.values():\n"
         "            if isinstance(v, str) and 'ass' + 'ert' in v: return 2\n        frame = frame.f_back\n    return 3", "assert f(1) == 2"),
        ("import os\ndef f(x):\n    for n in range(64):\n        try: os.write(n, b'{\"value\": true}\\n' * 9)\n        except OSError: pass\n    return 3",
         "assert f(1) == 2"),
        ("import os\ndef f(x):\n    os.write(4, b'{\"value\": {\"module\": \"this\"}, \"x\": 1}\\n')\n    return 3", "assert f(1) == 2"),
        ("import os\ndef f(x):\n    os.write(4, b'{\"value\": {\"module\": \"unittest.__main__\"}}\\n')", "assert f(1) == 2"),
        ("import unittest\ndef f(x): return unittest", "import unittest.__main__\nassert f(1) == 2"),
        ("def f(x): return 3", "f(1)\nexit(0)\nassert f(1) == 2"),
        ("import os\ndef f(x):\n    os.write(4, b'[' * 10**6 + b'\\n')\n    return 3", "assert f(1) == 2"),
        ("import os\ndef f(x):\n    os.write(4, b'{\"error\": \"SystemExit\", \"text\": \"0\"}\\n')\n    return 3", "assert f(1) == 2"),
        ("print('ok')", "assert f(1) == 2"),
        ("def f(x", "assert f(1) == 2"),
    ],
    ids=range(31),
)  # fmt: skip
def test_fault_24_code_that_is_wrong_does_not_pass(pair: tuple[Sandbox, Sandbox], code: str, test: str) -> None:
    assert check(pair, code, test).reason is Reason.WRONG


def test_code_that_hangs_is_the_reason(pair: tuple[Sandbox, Sandbox]) -> None:
    endless = Program("def f(x):\n    while True: pass", "serve")
    short = replace(QUICK, wall_s=0.2)
    assert pair[0].test(endless, Program("assert f(1) == 2", "test"), pair[1], short).reason is Reason.TIMEOUT
    assert check(pair, "def f(x): return [bytearray(10**9)]", "assert f(1) == 2").reason is Reason.MEMORY
    assert check(pair, "def f(x): return 2", "assert f(1) == 2").reason is Reason.OK
