"""Graphs and environments run as episodes, with the expected requests to the policy and rewards."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolCall
from interlace.core.types import JSON, Prompt
from interlace.rollouts.base import Outcome, Turn
from interlace.rollouts.config import create_kind, parse_episode
from tests.support.scripted_session import ScriptedSession

ROW = Prompt(
    uid="sums/3", token_ids=np.arange(3, dtype=np.int32), text="", answer="2", metadata={"level": 4},
    messages=(Message(role="user", content="1+1"),),
)  # fmt: skip
CALL = Message(
    role="assistant", content="", tool_calls=(ToolCall(id="000000001", name="add", arguments={"a": 1, "b": 1}),)
)
TWO = Message(role="assistant", content="2")


class Rewarded(ScriptedSession):
    """A scripted session that keeps the rewards of turns."""

    def reward(self, turn: Turn, value: float) -> None:
        self.asked.append(([turn.number, value], [], self.params))


def play(session: ScriptedSession, **settings: object) -> tuple[float | None, str | None]:
    """The reward and the text of an episode."""
    found = asyncio.run(asyncio.wait_for(create_kind(parse_episode(settings)).create().run(ROW, session), 20))
    return found.reward, found.text


def react(model: Any) -> Any:
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    bound = model.bind_tools([add])

    async def think(state: MessagesState) -> Mapping[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


def sync_graph(model: Any) -> Any:
    """A graph whose node is no coroutine, with a reward in its state."""
    from langgraph.graph import END, START, MessagesState, StateGraph

    class State(MessagesState):
        reward: float

    def answer(state: State) -> Mapping[str, Any]:
        return {"messages": [model.invoke(state["messages"], stop=["!"])], "reward": 0.5}

    graph = StateGraph(State)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    return graph.compile()


def observes(model: Any) -> Any:
    """A graph that acts by text."""
    from langgraph.graph import START, MessagesState, StateGraph

    async def think(state: MessagesState) -> Mapping[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"], stop=["\nObservation:"])]}

    async def act(state: MessagesState) -> Mapping[str, Any]:
        return {"messages": [("user", f"Observation: after {state['messages'][-1].content}")]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([("first", think), ("act", act), ("second", think)])
    graph.add_edge(START, "first")
    return graph.compile()


def limits(model: Any) -> Any:
    """A graph that bounds its answer, and sets an option that has no effect."""
    from langgraph.graph import START, MessagesState, StateGraph

    bound = model.bind_tools([], parallel_tool_calls=False)

    async def think(state: MessagesState) -> Mapping[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"], max_tokens=8, temperature=0)]}

    async def force(state: MessagesState) -> Mapping[str, Any]:
        assert len(state["messages"][-1].tool_calls) == 1
        return {"messages": [await model.ainvoke(state["messages"], response_format={"type": "json_object"})]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([("think", think), ("force", force)])
    graph.add_edge(START, "think")
    return graph.compile()


def insists(model: Any) -> Any:
    """A graph that asks three times."""
    from langgraph.graph import START, MessagesState, StateGraph

    async def think(state: MessagesState) -> Mapping[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"]), ("user", "again")]}

    graph = StateGraph(MessagesState)
    graph.add_sequence([("first", think), ("second", think), ("third", think)])
    graph.add_edge(START, "first")
    return graph.compile()


def blocks(model: Any) -> Any:
    """A graph whose coroutine calls the model without await."""
    from langgraph.graph import START, MessagesState, StateGraph

    async def think(state: MessagesState) -> Mapping[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_edge(START, "think")
    return graph.compile()


def remembers(model: Any) -> Any:
    """A graph with a checkpointer."""
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph

    async def think(state: MessagesState) -> Mapping[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_edge(START, "think")
    return graph.compile(checkpointer=InMemorySaver())


def not_compiled(model: Any) -> Any:
    from langgraph.graph import MessagesState, StateGraph

    return StateGraph(MessagesState)


def test_a_graph_calls_its_tools_and_its_last_message_is_scored() -> None:
    pytest.importorskip("langgraph")
    session = ScriptedSession([CALL, TWO])
    assert play(session, name="langgraph", graph=f"{__name__}:react") == (None, "2")
    (first, tools, _), (second, _, _) = session.asked
    assert first == [Message(role="user", content="1+1")] and [tool.name for tool in tools] == ["add"]
    assert second[1].tool_calls == CALL.tool_calls
    assert (second[2].role, second[2].content, second[2].tool_call_id) == ("tool", "2", "000000001")
    kind = create_kind(parse_episode({"name": "langgraph", "graph": f"{__name__}:react"}))
    assert [(tool.name, tool.description) for tool in kind.tools()] == [("add", "Adds two numbers.")]


def test_a_graph_continues_an_answer_of_which_one_call_could_not_be_read() -> None:
    """The message came back without the call, so that the next turn began a branch in which the model never made it."""
    pytest.importorskip("langgraph")
    unreadable = ToolCall(id="000000002", name="", error="The call is not valid JSON.")
    answer = Message(role="assistant", content="", tool_calls=(*CALL.tool_calls, unreadable))
    session = ScriptedSession([answer, TWO])
    assert play(session, name="langgraph", graph=f"{__name__}:react") == (None, "2")
    assert session.asked[1][0][1] == answer


def test_answers_that_look_the_same_to_a_graph_keep_their_order() -> None:
    """The first of two answers with an unreadable call came back as the second one, so that each turn was a branch."""
    pytest.importorskip("langgraph")
    answers = [
        Message(role="assistant", content="", tool_calls=(ToolCall(id=f"00000000{place}", name=name, error="no JSON"),))
        for place, name in enumerate(["add", "sum"])
    ]
    session = ScriptedSession([*answers, TWO])
    play(session, name="langgraph", graph=f"{__name__}:insists")
    assert [message for message in session.asked[2][0] if message.role == "assistant"] == answers


def test_a_sync_node_asks_from_its_thread_and_the_state_may_hold_the_reward() -> None:
    pytest.importorskip("langgraph")
    session = ScriptedSession([TWO])
    assert play(session, name="langgraph", graph=f"{__name__}:sync_graph") == (0.5, "2")
    assert session.asked[0][2].stop == ("!",)


def test_episodes_side_by_side_ask_in_their_own_sessions() -> None:
    pytest.importorskip("langgraph")
    episode = create_kind(parse_episode({"name": "langgraph", "graph": f"{__name__}:react"})).create()
    sessions = [ScriptedSession([CALL, Message(role="assistant", content=str(place))]) for place in range(5)]

    async def together() -> list[Outcome]:
        return await asyncio.gather(*(episode.run(ROW, session) for session in sessions))

    assert [outcome.text for outcome in asyncio.run(together())] == list("01234")


def test_options_of_the_chat_model_are_used_or_refused() -> None:
    """A graph's limit of tokens had no effect, nor had its wish for one call and for JSON."""
    pytest.importorskip("langgraph")
    two_calls = replace(CALL, tool_calls=(*CALL.tool_calls, replace(CALL.tool_calls[0], id="000000002")))
    session = ScriptedSession([two_calls])
    with pytest.raises(UserError, match=r"called with response_format = .*, which has no effect"):
        play(session, name="langgraph", graph=f"{__name__}:limits")
    [(_, _, params)] = session.asked
    assert params == session.params.model_copy(update={"max_new_tokens": 8}), "the run's temperature applies"


def test_an_answer_of_the_chat_model_ends_before_its_stop_text_and_continues_as_it_was_sampled() -> None:
    """An agent that stops at `Observation:` read this word twice."""
    pytest.importorskip("langgraph")
    sampled = Message(role="assistant", content="Action: add\nObservation:")
    session = ScriptedSession([sampled, TWO])
    assert play(session, name="langgraph", graph=f"{__name__}:observes") == (None, "2")
    assert session.asked[1][0][1:] == [sampled, Message(role="user", content="Observation: after Action: add")]


def test_a_coroutine_that_calls_the_model_without_await_is_refused() -> None:
    """It waited on the thread of the event loop for an answer from this loop, so that the whole run hung."""
    pytest.importorskip("langgraph")
    with pytest.raises(UserError, match=r"write await model\.ainvoke"):
        play(ScriptedSession([TWO]), name="langgraph", graph=f"{__name__}:blocks")


def test_a_graph_with_a_checkpointer_begins_each_episode_anew() -> None:
    """The second evaluation of a row began with the conversation of the first, and its answer."""
    pytest.importorskip("langgraph")
    episode = create_kind(parse_episode({"name": "langgraph", "graph": f"{__name__}:remembers"})).create()
    for _ in range(2):
        session = ScriptedSession([TWO])
        asyncio.run(episode.run(ROW, session))
        assert session.asked[0][0] == [Message(role="user", content="1+1")]


def test_threads_of_a_graph_have_repeatable_ids_and_leave_nothing_in_its_checkpointer() -> None:
    """Each episode stayed in memory, and a graph that derived a seed from its thread was not repeatable."""
    pytest.importorskip("langgraph")
    episode: Any = create_kind(parse_episode({"name": "langgraph", "graph": f"{__name__}:remembers"})).create()
    storage = episode._graph.checkpointer.storage

    async def run_two() -> set[str]:
        sessions = [ScriptedSession([TWO], go=asyncio.Event()) for _ in range(2)]
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(episode.run(ROW, session))
            async with asyncio.timeout(15):
                while len(storage) < 2:
                    await asyncio.sleep(0.01)
            threads = {str(thread) for thread in storage}
            for session in sessions:
                session.go.set()
        return threads

    for _ in range(2):
        assert asyncio.run(run_two()) == {"sums/3#7#0", "sums/3#7#1"}
        assert not storage


def test_a_graph_that_is_not_compiled_is_refused() -> None:
    pytest.importorskip("langgraph")
    with pytest.raises(UserError, match=r"has no `ainvoke`\. Call its compile\(\)"):
        create_kind(parse_episode({"name": "langgraph", "graph": f"{__name__}:not_compiled"})).check()


class Guess:
    """Says whether a guess is right; three at most."""

    tools: ClassVar = [{"name": "hint", "parameters": {"type": "object", "properties": {}}}]

    def __init__(self, most: int = 3) -> None:
        self.left = most

    async def reset(self, row: Mapping[str, JSON]) -> list[Mapping[str, str]]:
        self.answer = row["answer"]
        return [{"role": "user", "content": f"guess at level {row['level']}"}]

    def step(self, message: Message) -> tuple[list[Mapping[str, str]], float, bool]:
        self.left -= 1
        right = message.content == self.answer
        return [{"role": "user", "content": "no"}], float(right), right or not self.left


class Meeting(Guess):
    """Environment whose step waits for the step of another episode."""

    both = threading.Barrier(2)

    def step(self, message: Message) -> tuple[list[Mapping[str, str]], float, bool]:
        self.both.wait(5)
        return [], 1.0, True


class Taking(Guess):
    """Environment that changes the row that it gets."""

    async def reset(self, row: Any) -> list[Mapping[str, str]]:
        row["cases"].append(row["cases"].pop()["left"].pop())
        return await super().reset(row)


def take_row(row: Any, _base_url: str, _api_key: str) -> float:
    return float(row["cases"].pop()["left"].pop())


class NoStep:
    def reset(self, row: Mapping[str, JSON]) -> None: ...


class EndlessSilence(Guess):
    def step(self, message: Message) -> tuple[list[Mapping[str, str]], float, bool]:
        return [], 0.0, False


def test_an_environment_speaks_in_turn_and_rewards_turns() -> None:
    session = Rewarded([Message(role="assistant", content="1"), TWO])
    assert play(session, name="environment", environment=f"{__name__}:Guess") == (0.0, "2")
    assert session.asked[0][0] == [Message(role="user", content="guess at level 4")]
    assert [tool.name for tool in session.asked[0][1]] == ["hint"]
    kind = create_kind(parse_episode({"name": "environment", "environment": f"{__name__}:Guess"}))
    assert [tool.name for tool in kind.tools()] == ["hint"], "prompts list them, and the chat template must write them"
    assert [message.content for message in session.asked[1][0]] == ["guess at level 4", "1", "no"]
    assert session.asked[2][0] == [1, 1.0]  # the second turn, rewarded


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "environment", "environment": f"{__name__}:Taking"},
        {"name": "program", "function": f"{__name__}:take_row"},
    ],
)
def test_an_episode_that_changes_its_row_does_not_change_that_of_other_samples(settings: dict[str, object]) -> None:
    """The samples of a prompt have one row, and so do later steps: each later episode failed."""
    row = replace(ROW, metadata={"level": 4, "cases": [{"left": [1]}]})
    episode = create_kind(parse_episode(settings)).create()
    for _ in range(2):
        asyncio.run(asyncio.wait_for(episode.run(row, Rewarded([TWO])), 20))
    assert row.metadata == {"level": 4, "cases": [{"left": [1]}]}


def test_steps_of_environments_do_not_wait_for_threads_of_the_event_loop() -> None:
    episode = create_kind(parse_episode({"name": "environment", "environment": f"{__name__}:Meeting"})).create()

    async def together() -> list[Outcome]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return await asyncio.gather(*(episode.run(ROW, Rewarded([TWO])) for _ in range(2)))

    assert [outcome.text for outcome in asyncio.run(together())] == ["2", "2"]


def test_an_environment_ends_at_its_own_limit() -> None:
    session = Rewarded([TWO])
    play(session, name="environment", environment=f"{__name__}:Guess", options={"most": 1})
    assert len(session.turns) == 1


def test_an_environment_without_a_limit_ends_after_the_turns_of_the_episode() -> None:
    """The sample failed, so that a run trained on solved samples alone."""
    session = Rewarded([Message(role="assistant", content="1")] * 9)
    options = {"most": 99}
    assert play(session, name="environment", environment=f"{__name__}:Guess", options=options, max_turns=2) == (
        0.0,
        "1",
    )
    assert len(session.turns) == 2


def test_environments_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="has no method `step`"):
        create_kind(parse_episode({"name": "environment", "environment": f"{__name__}:NoStep"})).check()
    with pytest.raises(UserError, match="set one of `environment` and `verifiers`"):
        parse_episode({"name": "environment"})
    with pytest.raises(ValueError, match="no new message for the model"):
        play(Rewarded([TWO]), name="environment", environment=f"{__name__}:EndlessSilence")
