"""Episodes end if their context has no room for another turn."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from interlace.core.errors import ContextFullError
from interlace.core.messages import Message
from interlace.core.types import FinishReason
from interlace.rollouts.base import Turn
from interlace.rollouts.config import create_kind, parse_episode
from tests.support.scripted_session import ScriptedSession
from tests.unit.agents.episodes.test_frameworks import CALL, ROW, TWO, Rewarded


class Full(Rewarded):
    """A session whose context has no room after the first turn."""

    async def generate(self, *context: object, **options: object) -> Turn:
        if self.turns:
            raise ContextFullError("the context is full")
        return await super().generate(*context, **options)  # type: ignore[arg-type]


def grades(model: Any) -> Any:
    """A graph that asks three times and then writes a reward."""
    from langgraph.graph import START, MessagesState, StateGraph

    class State(MessagesState):
        reward: float

    async def think(state: State) -> Mapping[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"]), ("user", "again")], "reward": 0.5}

    graph = StateGraph(State)
    graph.add_sequence([("first", think), ("second", think), ("third", think)])
    graph.add_edge(START, "first")
    return graph.compile()


class Grader:
    """An object with `ainvoke` that writes a reward after two questions."""

    def __init__(self, model: Any) -> None:
        self.model = model

    async def ainvoke(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
        answers = [await self.model.ainvoke(state["messages"]) for _ in range(2)]
        return {"messages": answers, "reward": 0.5}


@pytest.mark.parametrize(
    "episode",
    [
        {"name": "environment", "environment": "tests.unit.agents.episodes.test_frameworks:Guess"},
        {"name": "second_guess"},
    ],
)
def test_an_episode_whose_context_is_full_keeps_the_rewards_so_far(episode: dict[str, object]) -> None:
    session = Full([Message(role="assistant", content="1")])
    outcome = asyncio.run(create_kind(parse_episode(episode)).create().run(ROW, session))
    assert (outcome.text, outcome.finish_reason) == ("1", FinishReason.LENGTH)


def test_a_graph_whose_context_is_full_ends() -> None:
    pytest.importorskip("langgraph")
    episode = create_kind(
        parse_episode({"name": "langgraph", "graph": "tests.unit.agents.episodes.test_frameworks:react"})
    ).create()
    outcome = asyncio.run(episode.run(ROW, Full([CALL])))
    assert (outcome.reward, outcome.finish_reason) == (None, FinishReason.LENGTH)


@pytest.mark.parametrize("name", ["grades", "Grader"])
def test_a_graph_with_its_own_reward_fails_if_its_context_is_full(name: str) -> None:
    """The recipe's reward scored it, in a group of rewards of another scale."""
    pytest.importorskip("langgraph")
    episode = create_kind(parse_episode({"name": "langgraph", "graph": f"{__name__}:{name}"})).create()
    if name == "Grader":  # it declares no state, so the first reward shows that it brings one
        assert asyncio.run(episode.run(ROW, ScriptedSession([TWO, TWO]))).reward == 0.5
    with pytest.raises(ContextFullError):
        asyncio.run(episode.run(ROW, Full([TWO])))
