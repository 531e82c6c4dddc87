"""The length ranker learns from history, siblings and tokens, and is compared with the history alone."""

import math
import random

import pytest

from interlace.core.types import Request, SampleKey, SamplingParams
from interlace.schedule.lengths import LengthRanker, rank_correlation

PARAMS = SamplingParams(max_new_tokens=10_000)


def ask(uid: str, gid: int, index: int, ids: list[int]) -> Request:
    return Request(uid=uid, owner=SampleKey(gid, index), prompt_ids=ids, params=PARAMS)


def test_rank_correlation_is_of_ranks_and_shares_ties() -> None:
    assert rank_correlation([1, 2, 3], [10, 100, 101]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2, 2], [1, 2, 3, 4]) == pytest.approx(0.894, abs=1e-3)
    assert rank_correlation([1, 1], [1, 2]) == 0.0


def shown(*, by_token: float, waves: int, epochs: int = 1) -> dict[str, float]:
    """The correlations after prompts whose length their first token says in part, dispatched in waves of siblings."""
    rng, ranker, size = random.Random(0), LengthRanker(500.0, learns=True), 240
    prompts = [([rng.randrange(8), 100 + rng.randrange(50)], rng.gauss(0, 0.7)) for _ in range(size)]
    for epoch in range(epochs):
        for number, (ids, own) in enumerate(prompts):
            gid = epoch * size + number
            for wave in range(waves):
                requests = [ask(f"p{number}", gid, 2 * wave + index, ids) for index in range(2)]
                for request in requests:
                    ranker.expect(request)
                for request in requests:
                    log_length = 6 + by_token * (ids[0] - 3.5) / 4 + own + rng.gauss(0, 0.4)
                    ranker.observe(request, round(math.exp(log_length)))
    return dict(ranker.metrics())


def test_a_prompts_tokens_rank_prompts_that_were_never_seen() -> None:
    found = shown(by_token=2.0, waves=1)
    assert found["length_rank"] > 0.6
    assert found["length_rank"] > found["length_rank_of_history"] + 0.3


def test_finished_siblings_say_more_than_nothing() -> None:
    found = shown(by_token=0.0, waves=3)
    assert found["length_rank"] > 0.45
    # History knows the siblings too, by their prompt; the ranker weighs one response less than many.
    assert found["length_rank"] > found["length_rank_of_history"]


def test_with_a_long_history_it_is_no_worse_than_history() -> None:
    found = shown(by_token=0.0, waves=1, epochs=4)
    assert found["length_rank"] > found["length_rank_of_history"] - 0.02


def test_where_lengths_only_balance_engines_history_serves_and_nothing_is_kept() -> None:
    ranker = LengthRanker(500.0, learns=False)
    request = ask("p", 0, 0, [1, 2])
    assert ranker.expect(request) == 500.0
    ranker.observe(request, 100)
    assert ranker.expect(ask("p", 1, 0, [1, 2])) == 100.0
    assert ranker.metrics() == {}
