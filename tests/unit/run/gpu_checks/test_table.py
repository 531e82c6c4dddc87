"""Rows of the GPU table, and the refusal without a GPU."""

import pytest
import torch

from interlace.core.errors import UserError
from interlace.run.gpu_checks.results import GpuResult
from interlace.run.gpu_checks.table import format_row, run_gpu_checks
from interlace.run.gpu_checks.training import _engine, _samples, _step_loss


def test_a_row_shows_its_share_of_the_limit() -> None:
    row = format_row(GpuResult(name="decode, batch 32", value=50.0, unit="tokens/s", limit=200.0))
    assert row.startswith("ok")
    assert "25.0%" in row
    assert format_row(GpuResult(name="x", value=1.0, unit="s", passed=False)).startswith("FAIL")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_machine_without_a_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="needs a CUDA device"):
        next(run_gpu_checks())


def test_the_measured_train_step_runs_on_a_cpu() -> None:
    first, second = (_step_loss(_engine("cpu", 128, 2, "float32"), _samples(4, 12, 128)) for _ in range(2))
    assert first == second
    assert first[1] > 0
