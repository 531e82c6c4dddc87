"""Engine servers: unsuitable servers are refused, and failures during training lose no sample."""

import os
import signal
import time
from pathlib import Path

from tests.faults.lab import Fault, Lab
from tests.support.processes import descendants


def no_server_at_an_address(lab: Lab) -> None:
    lab.train("rollout={engine: address, urls: [http://127.0.0.1:9]}").refused("http://127.0.0.1:9", "Start it")


def no_address(lab: Lab) -> None:
    lab.train("rollout=address").refused("rollout.urls")


def an_unknown_dialect(lab: Lab) -> None:
    given = "rollout={engine: address, urls: [http://127.0.0.1:9], dialect: vlm}"
    lab.train(given).refused("Did you mean 'vllm'")


def a_key_that_is_not_set(lab: Lab) -> None:
    given = "rollout={engine: address, urls: [http://127.0.0.1:9], key_env: NO_SUCH_KEY}"
    lab.train(given).refused("NO_SUCH_KEY")


def a_library_that_is_not_installed(lab: Lab) -> None:
    lab.train("rollout=sglang", "cluster.devices=cpu:2").refused("GPUs")


def a_server_that_is_killed(lab: Lab) -> None:
    """The run waits for its only server, ends well, and no server outlives it."""
    settings = ("steps=12", "warmup=null", "rollout=interlace", "cluster.devices=cpu:1")
    with lab.start("train", "quickstart", "--name", "x", *lab.small, *settings) as process:
        servers: list[int] = []
        metrics = lab.folder / "runs/x/metrics.jsonl"  # created before the servers start, filled by the first step
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        for pid in descendants(process.pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"serve" in command and b"guard" not in command:
                servers.append(pid)
        assert servers, "the run started no server"
        os.kill(servers[0], signal.SIGKILL)
        text = process.communicate(timeout=200)[0]
    assert process.returncode == 0, text[-600:]
    rows = (lab.folder / "runs/x/metrics.jsonl").read_text().splitlines()
    assert len(rows) == 12, "steps are missing"
    assert "is lost" in text and "is back" in text, text[-600:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in servers), "a server outlived the run"


FAULTS = [
    Fault(name="an address without a server", check=no_server_at_an_address),
    Fault(name="no address", check=no_address),
    Fault(name="a dialect that does not exist", check=an_unknown_dialect),
    Fault(name="a key variable that is not set", check=a_key_that_is_not_set),
    Fault(name="an engine whose library is missing", check=a_library_that_is_not_installed),
    Fault(name="kill -9 of a server that the run started", check=a_server_that_is_killed),
]
