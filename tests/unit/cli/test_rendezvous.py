"""The store of several nodes, which only one address of the first node serves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_mcore.cli import supervisor
from rlhf_mcore.cli.supervisor import open_store
from rlhf_mcore.cli.terminal import PORT_TAKEN
from rlhf_mcore.parallel.addresses import free_port, listener


def test_one_node_opens_its_store_at_a_free_port() -> None:
    first, second = open_store("127.0.0.1", 0, 0, 1), open_store("127.0.0.1", 0, 0, 1)
    assert first.port and second.port and first.port != second.port
    for store in (first, second):
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_two_nodes_meet_in_a_store_on_one_address() -> None:
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.map(lambda rank: open_store("127.0.0.1", port, rank, 2), (0, 1))
    first.set("key", "value")
    assert second.get("key") == b"value"
    tables = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    listening = [row.split()[1] for row in tables[1:] if len(row.split()) > 3 and row.split()[3] == "0A"]
    assert [entry for entry in listening if entry.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


def test_fault_26_a_port_that_another_program_has_taken_is_told_from_other_failures(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "end_with_parent", lambda number: None)
    monkeypatch.setattr(supervisor.Supervisor, "handle_signals", lambda self: None)
    with listener("127.0.0.1") as other:
        taken = other.getsockname()[1]
        code = supervisor.main(["--ranks=1", "--nodes=2", f"--port={taken}", "json"])
    assert code == PORT_TAKEN
    assert f"the nodes cannot meet at 127.0.0.1:{taken} (Address already in use)" in (capfd.readouterr().err)
