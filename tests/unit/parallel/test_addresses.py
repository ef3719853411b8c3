"""Choose ports before they are used."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_mcore.parallel import addresses
from rlhf_mcore.parallel.addresses import LOOPBACK, free_port, listener


def ephemeral_from(port: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the first port of the kernel's ephemeral range."""
    (file := directory / "ip_local_port_range").write_text(f"{port}\t60999\n")
    monkeypatch.setattr(addresses, "_EPHEMERAL_PORTS", file)


def test_fault_26_a_port_that_is_known_beforehand_is_none_of_those_that_connections_get() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    chosen = {free_port(LOOPBACK) for _ in range(20)}
    assert all(15000 <= port < first for port in chosen) and len(chosen) > 15


def test_a_port_in_use_is_not_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with listener(LOOPBACK, free_port(LOOPBACK)) as held:
        port = held.getsockname()[1]
        monkeypatch.setattr(addresses, "_LOWEST_PORT", port)
        ephemeral_from(port + 2, tmp_path, monkeypatch)
        assert {free_port(LOOPBACK) for _ in range(8)} == {port + 1}


def test_where_all_ports_are_for_connections_it_is_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ephemeral_from(1024, tmp_path, monkeypatch)
    port = free_port(LOOPBACK)
    with listener(LOOPBACK, port) as held:
        assert held.getsockname()[1] == port >= 1024
