"""A failed start of Ray is retried; repeated failures give an error with a fix."""

import socket
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

from interlace.core.errors import InterlaceError, UserError
from interlace.runtime.machine import Machine
from interlace.runtime.ray.session import STARTS, RaySession

MACHINE = Machine(num_cores=2, memory_bytes=1 << 30)


class Starts:
    """Stands for ray.init on a machine too busy to start Ray in time; the real one takes minutes to fail."""

    def __init__(self, failures: int) -> None:
        self.num_left, self.count = failures, 0

    def __call__(self, **given: Any) -> None:
        assert given["address"] == "local" and given["num_cpus"] == 2
        self.count += 1
        self.num_left -= 1
        if self.num_left >= 0:
            raise Exception("The current node timed out during startup.")


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Starts:
    starts = Starts(request.param)
    monkeypatch.setattr(ray, "init", starts)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return starts


@pytest.mark.parametrize("init", [1], indirect=True)
def test_a_start_that_failed_is_repeated(init: Starts) -> None:
    RaySession.open(None, MACHINE)
    assert init.count == 2


@pytest.mark.parametrize("init", [0], indirect=True)
def test_an_address_where_nobody_listens_is_refused_without_waiting_for_ray(init: Starts) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        with pytest.raises(UserError, match=r"cannot join a Ray cluster there: .*refused.*ray start"):
            RaySession.open(f"127.0.0.1:{taken.getsockname()[1]}", MACHINE)
    assert init.count == 0


def test_an_address_that_may_ask_for_a_token_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a token is kept `ray start` asks for it, and Ray gives it to no host:port: all it says is this."""

    def fails(**_given: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.2:6379")

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(UserError, match=r"Failed to connect .* set RAY_AUTH_MODE=token"):
            RaySession.open(address, MACHINE)


@pytest.mark.parametrize("init", [9], indirect=True)
def test_a_ray_that_does_not_start_says_what_to_do(init: Starts) -> None:
    with pytest.raises(InterlaceError, match=r"did not start .* timed out during startup.*cluster=local"):
        RaySession.open(None, MACHINE)
    assert init.count == STARTS
