"""A worker process: it calls what must not run in the trainer, one item at a time, and sends back what came of each.

Started by ``rlhf_mcore.rewards.pool``. Apart from what it is told to load, it imports a few small modules and nothing heavy.
"""

from __future__ import annotations

import ctypes
import inspect
import numbers
import os
import random
import reprlib
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.user_functions import load_function, place_of
from rlhf_mcore.rewards.frames import DISCONNECTED, decode, encode

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
ASK: dict[str, Any] = {"ask": "batched"}  # in the place of an item: whether the function takes batches of them
MAX_FLOAT32 = 3.4e38  # scores travel as float32: what overflows there is as useless as inf
_PR_SET_PDEATHSIG = 1
_RECEIVE_BYTES = 2**16
DIGITS = 60  # to which irrational numbers are compared; what is smaller counts as 0

# Takes an item, returns what is sent back for it: {"score", "parts"}, or {"error": what is wrong}.
Call = Callable[[Any], "dict[str, Any]"]


def main(descriptor: int) -> None:
    """Serve the pool at the other end of a socket until it is closed.

    The first message tells what to load (``{"load", "options", "memory_bytes"}``); it is answered by ``{"ready": true}`` or
    ``{"problem": text}``. Every later one is a list of items, each of which is answered in turn. ``{"lost": cause}`` instead
    of an answer means that the worker ends.
    """
    end_with(descriptor)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # programs that a function starts do not get it
    messages = messages_of(connection)
    order = next(messages)
    limit_memory(order["memory_bytes"])
    sys.path.append(os.getcwd())  # where the trainer finds modules of the user's, too; last, so that it hides nothing
    try:
        call = LOADERS[order["load"]](**order["options"])
    except ConfigError as error:
        connection.sendall(encode({"problem": str(error)}))
        return
    connection.sendall(encode({"ready": True}))
    directory, process = os.getcwd(), os.getpid()
    for items in messages:
        for item in items:
            answer = _answer(call, item, process)
            try:
                connection.sendall(encode(answer))
            except OSError:
                os._exit(DISCONNECTED)
            if "lost" in answer:
                return
            with suppress(OSError):
                os.chdir(directory)


def _answer(call: Call, item: Any, process: int) -> dict[str, Any]:
    try:
        answer = call(item)
    except MemoryError:
        answer = {"lost": "ran out of memory"}
    if os.getpid() != process:  # the function has forked, and this is the child, which answers nothing
        os._exit(0)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    return answer


def messages_of(connection: socket.socket) -> Iterator[Any]:
    """What the pool sends, until it closes the connection."""
    buffer = bytearray()
    while data := connection.recv(_RECEIVE_BYTES):
        buffer += data
        yield from decode(buffer)


def end_with(descriptor: int) -> None:
    """Nothing of this process group outlives the trainer, whatever the function is doing and whatever it has started.

    The kernel ends this process with the thread that has started it. Its children are ended by a second process, which waits
    until the trainer's end of the socket is closed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.fork() == 0:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        closed = select.poll()
        closed.register(descriptor, select.POLLRDHUP)
        closed.poll()
        os.killpg(0, signal.SIGKILL)


def limit_memory(memory_bytes: int) -> None:
    """Allocations of this process, and of each that it starts, fail beyond ``memory_bytes``."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of the data, not of the address space: libraries reserve much of that and use little.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


# ----------------------------------------------------------------------------------------------- a function of the user's
def load_reward(spec: str, key: str) -> Call:
    """The function ``spec`` as something that takes items: an entry for each of ``PARAMETERS``, and "seed".

    Raises:
        ConfigError: the file or the function cannot be had, or does not take the four arguments.
    """
    try:
        function = load_function(spec, key)
    except KeyboardInterrupt as error:
        raise ConfigError(f"{key} is {spec!r}, but its file raises KeyboardInterrupt: correct the file") from error
    by_keyword = _takes_keywords(function)
    if problem := _signature_problem(function, by_keyword):
        raise ConfigError(f"{key} is {spec!r}, but {problem}")
    if takes_batches(function):
        from rlhf_mcore.rewards.batches import batched_call

        return batched_call(function, spec)

    def call(item: Mapping[str, Any]) -> dict[str, Any]:
        if item == ASK:
            return {"batched": False}
        seed_generators(item["seed"])
        arguments = [item[name] for name in PARAMETERS]
        try:
            result = function(**dict(zip(PARAMETERS, arguments, strict=True))) if by_keyword else function(*arguments)
            problem = result_problem(result)
            return {"error": f"returned {shown(result)}: {problem}"} if problem else score_of(result)
        except MemoryError:
            raise
        except BaseException as error:  # KeyboardInterrupt too: it is raised by the function, Ctrl-C does not come here
            return {"error": raised(error, spec)}

    return call


def raised(error: BaseException, spec: str) -> str:
    """What a function has done instead of returning."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}){place_of(error, spec)}"
    text = traceback.format_exception_only(error)[-1].strip()
    return f"raised {text[:2000]}{place_of(error, spec)}"


def seed_generators(seed: int) -> None:
    """A function that draws random numbers gives a response the same score in whatever process and order it is scored."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def takes_batches(function: Callable[..., Any]) -> bool:
    """Whether a function scores a batch at once: it has a parameter ``completions``."""
    try:
        return "completions" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _takes_keywords(function: Callable[..., Any]) -> bool:
    """Whether a function knows the arguments by their names: it has one of them at least, and takes the others too."""
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(PARAMETERS))
    except (TypeError, ValueError):  # ValueError: some builtins have no signature
        return False
    return any(name in signature.parameters for name in PARAMETERS)


def _signature_problem(function: Callable[..., Any], by_keyword: bool) -> str | None:
    """Why a function cannot be called with the four arguments, or None."""
    code = getattr(function, "__code__", None)
    where = f", line {code.co_firstlineno}" if code is not None else ""
    if inspect.iscoroutinefunction(function):
        return f"it is a coroutine function{where}, which returns no score: make it an ordinary one"
    if by_keyword or takes_batches(function):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*PARAMETERS)
    except TypeError as error:
        return f"its parameters are {signature}{where} ({error}): let it take ({', '.join(PARAMETERS)})"
    return None


def result_problem(result: Any) -> str | None:
    """What is wrong with a function's result, or None."""
    if not isinstance(result, Mapping):
        return number_problem(result, "the score")
    if "score" not in result:
        return "a dict needs the key 'score'"
    problems = [number_problem(result["score"], "the entry 'score'")]
    problems += [number_problem(value, f"the entry {key!r}") for key, value in result.items() if _is_number(value)]
    return next((problem for problem in problems if problem), None)


def number_problem(value: Any, what: str) -> str | None:
    """Why a value is no score, or None."""
    if not _is_number(value):
        return f"{what} must be a number"
    # Compared, not converted: float() of a huge int raises. NaN fails every comparison.
    return None if -MAX_FLOAT32 <= value <= MAX_FLOAT32 else f"{what} must be finite"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def shown(result: Any) -> str:
    """A value for a message."""
    return f"{reprlib.repr(result)} ({type(result).__name__})"


def score_of(result: Any) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        return {"score": float(result), "parts": {}}
    parts = {str(key): float(value) for key, value in result.items() if key != "score" and _is_number(value)}
    return {"score": float(result["score"]), "parts": parts}


# ------------------------------------------------------------------------------------------------- mathematical equality
class _Expired(BaseException):
    """The time for an item is over. No ``except Exception`` on the way swallows it."""


def load_math(cpu_s: float) -> Call:
    """math-verify's judgement of items ``{"truth", "answer"}``: ``{"equal"}``, or ``{"expired"}`` after ``cpu_s`` seconds.

    The seconds are those of the processor, so that a verdict does not depend on what else the machine is doing.
    """
    with open(os.devnull, "wb") as nowhere:  # the parser prints what it does not understand, which is up to the model
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Eq, simplify
    from sympy.core.random import seed

    from rlhf_mcore.rewards.forms import is_same, read_answer

    # As LaTeX alone: the extraction of plain expressions takes a part of a text for the whole. Units are gone; what looks like one
    # at the end (2t, 5c) is a variable.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    targets = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)]

    def ask(truth: str, answer: str) -> bool:
        ours, theirs = (
            parse(f"${text}$", targets, "no_fallback", parsing_timeout=None)[:1] for text in (truth, answer)
        )
        if not ours or not theirs or isinstance(ours[0], str) or isinstance(theirs[0], str):
            return False
        if isinstance(ours[0], Eq) and isinstance(theirs[0], Eq):  # one equation is a multiple of the other
            sides = [each.lhs.doit() - each.rhs.doit() for each in (ours[0], theirs[0])]
            return bool(simplify(sides[0] / sides[1]).is_number)
        return bool(verify(ours, theirs, numeric_precision=DIGITS, allow_set_relation_comp=True, timeout_seconds=None))

    def expire(*_: Any) -> None:
        raise _Expired

    signal.signal(signal.SIGPROF, expire)

    def call(item: Mapping[str, str]) -> dict[str, Any]:
        seed(0)
        signal.setitimer(signal.ITIMER_PROF, cpu_s, 1.0)  # again each second, should something swallow it
        try:
            return {"equal": is_same(read_answer(item["truth"]), read_answer(item["answer"]), ask)}
        except MemoryError:
            raise
        except _Expired:
            return {"expired": True}
        except Exception:  # what cannot be parsed or compared is not equal
            return {"equal": False}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    call({"truth": r"\frac{1}{2}", "answer": "0.5"})  # fills the parser's tables, which takes longer than an item
    return call


def load_code(**options: Any) -> Call:
    """See ``rewards.code``, which other workers need not import."""
    from rlhf_mcore.rewards.code import load_code as load

    return load(**options)


LOADERS: dict[str, Callable[..., Call]] = {"reward": load_reward, "math": load_math, "code": load_code}
