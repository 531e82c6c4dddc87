"""One Ray for all tests that need one."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package")
def ray_session() -> Iterator[None]:
    from interlace.runtime.machine import Machine
    from interlace.runtime.ray.session import RaySession

    session = RaySession.open(None, Machine(num_cores=2, memory_bytes=1 << 30))
    yield
    session.close()
