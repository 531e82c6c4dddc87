"""Prometheus: the newest value of each metric at an address that a Prometheus server reads."""

import os
import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from interlace.core.errors import UserError
from interlace.observe.loggers.base import DEFAULT_PROJECT, RunInfo

PORT = "INTERLACE_PROMETHEUS_PORT"
"""Environment variable with the port; 9464 without it, and any free port for 0."""
ADDRESS = "INTERLACE_PROMETHEUS_ADDRESS"
"""Environment variable with the address to listen on; 127.0.0.1 without it."""


class Logger:
    """Logger that answers scrapes on a separate thread. A server that never reads, or reads slowly, delays nothing.

    A metric such as reward/mean is the gauge interlace_reward_mean, with the labels run and project.
    """

    def __init__(self, info: RunInfo) -> None:
        """Raises UserError if the port is not a number or is taken."""
        self._labels = {"run": info.name, "project": info.project or DEFAULT_PROJECT}
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._shown: set[str] = set()
        given, address = os.environ.get(PORT, "9464"), os.environ.get(ADDRESS, "127.0.0.1")
        if not given.isdigit() or int(given) > 65535:
            raise UserError(f"{PORT} = {given!r} is not a port: set a number from 0 to 65535.")
        try:
            self._server, self._thread = start_http_server(int(given), address, self._registry)
        except OSError as error:
            raise UserError(
                f"cannot listen on {address}:{given}: {error.strerror}. Set {PORT} to a free port."
            ) from error

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "step": step}.items():
            self._find_gauge(name).labels(**self._labels).set(float(value))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _find_gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            shown = "interlace_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            while shown in self._shown:  # a/b and a_b are two metrics
                shown += "_"
            self._shown.add(shown)
            self._gauges[name] = Gauge(shown, f"{name} of the last step", [*self._labels], registry=self._registry)
        return self._gauges[name]
