"""A sample's columns are the concatenated columns of its segments."""

import pickle

import numpy as np

from interlace.core.runs import Runs
from interlace.core.types import PROMPT, Prompt, Sample, SampleKey, Segment
from interlace.runtime.channel import with_columns

TURN = Segment(
    token_ids=np.array([5, 6, 7], np.int32),
    logprobs=np.array([-1, -2, -3], np.float32),
    versions=Runs([(3, 2), (4, 1)]),
)
TOOL = Segment(
    parent=0,
    token_ids=np.array([8, 9], np.int32),
    sampled=np.zeros(2, np.bool_),
    logprobs=np.zeros(2, np.float32),
    versions=Runs.repeated(4, 2),
    kind="tool",
)
ANSWER = Segment(
    parent=1, token_ids=np.array([1], np.int32), logprobs=np.array([-4], np.float32), versions=Runs.repeated(6, 1)
)


def sample(*segments: Segment) -> Sample:
    prompt = Prompt(uid="p", token_ids=np.array([1, 2], np.int32), text="", answer="")
    return Sample(key=SampleKey(0, 0), prompt=prompt, segments=segments)


def test_one_response_is_read_where_it_lies() -> None:
    alone = sample(TURN)
    assert TURN.parent == PROMPT
    assert alone.token_ids is TURN.token_ids is alone.sampled_ids
    assert alone.logprobs is TURN.logprobs and alone.versions is TURN.versions
    assert alone.loss_mask is None and alone.num_tokens == alone.num_sampled == 3


def test_segments_stand_one_behind_the_other() -> None:
    whole = sample(TURN, TOOL, ANSWER)
    assert whole.token_ids.tolist() == [5, 6, 7, 8, 9, 1] and whole.logprobs.tolist() == [-1, -2, -3, 0, 0, -4]
    assert list(whole.versions) == [3, 3, 4, 4, 4, 6]
    assert whole.loss_mask is not None and whole.loss_mask.tolist() == [True, True, True, False, False, True]
    assert whole.sampled_ids.tolist() == [5, 6, 7, 1]
    assert (whole.num_tokens, whole.num_sampled, whole.num_total_tokens) == (6, 4, 8)
    assert sample(TURN, ANSWER).loss_mask is None, "nothing was put in"


def test_before_generation_there_are_no_tokens() -> None:
    fresh = sample()
    assert (len(fresh.token_ids), len(fresh.logprobs), len(fresh.versions), fresh.num_tokens) == (0, 0, 0, 0)
    assert fresh.loss_mask is None
    assert with_columns(fresh, {"segments": (TURN, TOOL)}).num_tokens == 5, "nothing of the row was kept from before"


def test_what_was_read_does_not_travel_twice() -> None:
    """The arrays of a sample go over process borders once, beside the pickle."""
    whole = sample(TURN, TOOL, ANSWER)
    assert len(whole.token_ids) == 6
    beside: list[pickle.PickleBuffer] = []
    body = pickle.dumps(whole, protocol=5, buffer_callback=beside.append)
    assert len(beside) == 1 + 3 * 2 + 1, "the prompt, ids and log-probs of each segment, one mask"
    back: Sample = pickle.loads(body, buffers=beside)
    assert back.token_ids.tolist() == whole.token_ids.tolist() and back.segments[1].kind == "tool"
    assert list(back.versions) == list(whole.versions)
