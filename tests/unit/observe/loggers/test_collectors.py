"""Prometheus and OpenTelemetry get all metrics, and a collector that hangs or has died changes no step."""

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.observe.loggers import open_loggers
from interlace.observe.loggers.base import RunInfo

STEPS = 50


def info(folder: Path) -> RunInfo:
    return RunInfo(name="run", folder=folder, config={}, project="mine")


def log_steps(folder: Path, logger: str) -> tuple[list[str], float]:
    """Returns the sentences to the user, and the seconds of all steps."""
    told: list[str] = []
    with open_loggers(info(folder), [logger], say=told.append) as loggers:
        began_s = time.monotonic()
        for step in range(1, STEPS + 1):
            loggers.log(step, {"reward/mean": step / 10, "actor/kl": 0.5})
        seconds = time.monotonic() - began_s
    return told, seconds


def steps_of(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_prometheus_reads_the_newest_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is in the extra prometheus")
    from interlace.observe.loggers.prometheus import PORT, Logger

    monkeypatch.setenv(PORT, "0")
    logger = Logger(info(tmp_path))
    try:
        for step in (1, 2):
            logger.log(step, {"reward/mean": step / 10, "reward_mean": 7.0})
        with urllib.request.urlopen(f"http://127.0.0.1:{logger.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    finally:
        logger.close()
    assert 'interlace_reward_mean{project="mine",run="run"} 0.2' in lines
    assert 'interlace_reward_mean_{project="mine",run="run"} 7.0' in lines, "another metric of the same letters"
    assert 'interlace_step{project="mine",run="run"} 2.0' in lines


def test_a_taken_port_and_a_wrong_one_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is in the extra prometheus")
    from interlace.observe.loggers.prometheus import PORT

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for value, sentence in ((str(taken.getsockname()[1]), "Set INTERLACE_PROMETHEUS_PORT"), ("x", "is not a port")):
            monkeypatch.setenv(PORT, value)
            with pytest.raises(UserError, match=sentence):
                open_loggers(info(tmp_path), ["prometheus"])


def test_a_scraper_that_never_reads_its_answer_delays_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is in the extra prometheus")
    from interlace.observe.loggers.prometheus import PORT

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv(PORT, str(port))
    hung = []

    def hang() -> None:
        hung.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        hung[-1].sendall(b"GET /metrics HTTP/1.1\r\n")  # an incomplete request

    with open_loggers(info(tmp_path), ["prometheus"]) as loggers:
        hang()
        began_s = time.monotonic()
        for step in range(1, STEPS + 1):
            loggers.log(step, {"reward/mean": 1.0})
        assert time.monotonic() - began_s < 1.0
        hung[0].close()
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Serves OTLP over HTTP: yields the address and the received bodies."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_opentelemetry_gets_each_metric_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the SDK is in the extra opentelemetry")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    with collector() as (address, bodies):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        told, _ = log_steps(tmp_path, "opentelemetry")
    assert told == []
    request = ExportMetricsServiceRequest.FromString(bodies[-1])
    [resource] = request.resource_metrics
    assert ("service.name", "mine") in [(each.key, each.value.string_value) for each in resource.resource.attributes]
    values = {
        metric.name: metric.gauge.data_points[0].as_double
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert values == {"interlace.reward.mean": 5.0, "interlace.actor.kl": 0.5, "interlace.step": 50.0}


@pytest.mark.parametrize("kind", ["hangs", "died"])
def test_a_collector_that_hangs_or_has_died_changes_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the SDK is in the extra opentelemetry")
    from interlace.observe.loggers import opentelemetry

    monkeypatch.setattr(opentelemetry, "EVERY_MS", 20)
    monkeypatch.setattr(opentelemetry, "TIMEOUT_S", 1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if kind == "hangs":
            silent.listen()  # it accepts connections and never answers
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        _, seconds = log_steps(tmp_path, "opentelemetry")
        assert seconds < 1.0, "no step waits for the collector"
        assert time.monotonic() - began_s < 30.0, "the end of the run waits a limited time"
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
