"""Episodes of the v1 interface of verifiers 0.4 over sessions. test_verifiers_tasks.py runs this script."""

import asyncio
import sys
from pathlib import Path

import numpy as np

from interlace.core.errors import UserError
from interlace.core.messages import Message
from interlace.core.types import Prompt
from interlace.rollouts.config import create_kind, parse_episode
from tests.support.scripted_session import ScriptedSession

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments"


def row(text: str, answer: str = "", **metadata: object) -> Prompt:
    messages = (Message(role="user", content=text),)
    ids = np.arange(3, dtype=np.int32)
    return Prompt(uid="x", token_ids=ids, text=text, answer=answer, messages=messages, metadata=metadata)  # type: ignore[arg-type]


def create(name: str, **options: object) -> object:
    config = parse_episode({"name": "environment", "verifiers": name, "options": options})
    return create_kind(config).create()


def said(text: str) -> ScriptedSession:
    return ScriptedSession([Message(role="assistant", content=text)])


async def own_taskset() -> None:
    episode = create("own-sums-v1")
    right = await episode.run(row("unused", idx=2), said("4"))
    assert (right.reward, right.parts["letters"]) == (1.0, 1.0), right
    wrong = await episode.run(row("1+2", answer="3"), said("5"))
    assert wrong.reward == 0.0, wrong
    try:
        await episode.run(row("unused", idx=9), said("4"))
    except UserError as error:
        assert "no such task" in str(error)
    else:
        raise AssertionError("a task that does not exist was run")
    try:
        await episode.run(row("unused", idx=2), said("unreadable"))
    except RuntimeError as error:
        assert "no number" in str(error), error
    else:
        raise AssertionError("an episode of which one reward failed had the reward of the others")
    print("own-sums-v1: a task by its index, and one from a row")


async def best_of_n() -> None:
    """An environment that the package ships: several attempts at a task of any taskset."""
    episode = create("own-sums-v1", id="best-of-n", n=2)
    session = ScriptedSession([Message(role="assistant", content=text) for text in ("4", "5")])
    outcome = await episode.run(row("unused", idx=2), session)
    assert outcome.reward == 0.5 and not outcome.valid, outcome
    print("best-of-n: two attempts, the mean of their rewards")


async def user_sim() -> None:
    """An environment of two agents, of which one plays the user: its turns are not trained."""
    agents = {name: {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}} for name in ("user", "assistant")}
    episode = create("own-sums-v1", id="user-sim", **agents)
    session = ScriptedSession([Message(role="assistant", content=text) for text in ("2+2?", "4", "###DONE###")])
    outcome = await episode.run(row("unused", idx=2), session)
    assert outcome.reward == 1.0, outcome
    assert {number: mask.tolist() for number, mask in outcome.valid.items()} == {0: [False] * 3, 2: [False] * 3}
    print("user-sim: the turns of the user are not trained")


def unknown() -> None:
    try:
        create("no-such-environment")
    except UserError as error:
        assert "no-such-environment" in str(error) and "0.4" in str(error)
        print("an unknown package is refused")


async def main() -> None:
    sys.path.insert(0, str(ENVIRONMENTS))
    unknown()
    await own_taskset()
    await best_of_n()
    await user_sim()
    print("all environments ran")


if __name__ == "__main__":
    asyncio.run(main())
