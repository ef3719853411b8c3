"""Asynchronous scheduling, which vLLM uses on GPUs and switches off on a CPU: a pass begins before the one before it has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch


class _Done:
    """A stream or an event of CUDA whose work is done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _stream: Any) -> None: ...

    def record(self, _stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def scheduled_ahead() -> Iterator[None]:
    """Engines that are built and used within this block begin a pass ahead."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_schedule_ahead(_class: type, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    streams = {"Stream": _Done, "Event": _Done, "stream": lambda _: nullcontext(), "current_stream": _Done}
    with (
        patch.object(CpuPlatform, "check_and_update_config", classmethod(check_and_schedule_ahead)),
        patch.multiple(torch.cuda, **streams),
    ):
        yield
