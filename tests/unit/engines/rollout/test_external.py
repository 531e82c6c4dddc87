"""Requests to engines outside this process: token accounting, seeds, refusals, and errors in answers."""

import pytest

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import NO_GROUP, FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout.external import LiveRequests, finish_reason, request_seed


def request(**changes: object) -> Request:
    plain = {"uid": "a", "owner": SampleKey(NO_GROUP, 0), "prompt_ids": [1, 2], "params": SamplingParams()}
    return Request(**plain | changes)  # type: ignore[arg-type]


def test_tokens_of_all_submissions_add_up() -> None:
    live = LiveRequests()
    live.add(request())
    live.extend("a#0#0#-1", [5, 6], [-0.5, -0.25], version=0)
    live.extend("a#0#0#-1", [7], [-1.0], version=1)
    assert live.num_sent("a#0#0#-1") == 3 and len(live) == 1 and live.named(None) == ["a#0#0#-1"]
    partial = live.end("a#0#0#-1", FinishReason.ABORTED)
    resumed = partial.resumed
    assert (resumed.generated_ids, resumed.generated_logprobs, resumed.generated_versions) == (
        (5, 6, 7),
        (-0.5, -0.25, -1.0),
        (0, 0, 1),
    )
    assert "a#0#0#-1" not in live
    live.add(resumed)
    live.extend("a#0#0#-1", [8], [-2.0], version=2)
    assert live.num_sent("a#0#0#-1") == 1
    whole = live.end("a#0#0#-1", finish_reason("stop"))
    assert whole.token_ids == (5, 6, 7, 8) and whole.versions == (0, 0, 1, 2)
    assert whole.finish_reason == FinishReason.STOP


def test_seeds_differ_by_request_and_by_where_it_was_resumed() -> None:
    seeds = {
        request_seed(seed, request(owner=SampleKey(NO_GROUP, index), turn=turn, generated_ids=(1,) * done))
        for seed in range(3)
        for index in range(3)
        for turn in range(3)
        for done in range(3)
    }
    assert len(seeds) == 81 and all(0 <= seed < 2**31 for seed in seeds)


def test_what_cannot_be_served_is_refused() -> None:
    live = LiveRequests()
    with pytest.raises(UserError, match="prompt is empty"):
        live.add(request(prompt_ids=[]))
    with pytest.raises(UserError, match="native engine alone"):
        live.add(request(params=SamplingParams(raw_logprobs=True)))
    live.add(request())
    with pytest.raises(ValueError, match="already live"):
        live.add(request())


@pytest.mark.parametrize("logprob", [-9999.0, float("-inf"), float("nan"), float("inf")])
def test_a_log_prob_that_is_none_is_an_error(logprob: float) -> None:
    live = LiveRequests()
    live.add(request())
    with pytest.raises(InterlaceError, match=r"gave .* as the log-prob of token 5"):
        live.extend("a#0#0#-1", [4, 5], [-1.0, logprob], version=0)


def test_an_end_that_is_unknown_is_an_error() -> None:
    with pytest.raises(InterlaceError, match="for the unknown reason 'error'"):
        finish_reason("error")
