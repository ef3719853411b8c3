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
_OF_ENGINES: tuple[tuple[str, Any, str, Callable[[EngineStatus], float]], ...] = (
    ("up", GaugeMetricFamily, "1: the engine generates", lambda engine: engine.state == "serving"),
    ("version", GaugeMetricFamily, "policy version of an engine's weights; -1: none", lambda engine: engine.version),
    ("requests", GaugeMetricFamily, "responses in flight in an engine", lambda engine: engine.requests),
    ("tokens", CounterMetricFamily, "tokens that an engine has sampled", lambda engine: engine.tokens),
    ("failures", GaugeMetricFamily, "consecutive failures of an engine", lambda engine: engine.failures),
)


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
        for name, kind, meaning, value_of in _OF_ENGINES if engines else ():
            engine_family = kind(f"{PREFIX}engine_{name}", meaning, labels=[*names, "engine"])
            for engine in engines:
                engine_family.add_metric([*values, engine.name], float(value_of(engine)))
            yield engine_family


def metric_name(name: str) -> str:
    """Return the Prometheus name of a metric: ``reward/mean`` becomes ``rlhf_mcore_reward_mean``."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
