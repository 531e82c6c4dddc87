"""What every test runs under: one thread a library, no network, examples that are the same each time."""

import os

# Read by the libraries when they are first imported, so this stands before anything that could import them.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402 - after the environment is set
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "interlace",
    deadline=None,  # a shared machine stalls now and then; that is not a property of the code
    derandomize=True,  # a failure is the same for everyone; a longer random search is a slow test's business
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("interlace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
