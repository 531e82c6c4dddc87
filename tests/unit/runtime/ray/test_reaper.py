"""A command that joined a Ray and was killed leaves no shared memory."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from tests.support.processes import all_gone, handles, running

pytestmark = pytest.mark.ray
DRIVER = """
import signal
from interlace.runtime.process.shared import make_shared_folder
from interlace.runtime.ray.session import OwnParts

folder, parts = make_shared_folder(), OwnParts(is_started=False)
print(folder.path, flush=True)
signal.pause()
"""


def test_a_killed_command_that_joined_a_ray_leaves_no_shared_memory() -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        folder = Path(driver.stdout.readline().strip())
        reapers = handles(running(driver.pid, "reaper.py"))
        assert folder.is_dir() and len(reapers) == 1
        driver.send_signal(signal.SIGKILL)
        assert all_gone(reapers, 30.0)
        assert not folder.exists()
