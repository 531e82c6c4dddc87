"""A stream yields every prompt once per epoch, and a restored stream continues exactly."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.core.types import Prompt
from interlace.data.stream import PromptStream, StreamState


def prompts(count: int) -> list[Prompt]:
    return [Prompt(uid=f"set/{i}", token_ids=np.array([i], np.int32), text=str(i), answer="") for i in range(count)]


def take(stream: PromptStream, count: int) -> list[Prompt]:
    return [next(stream) for _ in range(count)]


def names(served: list[Prompt]) -> list[tuple[str, int]]:
    return [(prompt.uid, prompt.attempt) for prompt in served]


def test_each_epoch_serves_every_prompt_once_in_an_order_of_its_own() -> None:
    served = names(take(PromptStream(prompts(20), seed=3), 60))
    for epoch in range(3):
        part = served[epoch * 20 : (epoch + 1) * 20]
        assert sorted(part) == sorted((f"set/{i}", epoch) for i in range(20))
    orders = {tuple(uid for uid, _ in served[epoch * 20 : (epoch + 1) * 20]) for epoch in range(3)}
    assert len(orders) == 3


def test_the_order_depends_on_the_seed_alone() -> None:
    assert names(take(PromptStream(prompts(30), seed=1), 70)) == names(take(PromptStream(prompts(30), seed=1), 70))
    assert names(take(PromptStream(prompts(30), seed=1), 30)) != names(take(PromptStream(prompts(30), seed=2), 30))


@given(size=st.integers(1, 7), actions=st.lists(st.integers(0, 5), max_size=60), seed=st.integers(0, 3))
def test_nothing_is_skipped_and_nothing_trained_twice(size: int, actions: list[int], seed: int) -> None:
    """Random draws, trainings, returns and restarts end with exactly the first draws of an undisturbed stream."""
    stream = PromptStream(prompts(size), seed)
    out: list[Prompt] = []
    trained: list[tuple[str, int]] = []
    for action in actions:
        if action <= 1 or not out:
            out.append(next(stream))
        elif action == 2:
            trained += names([out.pop(0)])
        elif action == 3:
            stream.hand_back([out.pop()])
        else:
            state = StreamState.model_validate_json(stream.state(unfinished=out).model_dump_json())
            stream, out = PromptStream(prompts(size), seed), []
            stream.restore(state)
    stream.hand_back(out)
    missing = stream.state().drawn - len(trained)
    trained += names(take(stream, missing))
    assert sorted(trained) == sorted(names(take(PromptStream(prompts(size), seed), len(trained))))


def test_what_was_handed_back_comes_first_in_its_original_order() -> None:
    stream = PromptStream(prompts(10), seed=0)
    first = take(stream, 6)
    stream.hand_back([first[5], first[1]])
    stream.hand_back([first[3]])
    assert names(take(stream, 3)) == names([first[1], first[3], first[5]])
    assert names(take(stream, 4)) == names(take(PromptStream(prompts(10), seed=0), 10))[6:]


def test_a_state_leaves_the_stream_as_it_is() -> None:
    stream, other = PromptStream(prompts(5), seed=0), PromptStream(prompts(5), seed=0)
    out = take(stream, 3)
    take(other, 3)
    stream.state(unfinished=out)
    assert names(take(stream, 9)) == names(take(other, 9))


def test_only_a_prompt_that_is_out_can_be_handed_back() -> None:
    stream = PromptStream(prompts(4), seed=0)
    out = take(stream, 2)
    unseen = next(p for p in prompts(4) if p.uid not in {prompt.uid for prompt in out})
    stranger = Prompt(uid="other/0", token_ids=np.zeros(1, np.int32), text="", answer="")
    for wrong in ([unseen], [stranger], [out[0], out[0]]):
        with pytest.raises(ValueError, match="is not in use"):
            stream.hand_back(wrong)
    stream.hand_back([out[0]])
    with pytest.raises(ValueError, match="is not in use"):
        stream.hand_back([out[0]])


def test_a_waiting_prompt_is_served_out_of_turn_once() -> None:
    stream = PromptStream(prompts(10), seed=0)
    first = take(stream, 6)
    stream.restore(stream.state(unfinished=[first[1], first[4], first[2]]))
    assert names([stream.take(first[4].uid, first[4].attempt)]) == names([first[4]])
    for uid, epoch in ((first[4].uid, first[4].attempt), (first[0].uid, first[0].attempt), ("other/0", 0)):
        with pytest.raises(UserError, match="not among those to draw again"):
            stream.take(uid, epoch)
    assert names(take(stream, 2)) == names([first[1], first[2]])


def test_a_state_of_other_prompts_is_refused() -> None:
    state = PromptStream(prompts(5), seed=0).state()
    for other in (PromptStream(prompts(6), seed=0), PromptStream(prompts(5), seed=1)):
        with pytest.raises(UserError, match="are not the prompts of this run"):
            other.restore(state)


def test_a_state_of_edited_rows_is_refused() -> None:
    given = prompts(5)
    state = PromptStream(given, seed=0).state()
    changes: list[dict[str, Any]] = [{"text": "new"}, {"answer": "new"}, {"metadata": {"completion": "new"}}]
    for change in changes:
        edited = [*given[:4], replace(given[4], **change)]
        with pytest.raises(UserError, match="a data file or the seed changed"):
            PromptStream(edited, seed=0).restore(state)
        generated = PromptStream(edited, seed=0, generated={""})
        generated.restore(PromptStream(given, seed=0, generated={""}).state())


def test_prompts_need_distinct_names() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        PromptStream([], seed=0)
    with pytest.raises(ValueError, match="distinct uids"):
        PromptStream([*prompts(2), *prompts(1)], seed=0)
