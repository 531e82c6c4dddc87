"""Episode with a graph of LangGraph whose chat model is the policy. Needs interlace[langgraph]."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interlace.core.errors import ContextFullError, UserError
from interlace.core.messages import ToolSpec, to_mapping
from interlace.core.plugins import load_callable
from interlace.core.types import FinishReason, Prompt
from interlace.rollouts.base import Episode, Outcome, Session
from interlace.rollouts.config import EpisodeConfig, EpisodeKind

if TYPE_CHECKING:
    from interlace.agents.chat_model import PolicyChatModel


class LangGraphConfig(EpisodeConfig):
    """Settings of `langgraph`."""

    graph: str
    """Your function as package.module:function, called as function(model) with a LangChain chat model. It returns a
    compiled graph, or any object with `ainvoke`, whose state has `messages`."""
    max_graph_steps: int = 25
    """Recursion limit of a graph, in steps; a longer run fails the sample."""


class LangGraphKind(EpisodeKind):
    """Kind of episodes that run graphs."""

    Config = LangGraphConfig
    needs_chat = True
    config: LangGraphConfig

    def check(self) -> None:
        _make_graph(self.config.graph)

    def tools(self) -> tuple[ToolSpec, ...]:
        """Returns the tools that the graph binds to its model when it is created."""
        model, _ = _make_graph(self.config.graph)
        return model.bound_tools

    def create(self) -> Episode:
        return GraphEpisode(self.config)


class GraphEpisode:
    """Runs a graph on the prompt's messages.

    If its last state has a number `reward`, this is the sample's reward; else the recipe's reward scores the last
    message. If the context is full, the recipe's reward scores the text so far; a graph whose state has a reward fails
    the sample.
    """

    def __init__(self, config: LangGraphConfig) -> None:
        self._config = config
        _, self._graph = _make_graph(config.graph)
        self._threads: set[str] = set()
        """Ids of threads that run, or that could not be deleted."""
        channels = getattr(self._graph, "output_channels", ())
        self._brings_reward = "reward" in ([channels] if isinstance(channels, str) else channels)
        """True if the graph's state has a `reward`, or an earlier episode brought one: an object that is no graph of
        LangGraph declares no state."""

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        from interlace.agents.chat_model import CLIENT, ModelClient

        thread = self._choose_thread(f"{prompt.uid}#{session.seed}")
        await self._delete_thread(thread)  # a killed run may have left one in a database
        client = ModelClient(session=session, loop=asyncio.get_running_loop())
        token = CLIENT.set(client)
        try:
            state = await self._graph.ainvoke(
                {"messages": [to_mapping(message) for message in prompt.messages]},
                {
                    "recursion_limit": self._config.max_graph_steps,
                    "configurable": {"thread_id": thread},
                    "metadata": {"uid": prompt.uid},
                },
            )
        except ContextFullError:
            if not client.turns or self._brings_reward:  # the recipe's reward may have another scale than the graph's
                raise
            return Outcome(finish_reason=FinishReason.LENGTH)
        finally:
            CLIENT.reset(token)
            if await self._delete_thread(thread):
                self._threads.remove(thread)
        outcome = _make_outcome(state)
        self._brings_reward |= outcome.reward is not None
        return outcome

    def _choose_thread(self, key: str) -> str:
        """Returns the first free id of a key: a checkpointer continues the conversation of an id that it has.

        The id is not random, so that graphs which derive a seed from it are repeatable.
        """
        thread = next(f"{key}#{place}" for place in itertools.count() if f"{key}#{place}" not in self._threads)
        self._threads.add(thread)
        return thread

    async def _delete_thread(self, thread: str) -> bool:
        """Deletes the conversation of an episode. Returns whether the graph has a checkpointer that can delete it."""
        delete = getattr(getattr(self._graph, "checkpointer", None), "adelete_thread", None)
        try:
            if delete:
                await delete(thread)
        except NotImplementedError:  # of the base class of checkpointers
            return False
        return delete is not None


def _make_graph(spec: str) -> "tuple[PolicyChatModel, Any]":
    """Creates a model and the graph with it. Raises UserError if the function returns no graph."""
    try:
        from interlace.agents.chat_model import PolicyChatModel
    except ImportError as error:
        raise UserError(f"episode langgraph needs LangGraph: pip install 'interlace[langgraph]' ({error}).") from None
    make: Callable[..., Any] = load_callable("graph", spec)
    model = PolicyChatModel()
    graph = make(model)
    if not hasattr(graph, "ainvoke"):
        kind = type(graph).__name__
        hint = " Call its compile()." if hasattr(graph, "compile") else ""
        raise UserError(f"graph {spec!r} returned a {kind}, which has no `ainvoke`.{hint}")
    return model, graph


def _make_outcome(state: object) -> Outcome:
    if not isinstance(state, Mapping) or not state.get("messages"):
        raise TypeError("the graph's last state has no `messages`, of which the last one is the answer")
    reward, last = state.get("reward"), state["messages"][-1]
    text = last.content if isinstance(last.content, str) else str(last.text)
    return Outcome(reward=None if reward is None else float(reward), text=text)
