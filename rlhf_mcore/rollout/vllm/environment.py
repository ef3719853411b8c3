"""Prepare the process for vLLM, and limit vLLM's side effects."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from rlhf_mcore.platform.base import preserved_rng
from rlhf_mcore.rollout.engine import DEBUG_VARIABLE

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # differs between machines
# Loggers whose warnings mean that an engine is slower than possible.
_KEPT = tuple(
    f"vllm.{name}"
    for name in (
        "compilation",
        "distributed",
        "kernels",
        "model_executor.layers",
        "platforms.cuda",
        "v1.attention",
        "v1.core",
        "v1.sample",
        "v1.worker.gpu",
    )
)
_MAX_KEPT = 50


def prepare_environment() -> None:
    """Set the variables that vLLM reads when it is imported. Idempotent. Call it before anything imports vllm.

    The engine must run in this process, in the trainer's process group, so vLLM's own worker processes are always disabled.
    The other variables are defaults, which the user's environment overrides:

    - ``VLLM_NO_USAGE_STATS``: send no usage statistics.
    - ``VLLM_LOGGING_LEVEL``: errors only, unless RLHF_MCORE_DEBUG is set. Most vLLM warnings are about start-up choices that
    are
      intended here. ``engine_start`` keeps the other warnings.
    - ``VLLM_CPU_OMP_THREADS_BIND=nobind``: vLLM must not pin the trainer's threads to cores, because ranks share the machine.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if DEBUG_VARIABLE not in os.environ:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def ask_for_batch_invariance(nccl: tuple[int, ...]) -> None:
    """Make vLLM's kernels compute the same bits for a request in every batch.

    Call this before importing vLLM, in a process without a trainer. vLLM then sets NCCL variables for its own communicators.
    NCCL before 2.29.7 (``nccl`` is its version) would also apply them to communicators shared with the trainer, and hang.
    Older versions therefore do not get this setting.
    """
    if nccl >= (2, 29, 7):
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")


def unpinned_nccl() -> AbstractContextManager[Any]:
    """Remove vLLM's NCCL variables while communicators are created with processes that do not set them."""
    nccl = sys.modules.get("vllm.utils.nccl")
    return nullcontext() if nccl is None else nccl.unpinned_nccl_env()


@contextmanager
def engine_start(rank: int, world_size: int, *, eager: bool) -> Iterator[list[str]]:
    """Prepare the import of vLLM and the construction of an engine, and undo vLLM's side effects afterwards.

    Yield the list that receives vLLM's warnings about kernels and communication.

    Inside the block, the launcher variables that ``external_launcher`` reads are set even without torchrun, and vLLM logs
    errors only. With ``eager``, vLLM compiles no function (on a CPU its sampler would otherwise run a C++ compiler for 8 s in
    the first step).

    Afterwards these are restored: the random number generators (vLLM seeds all of them), the number of torch threads (numba,
    for n-grams, sets it to the number of cores), ``torch.set_num_threads`` (vLLM replaces it by a function that does
    nothing), LOCAL_WORLD_SIZE and LD_PRELOAD. vLLM does not bind the memory of the process to one NUMA node, because ranks
    are not pinned either.
    """
    prepare_environment()
    launcher = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    local = {name: value for name, value in launcher.items() if name not in os.environ}
    if eager:
        # torch.compile reads it when it decorates, which is while modules are imported.
        local["TORCHDYNAMO_DISABLE"] = "1"
    import torch

    spared = ("LOCAL_WORLD_SIZE", "LD_PRELOAD")
    segments = nullcontext() if eager else _plain_segments(torch)
    with _environment(local, spared), preserved_rng(), _quiet() as kept, _preserved_torch(torch), segments:
        yield kept


@contextmanager
def _plain_segments(torch: Any) -> Iterator[None]:
    """Within this block, torch allocates CUDA memory that other processes can open.

    The ranks of an engine open each other's CUDA graph buffers, which are recorded when it starts. They cannot open buffers
    in expandable segments, and crash (vLLM issue 42609).
    """
    from vllm.device_allocator import alloc_conf

    settings, name = alloc_conf.current_alloc_conf(), alloc_conf.EXPANDABLE_SEGMENTS
    if not alloc_conf.conf_flag_enabled(settings, name):
        yield
        return
    torch.cuda.empty_cache()  # otherwise torch would reuse free memory in the trainer's segments
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(settings, name, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(settings)


def engine_cache(environment: Mapping[str, str], engine: int | str) -> str:
    """Return the directory of vLLM's caches for one engine. Engines on one machine must not write the same files concurrently."""
    root = environment.get("VLLM_CACHE_ROOT") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    return str(Path(root, f"engine-{engine}").expanduser())


@contextmanager
def caches_by_engine_rank(num_ranks: int) -> Iterator[None]:
    """Make vLLM name its caches by the rank within an engine of ``num_ranks`` ranks, while it builds and compiles the engine.

    vLLM 0.32 names them by the global rank. 512 ranks would store 512 copies, and a rank with another number would not find
    them.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    usual = WorkerBase.__init__

    def init(worker: Any, *args: Any, **kwargs: Any) -> None:
        usual(worker, *args, **kwargs)
        worker.parallel_config.rank %= num_ranks

    own = {}
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > num_ranks:
        own["VLLM_CACHE_ROOT"] = engine_cache(os.environ, int(os.environ["LOCAL_RANK"]) // num_ranks)
    with mock.patch.object(WorkerBase, "__init__", init), _environment(own, ()):
        yield


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """Give an engine's shared memory names that are unique to this job while it is built, and leave no files in /dev/shm.

    vLLM's CPU build exchanges tensor-parallel parts through named shared memory. Under ``external_launcher`` (0.32) the names
    are the same for every job on a machine. Two jobs would write into each other's memory, and a killed job would prevent the
    next start. The names are removed when all ranks have opened them. The memory exists until it is unmapped.

    vLLM's queue between the ranks of an engine is not created, because a kill would leave its 25 MiB and its sockets. Its
    messages use the process group instead. Under ``external_launcher`` a step sends no such messages.

    Names differ between machines. Groups of ranks on several machines therefore exchange parts through the process group.
    """
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    token = torch.tensor([secrets.randbits(62)])
    dist.broadcast(token, 0)
    original = _CPUSHMDistributed.make_group_name
    machine = _BOOT_ID.read_text(encoding="ascii").partition("-")[0]
    segments: list[Path] = []

    def make_group_name(communicator: Any) -> str:
        name = f"rlhf_mcore-{int(token):x}-{machine}-{original(communicator).strip('/-')}"
        segments.append(Path("/dev/shm", f"{name}_{communicator.rank}"))
        return name

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
    create_queue = MessageQueue.create_from_process_group
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)
        MessageQueue.create_from_process_group = staticmethod(create_queue)
        for segment in segments:
            segment.unlink(missing_ok=True)


@contextmanager
def unchanged_classes() -> Iterator[None]:
    """Keep transformers' classes unchanged during the construction of an engine that compiles nothing.

    vLLM runs some models through transformers' own modules (0.32: OLMo-2). To compile them, it changes their class for the
    whole process. Afterwards the process cannot build such a model without vLLM.
    """
    from vllm.model_executor.models.transformers.base import Base

    with mock.patch.object(Base, "_decorate_for_torch_compile", lambda model: None):
        yield


@contextmanager
def _preserved_torch(torch: Any) -> Iterator[None]:
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    torch.ops._C.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        del torch.ops._C.init_cpu_memory_env


@contextmanager
def _environment(values: dict[str, str], keep: tuple[str, ...]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*values, *keep)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """Log errors only. Yield the list that receives vLLM's warnings about kernels and communication."""
    kept: list[str] = []
    if DEBUG_VARIABLE in os.environ:
        yield kept
        return
    is_enabled, call_handlers = logging.Logger.isEnabledFor, logging.Logger.callHandlers

    def is_enabled_or_kept(logger: logging.Logger, level: int) -> bool:
        return is_enabled(logger, level) or (level == logging.WARNING and logger.name.startswith(_KEPT))

    def keep(logger: logging.Logger, entry: logging.LogRecord) -> None:
        level = vars(entry)["levelno"]  # tools/certify would take an attribute access for a vLLM name
        if level > logging.WARNING:
            call_handlers(logger, entry)
        elif level == logging.WARNING and logger.name.startswith(_KEPT) and len(kept) < _MAX_KEPT:
            kept.append(" ".join(entry.getMessage().split()))

    with (
        mock.patch.object(logging.Logger, "isEnabledFor", is_enabled_or_kept),
        mock.patch.object(logging.Logger, "callHandlers", keep),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield kept


def remove_quantisation(hf_config: Any) -> Any:
    """Remove the quantisation of the model's files from a config, because an engine gets dequantised weights."""
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    return hf_config


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank in the trainer's process group, and the size of the group.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError(
            "initialise torch.distributed before the rollout engine: vLLM joins the trainer's process group"
        )
    return dist.get_rank(), dist.get_world_size()


def preload() -> None:
    """Import vLLM as a CPU engine will, in a process from which ranks are forked."""
    with engine_start(0, 1, eager=True):
        from vllm import LLM, SamplingParams  # noqa: F401
        from vllm.v1.worker import cpu_worker  # noqa: F401
