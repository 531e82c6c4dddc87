"""Runs all GPU checks, prints them as one table and writes JSON."""

import gc
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from interlace.core.errors import UserError
from interlace.run.gpu_checks.device import check_device, measure_device
from interlace.run.gpu_checks.results import DeviceSpeed, GpuResult
from interlace.run.gpu_checks.rollout import check_rollout
from interlace.run.gpu_checks.training import check_training
from interlace.run.gpu_checks.transfer import check_transfer

CHECKS: Sequence[Callable[[DeviceSpeed], Iterator[GpuResult]]] = (
    check_device,
    check_rollout,
    check_training,
    check_transfer,
)


def run_gpu_checks() -> Iterator[GpuResult]:
    """Runs the checks one after another. A check that raises becomes a failed row. Raises UserError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("interlace doctor --gpu needs a CUDA device, and torch finds none on this machine.")
    speed = measure_device()
    for check in CHECKS:
        gc.collect()  # the models of the check before are cycles of references
        torch.cuda.empty_cache()
        try:
            yield from check(speed)
        except Exception as error:  # noqa: BLE001 - the other checks still run, and the row shows the error
            last = traceback.extract_tb(error.__traceback__)[-1]
            note = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
            yield GpuResult(name=check.__name__, value=float("nan"), unit="", passed=False, note=note)


def format_row(result: GpuResult) -> str:
    """Returns one line of the table."""
    share = f"{result.share:6.1%}" if result.share is not None else ""
    verdict = "ok" if result.passed else "FAIL"
    return f"{verdict:4}  {result.name:52} {result.value:12.4g} {result.unit:9} {share:7} {result.note}".rstrip()


def write_results(results: Sequence[GpuResult], path: Path) -> None:
    """Writes the device, the versions and all rows as JSON."""
    import torch
    import transformers

    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "results": [asdict(result) for result in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
