"""Prompts are ordered by epochs, a column, solve rates, and over the sources of a mixture."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.core.errors import UserError
from interlace.core.types import Prompt
from interlace.data.config import DataConfig
from interlace.data.mixture import create_sampler
from interlace.data.sampling import PromptSampler
from interlace.data.stream import PromptStream, StreamState


def prompts(count: int, source: str = "") -> list[Prompt]:
    return [
        Prompt(
            uid=f"{source}/{i}", token_ids=np.array([i], np.int32), text=str(i), answer="", source=source,
            metadata={"info": {"level": i % 5}},
        )
        for i in range(count)
    ]  # fmt: skip


def task(sampler: object = "shuffle") -> DataConfig:
    return DataConfig.parse({"files": {"train": "a.jsonl"}, "sampler": sampler})


MIXED = DataConfig.parse(
    {
        "mixture": [
            {"source": "a.jsonl", "weight": 3},
            {"source": "b.jsonl", "sampler": {"name": "by_column", "column": "info.level"}},
            {"source": "c.jsonl", "weight": 0.1, "sampler": "solve_rate"},
        ]
    }
)
SETS = [*prompts(13, "a"), *prompts(20, "b"), *prompts(5, "c")]
KINDS: Mapping[str, tuple[DataConfig, Sequence[Prompt]]] = {
    "shuffle": (task(), prompts(7)),
    "by_column": (task({"name": "by_column", "column": "info.level"}), prompts(11)),
    "solve_rate": (task("solve_rate"), prompts(7)),
    "mixture": (MIXED, SETS),
}


def stream(kind: str, seed: int = 0) -> PromptStream:
    data, given_prompts = KINDS[kind]
    return PromptStream(given_prompts, seed, create_sampler(data, given_prompts, seed))


def take(served: PromptStream, count: int) -> list[Prompt]:
    return [next(served) for _ in range(count)]


def names(served: Sequence[Prompt]) -> list[tuple[str, int]]:
    return [(prompt.uid, prompt.attempt) for prompt in served]


@pytest.mark.parametrize("kind", list(KINDS))
@given(seed=st.integers(0, 5), before=st.integers(0, 150), kept=st.integers(0, 20))
@settings(deadline=None, max_examples=25)
def test_a_restored_stream_serves_what_the_first_would_have(kind: str, seed: int, before: int, kept: int) -> None:
    first = stream(kind, seed)
    served = take(first, before)
    first.observe([(prompt.uid, float(int(prompt.text) % 2)) for prompt in served])
    unfinished = served[len(served) - min(kept, len(served)) :]
    state = StreamState.parse(json.loads(first.state(unfinished).model_dump_json()))
    second = stream(kind, seed)
    second.restore(state)
    out_of_turn = stream(kind, seed)
    out_of_turn.restore(state)
    assert names([out_of_turn.take(*each) for each in names(unfinished[::-1])]) == names(unfinished[::-1])
    assert names(take(second, len(unfinished))) == names(unfinished)
    later = names(take(first, 80))
    assert names(take(second, 80)) == later == names(take(out_of_turn, 80))


@pytest.mark.parametrize("kind", list(KINDS))
def test_draws_are_told_apart_by_their_attempt(kind: str) -> None:
    served = names(take(stream(kind), 400))
    assert len(set(served)) == 400
    assert served == names(take(stream(kind), 400)) != names(take(stream(kind, seed=1), 400))


def test_low_values_of_a_column_come_first_and_later_epochs_are_shuffled() -> None:
    served = take(stream("by_column"), 22)
    levels = [int(prompt.text) % 5 for prompt in served]
    assert levels[:11] == sorted(levels[:11]) and levels[11:] != sorted(levels[11:])


def test_a_column_that_cannot_order_is_named() -> None:
    with pytest.raises(
        UserError, match=r"has None in its column 'level', it must be a number or text. The columns are: info"
    ):
        create_sampler(task({"name": "by_column", "column": "level"}), prompts(3), 0)
    with pytest.raises(UserError, match=r"unknown sampler 'by_colum'\. Did you mean 'by_column'"):
        create_sampler(task("by_colum"), prompts(3), 0)
    with pytest.raises(UserError, match="sampler by_column: missing key 'column'"):
        create_sampler(task("by_column"), prompts(3), 0)


def test_numbers_of_a_csv_file_are_ordered_as_numbers() -> None:
    def levels(*texts: str) -> list[object]:
        given = [
            replace(prompt, metadata={"level": text}) for prompt, text in zip(prompts(len(texts)), texts, strict=True)
        ]
        sampler = create_sampler(task({"name": "by_column", "column": "level"}), given, 0)
        return [given[sampler.draw(number).position].metadata["level"] for number in range(len(given))]

    assert levels("10", "9", "-1.5", "1e2") == ["-1.5", "9", "10", "1e2"]
    assert levels("10", "9", "easy") == ["10", "9", "easy"]
    with pytest.raises(UserError, match="column 'level' has 1 empty texts, and numbers"):
        levels("10", "9", "")


def test_a_column_with_a_dot_in_its_name_and_an_item_of_a_list_order_prompts() -> None:
    for column, metadata in (("info.level", {"info.level": 3}), ("levels.1", {"levels": [0, 3]})):
        given = [*prompts(1), replace(prompts(1)[0], uid="/1", metadata=metadata)]
        given[0] = replace(given[0], metadata={"info.level": 5, "levels": [0, 5]})
        sampler = create_sampler(task({"name": "by_column", "column": column}), given, 0)
        assert sampler.draw(0).position == 1


def test_prompts_that_are_sometimes_solved_are_drawn_most() -> None:
    served = stream("solve_rate")
    served.observe([("/0", 1.0), ("/1", 0.0), ("/2", 1.0), ("/2", 0.0)])
    count = Counter(prompt.uid for prompt in take(served, 1000))
    assert count["/0"] < 40 and count["/1"] < 40 and count["/2"] > 120


def test_a_mixture_holds_its_shares_in_each_block_and_follows_each_source() -> None:
    served = take(stream("mixture"), 410)
    for block in range(10):
        count = Counter(prompt.source for prompt in served[block * 41 : (block + 1) * 41])
        assert abs(count["a"] - 30) <= 6 and count["c"] <= 4
    count = Counter(prompt.source for prompt in served)
    assert abs(count["a"] - 300) <= 2 and abs(count["b"] - 100) <= 2 and abs(count["c"] - 10) <= 2
    levels = [int(prompt.text) % 5 for prompt in served if prompt.source == "b"][:20]
    assert levels == sorted(levels)


@pytest.mark.parametrize("weights", [[0.2, 0.3, 0.2, 0.3, 100], [0.5, 0.2, 20, 0.7], [1.5, 10, 0.2, 20, 0.3]])
def test_the_number_of_a_draw_is_found_although_a_block_has_no_draw_of_its_source(weights: Sequence[float]) -> None:
    sources = [{"source": f"{name}.jsonl", "weight": weight} for name, weight in zip("abcde", weights, strict=False)]
    rows = [prompt for name, _ in zip("abcde", weights, strict=False) for prompt in prompts(500, name)]
    mixture = create_sampler(DataConfig.parse({"mixture": sources}), rows, 0)
    for number in range(3000):
        assert mixture.number_of(mixture.draw(number)) == number


CHANGES = ({"a": 0}, {"b": 5, "c": 0}, {"a": 1e-3}, {"a": 3, "b": 0, "c": 1})


@given(ends=st.lists(st.integers(0, 90), min_size=4, max_size=4), kept=st.integers(0, 20))
@settings(deadline=None, max_examples=50)
def test_a_restored_mixture_has_the_changes_of_its_weights(ends: Sequence[int], kept: int) -> None:
    """The state contains a change that follows the snapshot, and draws before a change stay as they were."""
    first, served = stream("mixture"), []
    for end, weights in zip(ends, CHANGES, strict=True):
        served += take(first, end)
        first.set_weights(weights)
    unfinished = served[len(served) - min(kept, len(served)) :]
    snapshot = first.state_later(unfinished)
    served += take(first, 3)
    first.set_weights({"a": 0, "b": 0})
    second = stream("mixture")
    second.restore(StreamState.parse(json.loads(snapshot().model_dump_json())))
    assert names(take(second, len(unfinished) + 3)) == names([*unfinished, *served[-3:]])
    later = take(first, 40)
    assert names(take(second, 40)) == names(later) and {prompt.source for prompt in later} == {"c"}
    assert len(set(names([*served, *later]))) == len(served) + 40


def test_a_state_of_a_mixture_without_weights_is_refused() -> None:
    """Earlier versions wrote a list of the states of the sources' samplers."""
    state = stream("mixture").state()
    old = state.model_copy(update={"sampler": [None, None, {"solved": []}]})
    with pytest.raises(UserError, match=r"is \[None, .*without the weights.*Resume with that version, or start a new"):
        stream("mixture").restore(old)


def test_new_weights_are_the_shares_of_the_next_draws() -> None:
    changed = stream("mixture")
    assert changed.weights == {"a": 3, "b": 1, "c": 0.1}
    take(changed, 30)
    changed.set_weights({"a": 1, "c": 0})
    changed.set_weights({"a": 1, "b": 3})
    assert changed.weights == {"a": 1, "b": 3, "c": 0}
    count = Counter(prompt.source for prompt in take(changed, 64))
    assert count == {"a": 16, "b": 48}


@pytest.mark.parametrize(
    ("kind", "weights", "words"),
    [
        ("mixture", {"d": 1.0}, r"no source 'd'\. Its sources are: a, b, c"),
        ("mixture", {"a": -1.0}, r"weight -1\.0 of source 'a': it must be a finite number, 0 or more.*a: -1\.0, b: 1"),
        ("mixture", {"a": float("nan")}, "weight nan of source 'a'"),
        ("mixture", {"a": float("inf")}, "weight inf of source 'a'"),
        ("mixture", {"a": 0, "b": 0, "c": 0}, "all sources have the weight 0"),
        ("mixture", {"a": 1e-7}, "weight 1e-07 of source 'a' is less than 1e-05 of the sum"),
        ("shuffle", {"a": 1.0}, "the prompts of this run are of one source"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(kind: str, weights: Mapping[str, float], words: str) -> None:
    refusing, other = stream(kind), stream(kind)
    with pytest.raises(UserError, match=words):
        refusing.set_weights(weights)
    assert names(take(refusing, 20)) == names(take(other, 20)), "the weights stay"


class Backwards(PromptSampler):
    """A user's sampler."""

    def draw(self, number: int):  # type: ignore[no-untyped-def]
        from interlace.data.sampling import PromptDraw

        return PromptDraw(len(self.prompts) - 1 - number % len(self.prompts), number // len(self.prompts))

    def number_of(self, draw):  # type: ignore[no-untyped-def]
        return draw.attempt * len(self.prompts) + len(self.prompts) - 1 - draw.position


def test_a_users_sampler_is_found_by_name() -> None:
    own = create_sampler(task(f"{__name__}:Backwards"), prompts(3), 0)
    served = PromptStream(prompts(3), 0, own)
    assert [prompt.text for prompt in take(served, 4)] == ["2", "1", "0", "2"]
    served.hand_back([replace(prompts(3)[2], attempt=1)])
    assert next(served).text == "2"
