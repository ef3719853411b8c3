"""Test verdicts on measured traffic. tests/distributed/test_doctor.py tests the measurement."""

from __future__ import annotations

from rlhf_mcore.commands.doctor.network import Traffic, judge_traffic


def test_the_slowest_link_is_named_with_its_nodes() -> None:
    traffic = Traffic(2e-5, 3e11, [4e11, 1e9, 4e11, 4e11], 0.01)
    found = {f.check: f for f in judge_traffic(traffic, "nccl", ["a", "a", "b", "b"])}
    assert found["network"].severity == "warning"
    assert found["network"].found.startswith("rank 1 on a to rank 2 on b")
    assert found["nccl, 4 ranks"].found == "all-reduce 20 us, bus 300.00 GB/s; slowest link 1.00 GB/s"
    assert found["clocks of the ranks"].severity == "ok"


def test_sockets_of_one_machine_are_not_blamed() -> None:
    traffic = Traffic(2e-4, 1e9, [1e9, 1e9], 5.0)
    found = {f.check: f.severity for f in judge_traffic(traffic, "gloo", ["a", "a"])}
    assert found == {"gloo, 2 ranks": "ok", "clocks of the ranks": "warning"}
