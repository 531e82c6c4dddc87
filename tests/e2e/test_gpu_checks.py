"""All GPU checks pass on this machine's CUDA device. Prints a table, and writes its rows to docs/gpu/ as JSON."""

import re
from pathlib import Path

import pytest

from interlace.run.gpu_checks.table import format_row, run_gpu_checks, write_results

ROOT = Path(__file__).parents[2]


@pytest.mark.gpu
def test_every_gpu_check_holds() -> None:
    import torch

    results = list(run_gpu_checks())
    print("\n" + "\n".join(format_row(result) for result in results))
    name = re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
    write_results(results, ROOT / "docs" / "gpu" / f"{name}.json")
    failed = [result.name for result in results if not result.passed]
    assert not failed
