"""What an episode does wrong fails its sample, with the reason."""

import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from interlace.core.errors import InterlaceError
from interlace.core.types import Prompt
from interlace.rollouts.base import Outcome, Session
from interlace.rollouts.generate import outcome_of
from interlace.schedule.schedule import Schedule
from tests.support.sim_run import simulate
from tests.unit.rollouts.test_episodes import WORK, Calls


async def _no_turn(_prompt: Prompt, _session: Session) -> None:
    pass


async def _text(prompt: Prompt, session: Session) -> float:
    await session.generate(prompt.token_ids.tolist())
    return "right"  # type: ignore[return-value]  # on purpose


async def _not_finite(prompt: Prompt, session: Session) -> float:
    await session.generate(prompt.token_ids.tolist())
    return math.nan


def _returns(outcome: Outcome) -> Callable[[Prompt, Session], Awaitable[Outcome]]:
    async def run(prompt: Prompt, session: Session) -> Outcome:
        session.reward(await session.generate(prompt.token_ids.tolist()), 3e38)
        return outcome

    return run


async def _raises_half(_prompt: Prompt, _session: Session) -> None:
    raise ValueError("a\ud83d")


async def _no_tokens(_prompt: Prompt, session: Session) -> None:
    await session.generate([])


async def _words(_prompt: Prompt, session: Session) -> None:
    await session.generate(["a"])  # type: ignore[list-item]  # on purpose


async def _same_number(prompt: Prompt, session: Session) -> None:
    for _ in range(2):
        await session.generate(prompt.token_ids.tolist(), number=3)


async def _withdraws_twice(prompt: Prompt, session: Session) -> None:
    turn = await session.generate(prompt.token_ids.tolist())
    for _ in range(2):
        session.withdraw(turn)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (_withdraws_twice, "UserError: turn 0 is withdrawn, and the episode has no such turn"),
        (_no_turn, "ValueError: the episode ended without a turn"),
        (_text, "TypeError: the episode returned a str"),
        (_not_finite, "ValueError: the episode's reward is nan"),
        (_returns(Outcome(reward=1e300)), "ValueError: the episode's reward is 1e+300, not a finite number"),
        (_returns(Outcome(reward=3e38)), "ValueError: the sum of the episode's rewards is 6e+38, not a finite number"),
        (_returns(Outcome(reward=1.0, parts={"found": None})), "ValueError: the episode's part 'found' is None"),
        (_returns(Outcome(reward=1.0, parts={"mean": 2.0})), "UserError: the episode returned a part 'mean'"),
        (_returns(Outcome(parts={5: 2.0})), "TypeError: the name of the episode's part 5 is a int, not a text"),  # type: ignore[dict-item]
        (_returns(Outcome(text=5)), "TypeError: the text of the episode's Outcome is a int"),  # type: ignore[arg-type]
        (
            _returns(Outcome(valid={0: np.ones(99, np.bool_)})),
            "ValueError: Outcome.valid has an array of type bool and shape (99,)",
        ),
        (
            _returns(Outcome(valid={3: np.ones(1, np.bool_)})),
            "ValueError: Outcome.valid has an array for turn 3; the turns are [0]",
        ),
        (_raises_half, "ValueError: a\\ud83d"),
        (_no_tokens, "UserError: generate() was given a list that is not a list of token ids"),
        (_words, "UserError: generate() was given a list that is not a list of token ids"),
        (_same_number, "UserError: turn 3 was requested before"),
    ],
)
def test_what_an_episode_does_wrong_is_its_samples_reason(
    run: Callable[[Prompt, Session], Awaitable[float | None]], reason: str
) -> None:
    with pytest.raises(InterlaceError, match=f"the first 12 samples, .*The first failed by {re.escape(reason)}"):
        simulate(Schedule(), replace(WORK, num_steps=1, refill_rounds=0, episode=Calls(run)))


def test_half_of_a_character_in_the_text_of_an_episode_is_spelled_out() -> None:
    """No file accepts it, so that the run ended at its first evaluation or transcript."""
    assert outcome_of(Outcome(reward=1.0, text="a\ud83d")).text == "a\\ud83d"
