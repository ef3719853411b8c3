"""The variables that torchrun sets, missing or wrong under a torchrun of the user's own."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlhf_mcore.cli.rank import connect, torchrun_world_size
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.parallel.addresses import listener
from tests.messages import expect_error

GOOD = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_process_of_torchrun_knows_its_world_and_others_have_none() -> None:
    assert torchrun_world_size(GOOD) == 2
    assert torchrun_world_size({"WORLD_SIZE": "2", "PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_ADDR": None}, "RANK=1 is set, .* but MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"WORLD_SIZE": "1"}, "RANK=1 and LOCAL_RANK=1 must be between 0 and WORLD_SIZE=1 - 1"),
        ({"RANK": "-1"}, "RANK=-1"),
    ],
)
def test_each_variable_is_named_with_its_value(changes: dict[str, str | None], words: str) -> None:
    environment = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        torchrun_world_size(environment)


def test_a_port_in_use_and_processes_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = listener("127.0.0.1")
    taken = held.getsockname()[1]
    for name, value in {**GOOD, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(taken)}.items():
        monkeypatch.setenv(name, value)
    with held, pytest.raises(ConfigError, match=f"MASTER_ADDR=127.0.0.1 MASTER_PORT={taken} .*in use"):
        connect("gloo", timedelta(seconds=1))
    with expect_error(ConfigError, field="WORLD_SIZE", value=("rank 0", 2)):
        connect("gloo", timedelta(seconds=1))


def test_a_process_alone_opens_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's: another program may have any port."""
    with listener("127.0.0.1") as held:
        changes = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(held.getsockname()[1])}
        for name, value in {**GOOD, **changes}.items():
            monkeypatch.setenv(name, value)
        connect("gloo", timedelta(seconds=5))
        try:
            total = torch.ones(2)
            dist.all_reduce(total, group=dist.new_group([0]))
            assert total.tolist() == [1.0, 1.0]
        finally:
            dist.destroy_process_group()


def test_a_host_that_is_not_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**GOOD, "MASTER_ADDR": "no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=no-such-host\.invalid"):
        connect("gloo", timedelta(seconds=1))
