"""A trace of steps prints no error line of torch's profiler, and every other line."""

import os
import subprocess
import sys

import pytest

from interlace.run.step_trace import leave_out_of_stderr

PROGRAM = "import torch; from interlace.run.step_trace import TorchTracer; assert TorchTracer().stop()"


def test_the_first_trace_of_a_process_prints_nothing() -> None:
    """The profiler starts on another thread than the one that imported torch."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stderr == ""


LOST = """
import os
from interlace.run.step_trace import leave_out_of_stderr
reading, writing = os.pipe()
os.dup2(writing, 2)
os.close(reading)
os.close(writing)
expected = os.fstat(2).st_ino
with leave_out_of_stderr(b"ERROR"):
    for _ in range(9999):
        os.write(2, b"a line that nothing reads\\n")
assert os.fstat(2).st_ino == expected
"""


def test_a_standard_error_that_nothing_reads_ends_no_trace() -> None:
    """The thread that copies the lines ended and closed the descriptor that the block restores."""
    subprocess.run([sys.executable, "-c", LOST], check=True)


def test_other_lines_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with leave_out_of_stderr(b"ERROR: mine"):
        os.write(2, b"ERROR: mine, 1\nother\nno end")
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'\\nof a process\\n')"], check=True)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "other\nno end\nof a process\nafter\n"
