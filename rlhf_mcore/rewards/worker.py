"""A worker process. It runs code that must not run in the trainer, one item at a time, and answers each item.

``rlhf_mcore.own_processes.WorkerProcess`` starts it. Apart from the requested function, it imports a few small modules only.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_processes import DISCONNECTED, encode, end_group_with, limit_memory, receive_messages

# Takes an item and returns its answer: {"score", "parts"}, or {"error": cause}.
Call = Callable[[Any], "dict[str, Any]"]

# By pool kind: a function that takes options and returns a ``Call``. It may raise ConfigError.
LOADERS = {
    "reward": "rlhf_mcore.rewards.user_function:load_reward",
    "math": "rlhf_mcore.rewards.mathematics:load_math",
    "code": "rlhf_mcore.rewards.code:load_code",
}


def main(descriptor: int) -> None:
    """Serve the pool at the other end of a socket until the socket is closed.

    The first message names the function to load (``{"load", "options", "memory_bytes"}``). The reply is ``{"ready": true}`` or
    ``{"problem": text}``. Every later message is an item, and gets an answer. The answer to null is ``{"batched"}``, which says
    whether an item is a batch. The answer ``{"lost": cause}`` means that the worker ends.
    """
    end_group_with(descriptor)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # programs that a function starts must not inherit it
    messages = receive_messages(connection)
    order = next(messages)
    limit_memory(order["memory_bytes"])
    sys.path.append(os.getcwd())  # the trainer finds the user's modules there; last, so that they hide nothing
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
    if os.getpid() != process:  # the function has forked, and this is the child process, which must not answer
        os._exit(0)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the function may have closed or replaced the stream
            stream.flush()
    return answer
