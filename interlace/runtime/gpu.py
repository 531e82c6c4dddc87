"""Detection of a GPU that torch can use, without an import of torch."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/kfd")
"""Files that exist if a driver of NVIDIA or AMD is loaded."""


def has_gpu() -> bool:
    """Returns whether a driver is loaded, its devices are not hidden, and torch is not a build for CPUs alone."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        is_for_cpus = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
    return not is_for_cpus and any(Path(driver).exists() for driver in _DRIVERS)
