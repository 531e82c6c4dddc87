"""What every cluster of processes promises of a trace."""

import os
from typing import Any

from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from tests.contract.ray_workers import PidTracer


async def check_each_process_is_traced(cluster: Cluster, group: WorkerGroup[Any]) -> None:
    """Beside what runs there. group: two Residents, called actor."""
    processes = await group.process()
    running = group.sleeps(0.5)
    await cluster.start_trace(PidTracer)
    traces = await cluster.stop_trace()
    assert {name: int(trace) for name, trace in traces.items()} == {
        "controller": os.getpid(), "actor[rank 0]": processes[0], "actor[rank 1]": processes[1],
    }  # fmt: skip
    await running
