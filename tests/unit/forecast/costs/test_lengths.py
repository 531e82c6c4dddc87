"""Simulated lengths and rewards follow the distribution that the profile states."""

import math
import statistics

import numpy as np
import pytest

from interlace.core.runs import Runs
from interlace.core.types import Prompt, Sample, SampleKey
from interlace.forecast.costs.lengths import ResponseLengths
from interlace.forecast.costs.pace import ControllerTime
from interlace.forecast.costs.workers import SimulatedReward
from interlace.forecast.profile.types import Lengths, RewardCosts
from interlace.runtime.sim.loop import VirtualLoop
from interlace.runtime.worker import WorkerContext


def drawn(lengths: Lengths, num_prompts: int = 400, num_samples: int = 10) -> np.ndarray:
    source = ResponseLengths(lengths=lengths, seed=1)
    return np.array([[source.of(f"p{p}", 0, s) for s in range(num_samples)] for p in range(num_prompts)])


def test_lengths_are_lognormal_by_prompt_and_by_response() -> None:
    logs = np.log(drawn(Lengths(median=1000, prompt_sigma=0.5, response_sigma=0.3)))
    assert math.exp(np.median(logs)) == pytest.approx(1000, rel=0.1)
    assert logs.std(axis=1, ddof=1).mean() == pytest.approx(0.3, rel=0.1)
    assert logs.mean(axis=1).std() == pytest.approx(math.hypot(0.5, 0.3 / math.sqrt(10)), rel=0.15)


def test_a_stated_share_never_ends_by_itself() -> None:
    assert np.isinf(drawn(Lengths(cap_share=0.1))).mean() == pytest.approx(0.1, abs=0.02)


def test_measured_quantiles_are_kept() -> None:
    found = drawn(Lengths(quantiles=(10, 12, 20, 400), prompt_sigma=1.0, response_sigma=0.5)).ravel()
    assert found.min() >= 10 and found.max() <= 400
    assert np.quantile(found, 1 / 3) == pytest.approx(12, abs=1)


def test_a_prompt_is_as_hard_at_every_attempt_and_prompts_differ_as_the_spread_says() -> None:
    async def solved(spread: float) -> list[float]:
        context = WorkerContext(group="reward", rank=0, num_ranks=1, devices=())
        worker = SimulatedReward(context, RewardCosts(solve_rate=0.4, solve_spread=spread), 0, ControllerTime())
        rates = []
        for number in range(300):
            prompt = Prompt(uid=f"p{number}", token_ids=np.zeros(1, np.int32), text="", answer="")
            samples = [Sample(key=SampleKey(number, index), prompt=prompt) for index in range(20)]
            rates.append(statistics.fmean([result.reward for result in await worker.score(samples)]))
        return rates

    loop = VirtualLoop()
    alike, apart = loop.run_until_complete(solved(0.0)), loop.run_until_complete(solved(1.0))
    loop.close()
    assert statistics.fmean(alike) == pytest.approx(0.4, abs=0.03) and statistics.pstdev(alike) < 0.15
    assert set(apart) == {0.0, 1.0} and statistics.fmean(apart) == pytest.approx(0.4, abs=0.08)


def test_runs_read_as_the_sequence_that_they_are() -> None:
    runs = Runs([(1, 2), (3, 0), (5, 3)])
    assert list(runs) == [1, 1, 5, 5, 5] and len(runs) == 5 and runs[-1] == 5 and runs[1:3] == (1, 5)
    assert np.asarray(runs, np.int32).tolist() == [1, 1, 5, 5, 5]
    assert np.asarray(Runs.repeated(7, 10**6), np.int32).sum() == 7 * 10**6
    assert Runs.repeated(7, 0).pieces == ()
    assert runs.values == (1, 5) and Runs.of([1, 1, 5, 5, 5]).pieces == runs.pieces and Runs.of(runs) is runs
    with pytest.raises(IndexError):
        runs[5]
