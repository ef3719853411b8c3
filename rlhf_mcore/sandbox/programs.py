"""The kinds of programs in a sandbox. Each runs in a forked process that is already confined.

Code and its tests never share a process. For a function, arguments go in, its value comes out, and the comparison happens
outside. A test (``test``) runs in another sandbox than the tested code (``serve``), and calls it through a channel.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import collections
import importlib
import json
import linecache
import operator
import os
import sys
import threading
import traceback
import typing
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rlhf_mcore.sandbox.values import Channel, array_from_json, from_json, to_json, update

INPUT, OUTPUT, ERRORS, TEXT, CHANNEL = range(5)  # descriptors
NAME = "solution.py"  # file name in tracebacks
# Modules that contest solutions use without importing them, because judges import them.
# fmt: off
_MODULES = [
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator",
    "os", "random", "re", "string", "sys", "time", "typing",
]
# fmt: on
_OF_MODULES = {
    "bisect": "bisect_left bisect_right insort",
    "collections": " ".join(collections.__all__),
    "functools": "cache cmp_to_key lru_cache reduce",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": "accumulate chain combinations count cycle groupby islice permutations product repeat",
    "math": "ceil comb factorial floor gcd inf isqrt log log2 sqrt",
    "typing": " ".join(typing.__all__),
}
PRELUDE: dict[str, Any] = {name: importlib.import_module(name) for name in _MODULES}
PRELUDE |= {name: getattr(PRELUDE[of], name) for of, names in _OF_MODULES.items() for name in names.split()}
# Names that the tested code cannot redefine for a test.
_OF_THE_TEST = {*dir(builtins), *_MODULES, *collections.__all__, *typing.__all__}
_SHORT = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "datetime": "datetime"}


def run(order: dict[str, Any]) -> int:
    """Run the program of ``order``: {"kind", "packages", ...}. Read its text from ``TEXT``. Return the exit code."""
    if order["kind"] == "command":
        os.closerange(TEXT, CHANNEL + 1)
        os.execvp(order["argv"][0], order["argv"])
    with open(TEXT, "rb") as file:
        text = file.read().decode()
    sys.path.extend(order["packages"])
    sys.argv = [NAME]
    linecache.cache[NAME] = (len(text), None, text.splitlines(keepends=True), NAME)
    code = 1
    try:
        _KINDS[order["kind"]](text, order)
        code = 0
    except SystemExit as error:
        code = 1 if order["kind"] == "test" else _exit_code(error)  # a test that exits early has not passed
    except BaseException as error:
        _print_error(error)
    return _finish(code)


def _finish(code: int) -> int:
    """Finish like the interpreter: wait for threads, run exit handlers, flush buffers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        _print_error(error)
        return code or 1
    return code


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 (of the program that runs here)
    return 1


def _print_error(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _execute(text: str, name: str, order: dict[str, Any]) -> dict[str, Any]:
    """Run code as a module, and return its namespace."""
    module = ModuleType(name)
    if order.get("prelude"):
        module.__dict__.update(PRELUDE)
    sys.modules[name] = module
    exec(compile(text, NAME, "exec"), module.__dict__)
    return module.__dict__


def _script(text: str, order: dict[str, Any]) -> None:
    _execute(text, "__main__", order)


def _call(text: str, order: dict[str, Any]) -> None:
    """Call the function or ``Solution`` method ``order["name"]`` with arguments from the input. Write its value to the output."""
    with open(INPUT, "rb") as file:
        arguments = [from_json(each, _unknown) for each in json.loads(file.read())]
    result = os.fdopen(os.dup(OUTPUT), "wb")
    os.dup2(ERRORS, OUTPUT)  # printed text is not the value
    namespace = _execute(text, "solution", order)
    name = order["name"]
    function = namespace[name] if name in namespace else getattr(namespace["Solution"](), name)
    value = function(*arguments)
    result.write(json.dumps(to_json(value)).encode("ascii"))
    result.close()


def _unknown(name: str, content: Any) -> Any:
    if name == "array":
        return array_from_json(content, _unknown)
    raise ValueError(f"unknown value type {name!r}")


# ------------------------------------------------------------------------------------------------ the code under test
def _serve(text: str, order: dict[str, Any]) -> None:
    """Run the code, then answer the requests of the test over the channel: look up names, call, read attributes."""
    channel = Channel(os.fdopen(CHANNEL, "rb"), os.fdopen(os.dup(CHANNEL), "wb"))
    lent: list[Any] = []

    def keep(value: Any) -> Any:
        lent.append(value)
        return {"lent": len(lent) - 1}

    def decode(name: str, content: Any) -> Any:
        return lent[content] if name == "lent" else _unknown(name, content)

    namespace = _execute(text, "solution", order)
    while True:
        verb, *parts = channel.receive()
        try:
            if verb == "names":
                defined = {name: namespace[name] for name in parts if name in namespace}
                channel.send({"value": to_json(defined, keep)})
                continue
            arguments, named = from_json(parts[-2], decode), from_json(parts[-1], decode)
            target = lent[parts[0]]
            value = target(*arguments, **named) if verb == "call" else _operate(verb, target, arguments)
            channel.send({"value": to_json(value, keep), "arguments": to_json([*arguments, *named.values()], keep)})
        except EOFError:
            raise
        except Exception as error:
            channel.send({"error": type(error).__name__, "text": str(error)})


def _operate(verb: str, target: Any, arguments: list[Any]) -> Any:
    if verb in ("getattr", "setattr", "delattr", "iter", "next", "len", "str", "repr", "bool", "hash"):
        return getattr(builtins, verb)(target, *arguments)
    return getattr(operator, verb)(target, *arguments)


# ------------------------------------------------------------------------------------------------------------ the test
def _test(text: str, order: dict[str, Any]) -> None:
    """Run a test. Names that it does not define come from the tested code. It passes if it raises nothing."""
    channel = Channel(os.fdopen(CHANNEL, "rb"), os.fdopen(os.dup(CHANNEL), "wb"))
    tree = compile(text, NAME, "exec", ast.PyCF_ONLY_AST)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known = {
        short: importlib.import_module(name) for short, name in _SHORT.items() if short in names and find_spec(name)
    }
    channel.send(["names", *sorted(names - _OF_THE_TEST - known.keys())])
    module = ModuleType("__main__")
    module.__dict__.update({**PRELUDE, **_answer(channel), **known})
    sys.modules["__main__"] = module
    exec(compile(text, NAME, "exec"), module.__dict__)


def _answer(channel: Channel, arguments: list[Any] | None = None) -> Any:
    message = channel.receive()

    def decode(name: str, content: Any) -> Any:
        return Remote(channel, int(content)) if name == "lent" else _unknown(name, content)

    if "error" in message:
        kind = getattr(builtins, str(message["error"]), RuntimeError)
        raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(message["text"])
    if arguments:
        for before, now in zip(arguments, message.get("arguments", ()), strict=False):
            update(before, from_json(now, decode))
    return from_json(message["value"], decode)


class Remote:
    """A function, class or object of the tested code, which stays in the other sandbox.

    It never equals a value of the test, and no operator combines the two. Otherwise an object that equals everything, or
    whose difference to everything is 0, would pass.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    def _ask(self, verb: str, arguments: list[Any], named: dict[str, Any] | None = None) -> Any:
        self._channel.send([verb, self._number, to_json(arguments, _lent), to_json(named or {}, _lent)])
        return _answer(self._channel, [*arguments, *(named or {}).values()])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", [name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", [name, value])

    def __iter__(self) -> Any:
        return self._ask("iter", [])

    def __next__(self) -> Any:
        return self._ask("next", [])

    def __len__(self) -> int:
        return int(self._ask("len", []))

    def __bool__(self) -> bool:
        return self._ask("bool", []) is True

    def __hash__(self) -> int:
        return int(self._ask("hash", []))

    def __str__(self) -> str:
        return str(self._ask("str", []))

    def __repr__(self) -> str:
        return str(self._ask("repr", []))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", [key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", [key, value])

    def __contains__(self, value: Any) -> bool:
        return any(value == item for item in self)


def _lent(value: Any) -> Any:
    if isinstance(value, Remote):
        return {"lent": value._number}
    raise TypeError(f"a {type(value).__name__} cannot be passed to the code under test")


def _between_remotes(name: str) -> Any:
    def operate(self: Remote, other: Any) -> Any:
        return self._ask(name, [other]) if isinstance(other, Remote) else NotImplemented

    return operate


for _name in (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "and_",
    "or_",
    "xor",
):
    setattr(Remote, f"__{_name.rstrip('_')}__", _between_remotes(_name))

_KINDS = {"script": _script, "call": _call, "serve": _serve, "test": _test}
