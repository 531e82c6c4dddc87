"""A new role is one entry in the table and one worker."""

import json
import subprocess
import sys


def test_a_role_more_is_placed_checked_and_launched_by_its_entry() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.toy_role"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["places"] == [["judge/0", ["cpu:0"], None], ["judge/1", ["cpu:1"], None]]
    assert found["stages"] == [3, 3, 6], "behind the reward, before the actor"
    assert found["granule"] == 1
    assert "unknown key 'placement.juge'. Did you mean 'judge'?" in found["unknown key"]
    assert "placement.judge = '5' names device 5" in found["unknown device"]
