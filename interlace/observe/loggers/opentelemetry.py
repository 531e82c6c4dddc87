"""OpenTelemetry: metrics by OTLP over HTTP to the collector that the OTEL_EXPORTER_OTLP_* variables name."""

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from interlace.observe.loggers.base import DEFAULT_PROJECT, RunInfo, make_plain_name

TIMEOUT_S = 5
"""Time limit of one export, and of the last one when the run ends."""
EVERY_MS = 5000
"""Milliseconds between two exports."""


class Logger:
    """Logger that sets one gauge per metric, named interlace.reward.mean for reward/mean.

    A thread of the SDK exports the newest values, so a collector that hangs, refuses or has died delays no step.
    """

    def __init__(self, info: RunInfo) -> None:
        resource = Resource.create(
            {"service.name": info.project or DEFAULT_PROJECT, "service.instance.id": info.run_id or info.name}
        )
        exporter = OTLPMetricExporter(timeout=TIMEOUT_S)
        reader = PeriodicExportingMetricReader(
            exporter, export_interval_millis=EVERY_MS, export_timeout_millis=1000 * TIMEOUT_S
        )
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter: Meter = self._provider.get_meter("interlace")
        self._gauges = {}  # type: ignore[var-annotated] # the SDK's gauge has no public type in all versions
        self._labels = {"interlace.run": info.name}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "step": step}.items():
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge("interlace." + make_plain_name(name).replace("/", "."))
            self._gauges[name].set(float(value), self._labels)

    def close(self) -> None:
        self._provider.shutdown(timeout_millis=1000 * TIMEOUT_S)
