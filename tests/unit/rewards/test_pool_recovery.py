"""Scoring processes that are killed or stopped from outside."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from interlace.core.errors import InterlaceError, RestartBudgetError
from interlace.core.recovery import Cause
from interlace.core.types import EMPTY_INT, Prompt, RewardResult, Sample, SampleKey
from interlace.rewards.config import RewardConfig
from interlace.rewards.pool import ScoringPool
from interlace.rewards.scorer import Scorer
from interlace.rewards.signature import ScoreRequest
from interlace.run.chaos.real import role_processes


@contextmanager
def one_process(restarts_per_hour: int | None = None) -> Iterator[Scorer]:
    made = Scorer(RewardConfig(name="exact", workers=1), restarts_per_hour)
    try:
        yield made
    finally:
        made.close()


def score(made: Scorer) -> RewardResult:
    prompt = Prompt(uid="p", token_ids=EMPTY_INT, text="", answer="yes")
    return asyncio.run(made.score([Sample(key=SampleKey(0, 0), prompt=prompt, text="yes")]))[0]


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_a_signal_ends_or_stops_costs_no_score(sent: signal.Signals) -> None:
    with one_process() as made:
        assert score(made).failure is None
        [process] = role_processes("reward")
        os.kill(process, sent)
        assert score(made).failure is None
        assert process not in role_processes("reward")


def test_a_job_that_comes_after_the_end_is_refused_instead_of_waiting() -> None:
    with one_process() as made:
        score(made)
        pool = made._pool
    assert pool is not None
    with pytest.raises(InterlaceError, match="the processes of reward were closed, and take no further job"):
        pool.submit([])


class _SubmitsLate(ScoringPool):
    """Pool to which another thread submits a job when the others have failed, and before its thread has ended."""

    error: InterlaceError | None = None

    def _fail_all(self, error: BaseException | None) -> None:
        super()._fail_all(error)
        try:
            self.submit([])
        except InterlaceError as refusal:
            self.error = refusal


def test_a_job_that_comes_during_the_end_is_refused() -> None:
    pool = _SubmitsLate(RewardConfig(name="exact", workers=1), is_async=False)
    pool.close()
    assert "take no further job" in str(pool.error)


def test_an_exhausted_budget_refuses_further_jobs_instead_of_letting_them_wait() -> None:
    with one_process(restarts_per_hour=0) as made:
        score(made)
        [process] = role_processes("reward")
        os.kill(process, signal.SIGKILL)
        end_s = time.monotonic() + 10
        while role_processes("reward") and time.monotonic() < end_s:
            time.sleep(0.05)
        time.sleep(0.2)
        with pytest.raises(RestartBudgetError, match=r"ended 1 times within an hour.*is 0.*cause: resource"):
            score(made)


def _fail_to_load() -> None:
    raise ModuleNotFoundError("no module of the user's row")


class _Unreadable:
    """Value of a row that another process cannot unpickle."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _fail_to_load, ()


async def slow(response: str) -> float:
    await asyncio.sleep(0.2)
    return 1.0


@pytest.mark.parametrize("name", ["exact", f"{__name__}:slow"])
def test_a_row_that_cannot_be_unpickled_fails_its_sample_alone(name: str) -> None:
    pool = ScoringPool(RewardConfig(name=name, workers=2, timeout_s=60.0), is_async=":" in name, restarts_per_hour=0)
    try:
        good = ScoreRequest(response="yes", prompt="", answer="yes", metadata={})
        before, bad, after = (
            pool.submit([each]) for each in (good, replace(good, metadata={"x": _Unreadable()}), good)
        )
        [failed] = bad.result(120)
        assert failed.cause is Cause.USER and "ModuleNotFoundError: no module of the user's row" in str(failed.failure)
        assert [future.result(120)[0].failure for future in (before, after)] == [None, None]
    finally:
        pool.close()
