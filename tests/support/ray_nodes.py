"""A Ray cluster of one node that outlives the commands that join it."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
print(nodes.address, flush=True)
sys.stdin.read()
nodes.shutdown()
"""


@contextmanager
def ray_node() -> Iterator[dict[str, str]]:
    """Starts a Ray of two cores. Yields the variables of processes that join it; RAY_ADDRESS is its address."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    command = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(
        command, env={**os.environ, **token}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as cluster:
        assert cluster.stdout is not None
        try:
            yield {**token, "RAY_ADDRESS": cluster.stdout.readline().strip()}
        finally:
            cluster.communicate()
