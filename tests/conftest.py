"""Environment of every test: one thread per library, no network, and the same examples on every run."""

import gc
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator

# Read by the libraries when they are first imported, so this stands before anything that could import them.
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tests interrupt processes, which inherit an ignored SIGINT. A shell ignores it in the background jobs of a script.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imports make many objects that stay: looking for garbage among them took a quarter of the time of the collection.
gc.disable()

import pytest  # noqa: E402 - after the environment is set
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support import heap  # noqa: E402

settings.register_profile(
    "interlace",
    deadline=None,  # a shared machine stalls now and then; that is not a property of the code
    derandomize=True,  # a failure is the same for everyone; a longer random search is a slow test's business
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("interlace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _skip(items, "gpu", "needs a CUDA device", _has_cuda)
    _skip(items, "ray", "needs interlace[ray]", lambda: importlib.util.find_spec("ray") is not None)
    _skip(items, "vllm", "needs vLLM's CPU build", lambda: importlib.util.find_spec("vllm") is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    heap.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    _keep_environment()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    _keep_environment()


def _keep_environment() -> None:
    """Removes pytest's variable, because a fork server of ranks has the environment of its start.

    If the variable changed with each test, each test of ranks would start a server, which imports torch.
    """
    os.environ.pop("PYTEST_CURRENT_TEST", None)


def _skip(items: list[pytest.Item], marker: str, reason: str, is_there: Callable[[], bool]) -> None:
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and not is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One Ray for all tests that need one, since starting it takes seconds."""
    from interlace.runtime.machine import Machine
    from interlace.runtime.ray.session import RaySession

    session = RaySession.open(None, Machine(num_cores=2, memory_bytes=1 << 30))
    yield
    session.close()
