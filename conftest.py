"""Settings that every tier needs before anything heavy is imported; tiers and shards."""

import gc
import os
from collections.abc import Iterator

import pytest

from tests import costs, one_failure, tiers

# Test processes share the cores. One compute thread per process also gives the same sums on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The setting of ranks on a CPU (rlhf_mcore/platform/cpu_libraries.py). MKL reads it at the first product of a process.
os.environ.setdefault("MKL_CBWR", "AUTO")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests build their models. A test that requests a model from the Hub is wrong.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    tiers.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(one_failure)  # hooks of a conftest.py are not called for fixtures of scope session
    config.pluginmanager.register(costs)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.select(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze the objects of imports, which live until the end, so that the garbage collector does not scan them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
