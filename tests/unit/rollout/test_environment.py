"""The variables that vLLM needs, and a process left as it was found."""

from __future__ import annotations

import logging
import os
import random
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RolloutConfig
from rlhf_mcore.platform.base import preserved_rng
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.vllm.environment import (
    ask_for_batch_invariance,
    caches_by_engine_rank,
    engine_start,
    prepare_environment,
    unpinned_nccl,
)
from tests.messages import expect_error

NAMES = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_NO_USAGE_STATS",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_LOGGING_LEVEL",
    "RLHF_MCORE_DEBUG",
    "VLLM_BATCH_INVARIANT",
    "NCCL_NO_CACHE",
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what the code sets is taken away again
        monkeypatch.delenv(name)


def test_the_engine_stays_in_this_process_whatever_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    prepare_environment()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"  # the user's choice
    assert (os.environ["VLLM_NO_USAGE_STATS"], os.environ["VLLM_LOGGING_LEVEL"]) == ("1", "ERROR")


def test_debugging_leaves_the_log_level_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_MCORE_DEBUG", "1")
    prepare_environment()
    assert "VLLM_LOGGING_LEVEL" not in os.environ


def test_batch_invariance_is_asked_for_where_nccl_can_keep_it_from_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask_for_batch_invariance((2, 28, 9))
    assert "VLLM_BATCH_INVARIANT" not in os.environ
    ask_for_batch_invariance((2, 29, 7))
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")  # the user's choice
    ask_for_batch_invariance((2, 30, 4))
    assert os.environ["VLLM_BATCH_INVARIANT"] == "0"


def test_communicators_with_the_trainer_are_made_without_vllms_settings_of_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.utils import nccl

    monkeypatch.setattr(nccl, "_unpinned_env", None)
    monkeypatch.setattr(nccl, "_nccl_has_no_cache", lambda: True)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setenv("NCCL_NTHREADS", "")
    monkeypatch.delenv("NCCL_NTHREADS")
    nccl.pin_nccl_env({"NCCL_PROTO": "Simple", "NCCL_NTHREADS": "1"})
    seen: list[tuple[str | None, str | None]] = []

    def join() -> None:
        seen.append((os.environ.get("NCCL_PROTO"), os.environ.get("NCCL_NTHREADS")))

    join()
    with unpinned_nccl():
        join()
    join()
    assert seen == [("Simple", "1"), ("LL", None), ("Simple", "1")]


@pytest.mark.parametrize(
    ("num_ranks", "rank_in_engine", "folder"),
    [(2, 1, "/cache/vllm/engine-2"), (8, 5, "/cache/vllm"), (16, 13, "/cache/vllm")],
)
def test_caches_are_named_by_the_rank_within_an_engine(
    num_ranks: int, rank_in_engine: int, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 13 of the world is the sixth of its machine. vLLM's folder is rank_{parallel_config.rank}_{data_parallel_index}."""
    from vllm import envs
    from vllm.v1.worker.worker_base import WorkerBase

    for name, value in {"XDG_CACHE_HOME": "/cache", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    with caches_by_engine_rank(num_ranks):
        worker = WorkerBase(MagicMock(), 5, 13, "env://", False)
        assert (worker.rank, worker.parallel_config.rank) == (13, rank_in_engine)
        assert folder == envs.VLLM_CACHE_ROOT
    assert WorkerBase(MagicMock(), 5, 13, "env://", False).parallel_config.rank == 13
    assert envs.VLLM_CACHE_ROOT == "/cache/vllm"


def test_an_engine_on_cuda_starts_without_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.device_allocator import alloc_conf

    settings: list[str] = []
    monkeypatch.setattr(alloc_conf, "set_alloc_conf", settings.append)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with pytest.raises(KeyError), engine_start(0, 1, eager=False):
        assert settings == ["max_split_size_mb:512,expandable_segments:False"]
        raise KeyError("of the start")
    assert settings[1:] == ["max_split_size_mb:512,expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    with engine_start(0, 1, eager=False):
        pass
    assert len(settings) == 2


def test_generators_go_on_as_if_nothing_had_happened() -> None:
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = draws()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    with preserved_rng():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        assert draws() != expected
    assert draws() == expected


def test_what_vllm_does_to_the_process_is_undone_even_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    set_num_threads = torch.set_num_threads
    with pytest.raises(OSError), engine_start(3, 4, eager=True):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("3", "4")
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        torch.set_num_threads = print
        raise OSError
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert "RANK" not in os.environ and "TORCHDYNAMO_DISABLE" not in os.environ
    assert torch.set_num_threads is set_num_threads


def test_warnings_about_kernels_are_kept_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with engine_start(0, 1, eager=True) as kept:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # as vLLM does while it starts
        for name, text in (("vllm.v1.attention.selector", "no\nFlashInfer"), ("vllm.renderers", "x"), ("torch", "x")):
            logging.getLogger(name).warning("%s: falling back", text)
        logging.getLogger("vllm.distributed").info("started")
    logging.getLogger("vllm.distributed").warning("in a step")
    logging.getLogger("vllm").setLevel(logging.NOTSET)
    assert kept == ["no FlashInfer: falling back"]
    assert capfd.readouterr() == ("", "")


def test_an_unknown_engine_is_named() -> None:
    with expect_error(ConfigError, field="rollout.engine", value="'sglang'", remedy="choose"):
        build_engine(
            RolloutConfig.model_construct(engine="sglang"), EngineModel("model", "tokenizer", "fp32", 8, seed=0)
        )
