"""Serves a run to Prometheus: the metrics of the last step, and the current state of its engines. On the first rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.metrics.catalogue import find_metric

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.fleet_state import EngineStatus

PREFIX = "rlhf_mcore_"


class PrometheusExporter(Collector):
    """Answers ``GET /metrics`` in a thread. It is a tracker, and serves the last logged metrics."""

    def __init__(self, address: str, project: str, experiment: str) -> None:
        """Listen on ``address``: host:port, or a port on the loopback interface.

        Raises:
            ConfigError: the address cannot be used.
        """
        self._labels = {"project": project, "experiment": experiment}
        self._metrics: dict[str, float] = {}
        self.engines: Callable[[], Sequence[EngineStatus]] = list  # called at every scrape
        host, _, port = address.rpartition(":")
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(int(port), host or "127.0.0.1", registry)
        except OSError as error:
            raise ConfigError(
                f"logging.prometheus={address}: {error.strerror or error}; choose another address"
            ) from error

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Store the metrics of a step. Metrics that it lacks keep their earlier values."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        self._metrics = {**self._metrics, "step": float(step), **numbers}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for a scrape."""
        names, values = list(self._labels), list(self._labels.values())
        for name, value in self._metrics.items():
            known = find_metric(name)
            family = GaugeMetricFamily(metric_name(name), "" if known is None else known.meaning, labels=names)
            family.add_metric(values, value)
            yield family
        engines = self.engines()
        if not engines:
            return
        labels = [*names, "engine"]
        up = GaugeMetricFamily(f"{PREFIX}engine_up", "1: the engine generates", labels=labels)
        version = GaugeMetricFamily(
            f"{PREFIX}engine_version", "policy version of an engine's weights; -1: none", labels=labels
        )
        requests = GaugeMetricFamily(f"{PREFIX}engine_requests", "responses in flight in an engine", labels=labels)
        tokens = CounterMetricFamily(f"{PREFIX}engine_tokens", "tokens that an engine has sampled", labels=labels)
        failures = GaugeMetricFamily(f"{PREFIX}engine_failures", "consecutive failures of an engine", labels=labels)
        for engine in engines:
            of = [*values, engine.name]
            up.add_metric(of, float(engine.state == "serving"))
            version.add_metric(of, engine.version)
            requests.add_metric(of, engine.requests)
            tokens.add_metric(of, engine.tokens)
            failures.add_metric(of, engine.failures)
        yield from (up, version, requests, tokens, failures)


def metric_name(name: str) -> str:
    """Return the Prometheus name of a metric: ``reward/mean`` becomes ``rlhf_mcore_reward_mean``."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
