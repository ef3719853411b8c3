"""Prepare the process for vLLM, and keep vLLM's changes out of it."""

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

from rlhf_mcore.rollout.engine import DEBUG_VARIABLE, preserved_rng

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # another one on each machine
# Loggers whose warnings say that an engine is slower than it could be.
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
    """Set the variables that vLLM reads when it is imported. Idempotent; call it before anything imports vllm.

    The engine must live in this process, under the trainer's process group, so vLLM's own worker processes are switched
    off whatever was set. The rest are defaults that a variable of the user's overrides:

    - ``VLLM_NO_USAGE_STATS``: nothing is sent anywhere.
    - ``VLLM_LOGGING_LEVEL``: errors only, unless RLHF_MCORE_DEBUG is set. Most warnings of vLLM are about start-up choices
      that we make on purpose. ``engine_start`` keeps the others.
    - ``VLLM_CPU_OMP_THREADS_BIND=nobind``: vLLM must not pin the trainer's threads to cores; ranks share the machine.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if DEBUG_VARIABLE not in os.environ:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def ask_for_batch_invariance(nccl: tuple[int, ...]) -> None:
    """Have vLLM's kernels compute the same bits of a request in every batch. Before it is imported, in a process without a trainer.

    vLLM then sets variables of NCCL for its own communicators. NCCL before 2.29.7 (``nccl``: its version) would take them for those
    shared with the trainer as well, and hang: there nothing is asked for.
    """
    if nccl >= (2, 29, 7):
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")


def unpinned_nccl() -> AbstractContextManager[Any]:
    """Take vLLM's variables of NCCL away while communicators are made with processes that it has set none for."""
    nccl = sys.modules.get("vllm.utils.nccl")
    return nullcontext() if nccl is None else nccl.unpinned_nccl_env()


@contextmanager
def engine_start(rank: int, world_size: int, *, eager: bool) -> Iterator[list[str]]:
    """Prepare the import of vLLM and the construction of an engine, and clean up behind them.

    Yields the list that gets vLLM's warnings about kernels and communication.

    Inside: the launcher's variables that ``external_launcher`` reads are there even without torchrun; vLLM is quiet;
    with ``eager`` no function of vLLM is compiled (on a CPU its sampler would run a C++ compiler for 8 s in the first
    step). Afterwards vLLM's changes are undone: to the random number generators (it seeds all of them), the number of
    torch's threads (numba, for n-grams, sets it to the number of cores), ``torch.set_num_threads`` (it puts a function
    there that does nothing), to LOCAL_WORLD_SIZE and to LD_PRELOAD. vLLM's binding of all the process's memory to one NUMA
    node is left out: ranks are not pinned to cores either.
    """
    prepare_environment()
    launcher = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    local = {name: value for name, value in launcher.items() if name not in os.environ}
    if eager:
        local["TORCHDYNAMO_DISABLE"] = "1"  # read where torch.compile decorates, that is while modules are imported
    import torch

    spared = ("LOCAL_WORLD_SIZE", "LD_PRELOAD")
    segments = nullcontext() if eager else _plain_segments(torch)
    with _environment(local, spared), preserved_rng(), _quiet() as kept, _preserved_torch(torch), segments:
        yield kept


@contextmanager
def _plain_segments(torch: Any) -> Iterator[None]:
    """Within this block torch allocates CUDA memory that other processes can open.

    Ranks of an engine open each other's buffers of graphs, which are recorded when it starts. Those in expandable segments they
    cannot, and end (vLLM's issue 42609).
    """
    from vllm.device_allocator import alloc_conf

    settings, name = alloc_conf.current_alloc_conf(), alloc_conf.EXPANDABLE_SEGMENTS
    if not alloc_conf.conf_flag_enabled(settings, name):
        yield
        return
    torch.cuda.empty_cache()  # what is free in the trainer's segments would be given out again
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(settings, name, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(settings)


def engine_cache(environment: Mapping[str, str], engine: int | str) -> str:
    """Return the folder of vLLM's caches for one engine. Engines of one machine would write the same files at the same time."""
    root = environment.get("VLLM_CACHE_ROOT") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    return str(Path(root, f"engine-{engine}").expanduser())


@contextmanager
def caches_by_engine_rank(num_ranks: int) -> Iterator[None]:
    """Let vLLM name its caches by the rank within an engine of ``num_ranks`` ranks, while it builds and compiles the engine.

    vLLM (0.32) names them by the rank of the world. 512 ranks would store 512 copies, and a rank of another number would find none.
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
    """Give an engine's shared memory names of this job's own while it is built, and leave none behind.

    vLLM's CPU build exchanges tensor-parallel parts through named shared memory. Under ``external_launcher`` (0.32) the names are
    the same for every job of a machine: two jobs would write into each other's, and a killed one would keep the next from
    starting. The names are removed as soon as all ranks have opened them; the memory lives as long as its mappings.

    vLLM's queue between the ranks of an engine is not made: a kill would leave its 25 MiB and its sockets behind. Its
    messages go through the process group; under ``external_launcher`` a step has none.

    Names differ between machines: groups of ranks on several of them then exchange parts through the process group.
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
    """Around the construction of an engine that compiles nothing: classes of transformers stay what they are.

    vLLM runs some models by transformers' own modules (0.32: OLMo-2). To compile them it changes their class for the whole process,
    which afterwards cannot make such a model without vLLM.
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
    """Log errors only. Yields the list that gets vLLM's warnings about kernels and communication."""
    kept: list[str] = []
    if DEBUG_VARIABLE in os.environ:
        yield kept
        return
    is_enabled, call_handlers = logging.Logger.isEnabledFor, logging.Logger.callHandlers

    def is_enabled_or_kept(logger: logging.Logger, level: int) -> bool:
        return is_enabled(logger, level) or (level == logging.WARNING and logger.name.startswith(_KEPT))

    def keep(logger: logging.Logger, entry: logging.LogRecord) -> None:
        level = vars(entry)["levelno"]  # as an attribute tools/certify would take it for a name of vLLM
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
    """Remove the quantisation of the model's files from a config: they are dequantised before an engine gets any of it."""
    if hasattr(hf_config, "quantization_config"):
        del hf_config.quantization_config
    return hf_config


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank of the trainer's process group, and its size.

    Raises:
        RuntimeError: there is none.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError(
            "initialise torch.distributed before the rollout engine: vLLM joins the trainer's process group"
        )
    return dist.get_rank(), dist.get_world_size()


def preload() -> None:
    """Import vLLM as an engine on a CPU will, in a process that ranks are to be forks of."""
    with engine_start(0, 1, eager=True):
        from vllm import LLM, SamplingParams  # noqa: F401
        from vllm.v1.worker import cpu_worker  # noqa: F401
