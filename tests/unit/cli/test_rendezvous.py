"""The rendezvous of several nodes: both find the same store, which only one address of the first node serves until nobody reads it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from rlhf_mcore.cli import rendezvous
from rlhf_mcore.cli.exit_codes import PORT_TAKEN
from rlhf_mcore.parallel.addresses import free_port, listener


def node(port: int, rank: int, nodes: int = 2) -> RendezvousHandler:
    parameters = RendezvousParameters(
        backend="bound", endpoint=f"127.0.0.1:{port}", run_id="job", min_nodes=nodes, max_nodes=nodes, rank=str(rank)
    )
    return rendezvous_handler_registry.create_handler(parameters)


def arrive(port: int, rank: int, nodes: int = 2) -> RendezvousInfo:
    return node(port, rank, nodes).next_rendezvous()


def test_one_node_opens_its_store_at_a_free_port_and_tells_which() -> None:
    rendezvous.register()
    first, second = arrive(0, 0, nodes=1), arrive(0, 0, nodes=1)
    ports = [info.bootstrap_store_info.master_port for info in (first, second)]
    assert all(ports) and ports[0] != ports[1]
    for info in (first, second):
        info.store.set("key", "value")
        assert info.store.get("key") == b"value"


def test_two_nodes_meet_in_a_store_on_one_address() -> None:
    rendezvous.register()
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.map(lambda rank: arrive(port, rank), (0, 1))
    assert [(info.rank, info.world_size) for info in (first, second)] == [(0, 2), (1, 2)]
    assert second.bootstrap_store_info.master_addr == "127.0.0.1"
    assert second.bootstrap_store_info.master_port == port
    first.store.set("key", "value")
    assert second.store.get("key") == b"value"
    tables = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    listening = [row.split()[1] for row in tables[1:] if len(row.split()) > 3 and row.split()[3] == "0A"]
    assert [entry for entry in listening if entry.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_fault_26_a_port_that_another_program_has_taken_is_told_from_other_failures() -> None:
    rendezvous.register()
    with listener("127.0.0.1") as other:
        taken = other.getsockname()[1]
        with pytest.raises(
            rendezvous.RendezvousError, match=rf"127\.0\.0\.1:{taken} \(Address already in use\)"
        ) as raised:
            arrive(taken, 0)
    assert raised.value.code == PORT_TAKEN


def test_the_first_node_keeps_its_store_until_the_others_have_passed_the_last_barrier() -> None:
    rendezvous.register()
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: node(port, rank), (0, 1))
        leaving = threads.submit(first.shutdown)
        time.sleep(0.3)
        assert not leaving.done()
        assert second.shutdown() and leaving.result(60)


def test_a_node_that_is_gone_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous.register()
    monkeypatch.setattr(rendezvous, "PASSED_S", 0.1)
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(lambda rank: node(port, rank), (0, 1))
        assert first.shutdown()
    assert node(0, 0, nodes=1).shutdown()  # alone it waits for nobody
