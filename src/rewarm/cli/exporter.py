"""Exposes metric families through prometheus-client: as text, or on an HTTP endpoint while a verb runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import rewarm
from rewarm.errors import ConfigError, MisuseError
from rewarm.store.contract import Stats, Store
from rewarm.store.metrics import Family, Sample, store_families

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

PORT_MAX = 65535

Families = Callable[[], list[Family]]
"""Reads everything anew; called once per scrape, from the endpoint's threads."""


class StoreWatch:
    """The stores of a run, by name. A store that was closed keeps the counters it was last seen with."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._last: dict[str, Stats] = {}
        self._lock = threading.Lock()

    def add(self, name: str, store: Store) -> None:
        """Watch a store from now on, in place of an earlier one of that name."""
        with self._lock:
            self._stores[name] = store

    def families(self) -> list[Family]:
        """What all of them count now."""
        with self._lock:
            for name, store in self._stores.items():
                try:
                    self._last[name] = store.stats()
                except MisuseError:  # closed: the run goes on with another
                    continue
            return store_families(self._last)


def text_of(families: Families) -> str:
    """The families in the text format of Prometheus."""
    registry = _registry(families)
    from prometheus_client import generate_latest

    return generate_latest(registry).decode()


@contextmanager
def serve(address: str, families: Families) -> Iterator[str]:
    """Serve `/metrics` at HOST:PORT until the block ends; yields the URL. Raises `ConfigError` for the address."""
    registry = _registry(families)
    from prometheus_client import start_http_server

    host, port = parse_address(address)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def served(address: str | None, families: Families, note: Callable[[str], None]) -> AbstractContextManager[None]:
    """`serve` where an address is given, told by `note`; nothing where none is."""

    @contextmanager
    def run() -> Iterator[None]:
        if address is None:
            yield
            return
        with serve(address, families) as url:
            note(f"metrics at {url}")
            yield

    return run()


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT`, `[::1]:PORT`, `:PORT` or `PORT`; without a host this machine alone can ask."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > PORT_MAX:
        raise ConfigError(f"cannot read {text!r} as HOST:PORT; write for example 127.0.0.1:9808 or 0.0.0.0:9808")
    return host.strip("[]") or "127.0.0.1", int(port)


def _registry(families: Families) -> CollectorRegistry:
    """A registry with our families alone. Raises `ConfigError` where prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.registry import Collector
    except ImportError:
        raise ConfigError("metrics need prometheus-client; install it with: pip install 'rewarm[metrics]'") from None

    class Ours(Collector):
        """Our families, read anew for each scrape."""

        def collect(self) -> Iterator[Metric]:
            """Called by the client library."""
            build = Family("rewarm_build_info", "gauge", "Always 1; the label says which version runs.", _VERSION)
            yield from map(_metric, [build, *families()])

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Ours())
    return registry


_VERSION = [Sample({"version": rewarm.__version__}, 1)]


def _metric(family: Family) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels: Mapping[str, str] = family.samples[0].labels if family.samples else {}
    make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = make(family.name, family.help, labels=list(labels))
    for sample in family.samples:
        metric.add_metric(list(sample.labels.values()), sample.value)
    return metric
