"""A command that joined a Ray and was killed leaves no shared memory."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from interlace.core.processes import read_stat
from tests.support.engine_servers import wait_until
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


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_killed_command_that_joined_a_ray_leaves_no_shared_memory(is_stopped: bool) -> None:
    """is_stopped: a signal has stopped the reaper."""
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        try:
            folder = Path(driver.stdout.readline().strip())
            wait_until(
                lambda: len(running(driver.pid, "reaper.py")) == 1
            )  # until then it has the driver's command line
            [reaper] = running(driver.pid, "reaper.py")
            reapers = handles([reaper])
            assert folder.is_dir()
            if is_stopped:
                wait_until(lambda: read_stat(reaper)[0] == "S")  # it waits for the end of the driver
                signal.pidfd_send_signal(reapers[0], signal.SIGSTOP)
        finally:
            driver.kill()
        assert all_gone(reapers, 30.0)
        assert not folder.exists()
