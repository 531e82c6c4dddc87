"""torch's profiler traces selected steps of a run in every process of every cluster."""

import gzip
import json
from pathlib import Path

import pytest

from tests.support.training import run


def operations(path: Path) -> dict[str, int]:
    """torch operations of a trace file, by thread."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, int] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            name = names.get(event["tid"], "?")
            found[name] = found.get(name, 0) + 1
    return found


def test_workers_that_are_threads_have_a_track_each_in_one_file(tmp_path: Path) -> None:
    run(tmp_path, "run", ["schedule=areal", "logging.trace_steps=[2,3]"])
    [path] = (tmp_path / "run" / "profile" / "steps-2-3").iterdir()
    by_thread = operations(path)
    assert path.name == "controller.json.gz"
    for group in ("rollout/0", "actor/0"):
        assert any(group in thread for thread in by_thread), by_thread


def test_a_run_that_stops_within_the_traced_steps_writes_what_there_is(tmp_path: Path) -> None:
    run(tmp_path, "run", ["logging.trace_steps=[1,4]"], stop_after=1)
    assert operations(tmp_path / "run" / "profile" / "steps-1-4" / "controller.json.gz")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_every_process_of_a_ray_run_has_a_trace(tmp_path: Path) -> None:
    run(tmp_path, "run", ["schedule=areal", "cluster.backend=ray", "logging.trace_steps=[2,3]"])
    written = {path.name: path for path in (tmp_path / "run" / "profile" / "steps-2-3").iterdir()}
    processes = ("actor-0-rank-0", "controller", "reward-rank-0", "rollout-0-rank-0")
    assert sorted(written) == [f"{process}.json.gz" for process in processes]
    assert operations(written["rollout-0-rank-0.json.gz"]) and operations(written["actor-0-rank-0.json.gz"])
