"""Settings that every tier needs before anything heavy is imported; tiers and shards."""

import gc
import os
from collections.abc import Iterator

import pytest

from tests import costs, one_failure, tiers

# Test processes share the cores. One compute thread each also makes sums come out the same on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As ranks on a CPU have it (rlhf_mcore/platform/cpu_libraries.py); read by MKL at the first product of a process.
os.environ.setdefault("MKL_CBWR", "AUTO")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Models are made by the tests; a test that asks the hub for one has a mistake in it.
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
    """Imports fill memory with objects that live to the end; the garbage collector need not look at them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
