"""A sample of several turns on the real engine contains exactly the sampled tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from interlace.core.types import Prompt, SampleKey
from interlace.models.tiny import build_tiny
from interlace.rollouts.base import Session
from interlace.rollouts.episodes.single_turn import SingleTurn
from interlace.runtime.watchdog import Watchdog
from tests.support.episode_runs import samples_of

HINT = [40, 41, 42]


@dataclass
class AskTwice:
    """A question, what a tool says of the answer, a second answer."""

    tool_s: Sequence[float]
    """Seconds of the tool, in turn."""
    num_asked: int = field(default=0, init=False)

    async def run(self, prompt: Prompt, session: Session) -> float:
        first = await session.generate(prompt.token_ids.tolist())
        self.num_asked += 1
        await asyncio.sleep(self.tool_s[self.num_asked % len(self.tool_s)])
        async with session.waiting("the tool's end"):
            await asyncio.sleep(0)
        context = [*prompt.token_ids.tolist(), *first.token_ids.tolist(), *HINT]
        second = await session.generate(context)
        return float(len(second.token_ids))


class SameContextTwice:
    """Two answers to one question."""

    async def run(self, prompt: Prompt, session: Session) -> None:
        await session.generate(prompt.token_ids.tolist())
        await session.generate(prompt.token_ids.tolist())


@pytest.fixture
def keen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that takes a few hundredths of a second without any operation for a stall."""
    monkeypatch.setattr(Watchdog, "LOOK_EVERY_S", 0.01)


@pytest.mark.usefixtures("keen")
def test_turns_hold_what_was_drawn_and_what_was_put_in_and_no_tool_is_taken_for_a_stall() -> None:
    samples = samples_of(AskTwice([0.2]), {})
    model, _ = build_tiny("micro", seed=0)
    assert len(samples) == 6
    for sample in samples:
        first, put_in, second = sample.segments
        assert put_in.token_ids.tolist() == HINT and put_in.sampled is not None and not put_in.sampled.any()
        assert sample.outcome is not None and sample.outcome.reward == len(second.token_ids)
        ids = torch.from_numpy(np.concatenate([sample.prompt.token_ids, sample.token_ids]).astype(np.int64))
        with torch.no_grad():
            logprobs = model.eval()(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
        expected = logprobs[len(sample.prompt.token_ids) - 1 :]
        mask = sample.loss_mask
        assert mask is not None and mask.sum() == len(first.token_ids) + len(second.token_ids)
        np.testing.assert_allclose(sample.logprobs[mask], expected[mask], atol=1e-4)


def test_samples_do_not_depend_on_when_tools_return() -> None:
    quick, slow = (samples_of(AskTwice(tool_s), {}) for tool_s in ([0.0], [0.05, 0.0, 0.02]))
    for one, other in zip(quick, slow, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


def test_the_first_turn_draws_what_a_single_turn_draws_and_the_second_draws_anew() -> None:
    single, twice = samples_of(SingleTurn(), {}), samples_of(SameContextTwice(), {})
    for one, two in zip(single, twice, strict=True):
        first, second = two.segments
        assert one.token_ids.tolist() == first.token_ids.tolist()
        assert first.token_ids.tolist() != second.token_ids.tolist()
        assert second.parent == first.parent


def test_an_episode_asks_again_after_a_wrong_answer() -> None:
    first = samples_of(SingleTurn(), {})[0].text

    class TwoGuesses:
        async def run(self, prompt: Prompt, session: Session) -> float:
            context = prompt.token_ids.tolist()
            turn = await session.generate(context)
            async with session.waiting("the check"):
                is_right = await asyncio.to_thread(turn.text.__eq__, first)
            if is_right:
                return 1.0
            second = await session.generate([*context, *turn.token_ids.tolist(), *HINT])
            return 0.5 * (second.text == first)

    samples = samples_of(TwoGuesses(), {})
    assert [len(sample.segments) for sample in samples] == [1, 3, 3, 3, 3, 3]
    assert [sample.outcome and sample.outcome.reward for sample in samples] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_an_episode_that_raises_leaves_the_others_whole() -> None:
    class Breaks(AskTwice):
        async def run(self, prompt: Prompt, session: Session) -> float:
            if prompt.uid == "p1":
                raise OSError("the tool is gone")
            return await super().run(prompt, session)

    failures: dict[SampleKey, str] = {}
    samples = samples_of(Breaks([0.0]), failures)
    assert [sample.key.gid for sample in samples] == [0, 0, 2, 2]
    assert failures == {SampleKey(1, index): "OSError: the tool is gone" for index in range(2)}


def test_a_turn_that_the_engine_refuses_ends_its_sample_alone() -> None:
    class Refused(AskTwice):
        async def run(self, prompt: Prompt, session: Session) -> float:
            if prompt.uid == "p1":
                await session.generate(prompt.token_ids.tolist())
                await session.generate([70_000])
            return await super().run(prompt, session)

    failures: dict[SampleKey, str] = {}
    samples = samples_of(Refused([0.0]), failures)
    assert [sample.key.gid for sample in samples] == [0, 0, 2, 2]
    assert set(failures) == {SampleKey(1, 0), SampleKey(1, 1)}
    for reason in failures.values():
        assert reason.startswith(
            "UserError: the engine refused turn 1: token id 70000 is not in the model's vocabulary"
        )
