"""Operations declare the ledger bin of their time, and missing declarations are refused."""

import importlib
import pkgutil

import pytest

from interlace import workers
from interlace.core.errors import UserError
from interlace.forecast import costs as simulate
from interlace.observe.goodput import BINS
from interlace.robots.env_worker import EnvWorker
from interlace.runtime.worker import OPERATION_BINS, Operation, Worker, operation, operation_of


def test_an_unknown_bin_is_refused_where_it_is_written_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"bin='trains'\): there is no such bin. Did you mean 'train'\?"):
        operation(bin="trains")  # type: ignore[arg-type]


def test_an_operation_on_the_devices_states_a_bin() -> None:
    with pytest.raises(UserError, match=r"states which bin .* one of train, inference, score, .* on_device=False"):
        operation()
    assert operation(on_device=False) is not None


def test_a_public_method_that_says_nothing_is_refused_with_its_class() -> None:
    with pytest.raises(UserError, match=r"Judge.act: a public method of a worker is an operation"):

        class Judge(Worker):
            def act(self) -> None: ...


def test_a_method_is_declared_as_the_one_it_overrides_unless_it_says_otherwise() -> None:
    class Model(Worker):
        @operation(bin="inference", phase="reference")
        def logprobs(self) -> None: ...

    class Quiet(Model):
        def logprobs(self) -> None: ...

        def onload(self) -> None: ...

        def close(self) -> None: ...

    class Loud(Model):
        @operation(bin="score")
        def logprobs(self) -> None: ...

    assert (
        operation_of(Quiet, "logprobs")
        == operation_of(Model, "logprobs")
        == Operation(bin="inference", phase="reference")
    )
    assert operation_of(Quiet, "onload") == Operation(bin="switch", phase="switch")
    assert operation_of(Loud, "logprobs") == Operation(bin="score", phase="reward")
    assert operation_of(Quiet, "close") is None and operation_of(Quiet, "context") is None


def test_every_bin_that_an_operation_fills_is_one_of_the_ledger() -> None:
    assert set(OPERATION_BINS) <= set(BINS)


def test_what_computes_nothing_of_a_step_is_idle_time_and_simulated_workers_book_as_real_ones_do() -> None:
    real, simulated = declared(workers), declared(simulate)
    for name in ("forget", "simulate", "simulate_beside", "spec"):
        real[name] = [how] if (how := operation_of(EnvWorker, name)) else []
    idle = {name for name, hows in real.items() if any(how.bin == "idle" for how in hows)}
    assert idle == {"copy_checkpoint", "load_optimizer"}
    for name, hows in simulated.items():
        booked = {(how.bin, how.phase) for how in hows}
        assert booked <= {(how.bin, how.phase) for how in real[name]}, name


def declared(package: object) -> dict[str, list[Operation]]:
    """Operations of the workers in a package's modules, by name."""
    found: dict[str, list[Operation]] = {}
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):  # type: ignore[attr-defined]
        for kind in vars(importlib.import_module(module.name)).values():
            if isinstance(kind, type) and issubclass(kind, Worker):
                for name in dir(kind):
                    if how := operation_of(kind, name):
                        found.setdefault(name, []).append(how)
    return found
