"""A worker process: it calls what must not run in the trainer, one item at a time, and sends back an answer to each.

Started by ``rlhf_mcore.rewards.process``. Apart from what it is told to load, it imports a few small modules and nothing heavy.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_processes import end_with_parent
from rlhf_mcore.rewards.frames import DISCONNECTED, decode, encode

_RECEIVE_BYTES = 2**16

# Takes an item, returns the answer to it: {"score", "parts"}, or {"error": what is wrong}.
Call = Callable[[Any], "dict[str, Any]"]

# By the names that pools use: a function that takes options and returns a ``Call``. Raises ConfigError.
LOADERS = {
    "reward": "rlhf_mcore.rewards.user_function:load_reward",
    "math": "rlhf_mcore.rewards.symbolic:load_math",
    "code": "rlhf_mcore.rewards.code:load_code",
}


def main(descriptor: int) -> None:
    """Serve the pool at the other end of a socket until it is closed.

    The first message has what to load (``{"load", "options", "memory_bytes"}``); it is answered by ``{"ready": true}`` or
    ``{"problem": text}``. Every later one is an item, which is answered; null, by ``{"batched"}``: whether a batch is an item.
    ``{"lost": cause}`` instead of an answer means that the worker ends.
    """
    end_with(descriptor)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # programs that a function starts do not get it
    messages = messages_of(connection)
    order = next(messages)
    limit_memory(order["memory_bytes"])
    sys.path.append(os.getcwd())  # where the trainer finds modules of the user's, too; last, so that it hides nothing
    try:
        module, _, name = LOADERS[order["load"]].partition(":")
        call = getattr(import_module(module), name)(**order["options"])
    except ConfigError as error:
        connection.sendall(encode({"problem": str(error)}))
        return
    connection.sendall(encode({"ready": True}))
    directory, process = os.getcwd(), os.getpid()
    for item in messages:
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
        answer = {"batched": getattr(call, "batched", False)} if item is None else call(item)
    except MemoryError:
        answer = {"lost": "ran out of memory"}
    if os.getpid() != process:  # the function has forked, and this is the child, which answers nothing
        os._exit(0)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced it
            stream.flush()
    return answer


def messages_of(connection: socket.socket) -> Iterator[Any]:
    """Yield what the pool sends, until it closes the connection."""
    buffer = bytearray()
    while data := connection.recv(_RECEIVE_BYTES):
        buffer += data
        yield from decode(buffer)


def end_with(descriptor: int) -> None:
    """End this process group with the trainer, whatever the function is doing and whatever it has started.

    The kernel ends this process with the thread that has started it. Its children are ended by a second process, which waits
    until the trainer's end of the socket is closed.
    """
    end_with_parent(signal.SIGKILL)
    if os.fork() == 0:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        closed = select.poll()
        closed.register(descriptor, select.POLLRDHUP)
        closed.poll()
        os.killpg(0, signal.SIGKILL)


def limit_memory(memory_bytes: int) -> None:
    """Have allocations of this process, and of each that it starts, fail beyond ``memory_bytes``."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of the data, not of the address space: libraries reserve much of that and use little.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
