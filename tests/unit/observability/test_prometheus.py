"""Test the Prometheus output over a socket and with Prometheus' own parser."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.prometheus import PrometheusExporter


@dataclass(frozen=True)
class State:
    name: str
    state: str
    version: int
    requests: int
    tokens: int
    failures: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def exporter(port: int) -> Iterator[PrometheusExporter]:
    with closing(PrometheusExporter(str(port), "math", 'a "b"\n')) as made:
        yield made


def scrape(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all((s.labels["project"], s.labels["experiment"]) == ("math", 'a "b"\n') for s in samples)
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for sample in samples:
        found.setdefault(sample.name, {})[tuple(v for k, v in sample.labels.items() if k == "engine")] = sample.value
    return found


def test_the_last_step_and_the_engines_of_this_moment_are_read(exporter: PrometheusExporter, port: int) -> None:
    assert scrape(port) == {}
    exporter.log(3, {"reward/mean": 0.5, "reward/share_zero/gsm8k-easy": 0.25, "note": "text", "evaluate/reward": 1})
    exporter.log(4, {"reward/mean": 0.75})
    metrics = {
        "rlhf_mcore_step": {(): 4},
        "rlhf_mcore_reward_mean": {(): 0.75},
        "rlhf_mcore_reward_share_zero_gsm8k_easy": {(): 0.25},
        "rlhf_mcore_evaluate_reward": {(): 1},
    }
    assert scrape(port) == metrics
    engines = [State("e0", "serving", 7, 12, 4096, 0), State("e1", "starting", -1, 0, 0, 2)]
    exporter.engines = lambda: engines
    assert scrape(port) == metrics | {
        "rlhf_mcore_engine_up": {("e0",): 1, ("e1",): 0},
        "rlhf_mcore_engine_version": {("e0",): 7, ("e1",): -1},
        "rlhf_mcore_engine_requests": {("e0",): 12, ("e1",): 0},
        "rlhf_mcore_engine_tokens_total": {("e0",): 4096, ("e1",): 0},
        "rlhf_mcore_engine_failures": {("e0",): 0, ("e1",): 2},
    }
    engines.pop()
    assert scrape(port)["rlhf_mcore_engine_up"] == {("e0",): 1}


def test_a_port_that_is_taken_is_told_with_its_key(exporter: PrometheusExporter, port: int) -> None:
    with pytest.raises(ConfigError, match=f"logging.prometheus={port}: Address already in use; choose another"):
        PrometheusExporter(str(port), "math", "other")


def test_the_port_is_free_after_the_run() -> None:
    port = free_port()
    PrometheusExporter(f"127.0.0.1:{port}", "math", "again").close()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
