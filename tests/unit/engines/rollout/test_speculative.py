"""Speculative drafts change the speed of generation, never the tokens."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from interlace.core.types import NO_GROUP, Request, Response, SampleKey
from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams
from interlace.engines.rollout.sequence import SequenceState, SequenceTable
from interlace.engines.rollout.speculative import REST, TRIAL, NgramDrafter, Speculator

ModelMaker = Callable[..., PreTrainedModel]


def run(engine: NativeEngine, params: SamplingParams, samples: int) -> tuple[dict[int, Response], int]:
    """Samples of one repetitive prompt, one after the other. Returns them and the number of steps."""
    done, steps = dict[int, Response](), 0
    for index in range(samples):
        engine.submit(
            Request(uid="p", owner=SampleKey(NO_GROUP, index), prompt_ids=[1, 2, 3, 1, 2, 3, 1, 2], params=params)
        )
        while index not in done:
            done |= {one.request.owner.index: one for one in engine.step().finished}
            steps += 1
    return done, steps


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=60, temperature=0),
        SamplingParams(max_new_tokens=60, temperature=0.3),
        SamplingParams(max_new_tokens=40, temperature=0.5, top_p=0.9),
        SamplingParams(max_new_tokens=40, temperature=0.5, repetition_penalty=1.1, presence_penalty=0.2),
        SamplingParams(max_new_tokens=60, temperature=0.3, stop_token_ids=tuple(range(0, 96, 12))),
    ],
)
def test_samples_are_those_without_drafts(make_model: ModelMaker, params: SamplingParams) -> None:
    without = NativeEngine(make_model(), config=NativeConfig(draft_tokens=0, steps_per_schedule=1))
    plain, plain_steps = run(without, params, samples=6)
    engine = NativeEngine(make_model(), config=NativeConfig(draft_tokens=4, steps_per_schedule=1))
    drafted, drafted_steps = run(engine, params, samples=6)
    metrics = engine.metrics()
    assert metrics["draft_tokens"] > 0 and metrics["draft_acceptance"] > 0 and drafted_steps < plain_steps
    for index, expected in plain.items():
        assert drafted[index].token_ids == expected.token_ids and drafted[index].logprobs == expected.logprobs
        assert drafted[index].finish_reason == expected.finish_reason


def test_off_while_many_run(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model(), config=NativeConfig(draft_below=2))
    engine.generate([[1, 2, 1, 2, 1, 2]] * 5, SamplingParams(max_new_tokens=20))
    assert engine.metrics()["draft_tokens"] == 0


def test_drafted_samples_follow_the_softmax(make_model: ModelMaker) -> None:
    """The third token of many samples, drafts on, against its distribution summed over the first two."""
    model = make_model()
    params = SamplingParams(max_new_tokens=3, temperature=0.4, top_k=2)
    engine = NativeEngine(make_model(), config=NativeConfig(draft_tokens=2))
    done, _ = run(engine, params, samples=600)
    assert engine.metrics()["draft_acceptance"] > 0.05
    counts: dict[tuple[int, ...], int] = {}
    for completion in done.values():
        counts[completion.token_ids] = counts.get(completion.token_ids, 0) + 1
    statistic, prompt = 0.0, [1, 2, 3, 1, 2, 3, 1, 2]
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, mass in expected.items():
            with torch.no_grad():
                logits = model(torch.tensor([prompt + list(tokens)])).logits[0, -1] / 0.4
            values, ids = logits.topk(2)
            for token, probability in zip(ids.tolist(), values.softmax(-1).tolist(), strict=True):
                longer[(*tokens, token)] = mass * probability
        expected = longer
    for tokens, mass in expected.items():
        statistic += (counts.pop(tokens, 0) - 600 * mass) ** 2 / (600 * mass)
    assert not counts, "a token outside the top two"
    assert float(torch.special.gammaincc(torch.tensor(3.5), torch.tensor(statistic / 2))) > 1e-4


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 6))
def test_a_draft_followed_its_suffix_before(tokens: list[int], most: int) -> None:
    drafter = NgramDrafter()
    earlier = np.asarray([2, 2, 1, 3, 0, 0, 1])
    drafter.observe("p", earlier)
    draft = drafter.propose("p", np.asarray(tokens), most).tolist()
    assert len(draft) <= most
    if draft:
        texts = [earlier.tolist(), tokens]
        followed = [*tokens[-2:], draft[0]]
        assert any(text[at : at + 3] == followed for text in texts for at in range(len(text)))


def test_no_draft_without_a_match() -> None:
    drafter = NgramDrafter()
    assert len(drafter.propose("p", np.asarray([1, 2, 3, 4]), 3)) == 0
    drafter.observe("q", np.asarray([3, 4, 5, 6, 7]))
    assert len(drafter.propose("p", np.asarray([1, 2, 3, 4]), 3)) == 0, "another prompt's response"
    assert drafter.propose("q", np.asarray([1, 2, 3, 4]), 3).tolist() == [5, 6, 7]


def test_guesses_that_never_come_true_are_left_off_for_a_while() -> None:
    table = SequenceTable(1, seed=0)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    request = Request(uid="p", owner=SampleKey(NO_GROUP, 0), prompt_ids=prompt, params=SamplingParams())
    sequence = SequenceState(request=request, arrival=0, limit=64, token_ids=prompt)
    table.enter(sequence)
    table.num_computed[0] = len(prompt) - 1
    speculator, rows = Speculator(table, most=3, below=2), np.asarray([0])
    for _ in range(TRIAL):
        assert speculator.guess(rows) == 1 and table.token_ids[0, 8:11].tolist() == [3, 1, 2]
        speculator.judge(accepted=0)
    assert speculator.guess(rows) is None and not table.num_drafts.any()
    speculator.wait(REST - 1)
    assert speculator.guess(rows) is None
    speculator.wait(1)
    for _ in range(3 * TRIAL):
        assert speculator.guess(rows) == 1
        speculator.judge(accepted=1)


def test_random_text_is_soon_decoded_without_guessing(make_model: ModelMaker) -> None:
    engine = NativeEngine(make_model())
    engine.generate([[1, 2, 3, 4]], SamplingParams(max_new_tokens=200))
    metrics = engine.metrics()
    assert metrics["draft_acceptance"] < 0.05 and metrics["num_steps"] > 190
    assert metrics["planned_ahead"] >= 1, "several steps at once, one after the other"
