"""A graph of LangGraph as an episode: its chat model is the policy. Needs interlace[langgraph]."""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from interlace.core.errors import UserError
from interlace.core.messages import ToolSpec, to_mapping
from interlace.core.plugins import load_callable
from interlace.core.types import Prompt
from interlace.rollouts.base import Episode, Outcome, Session
from interlace.rollouts.config import EpisodeConfig, EpisodeKind

if TYPE_CHECKING:
    from interlace.agents.chat_model import PolicyChatModel


class LangGraphConfig(EpisodeConfig):
    """Settings of `langgraph`."""

    graph: str
    """A function of your own as package.module:function, called as function(model): a chat model of LangChain. Returns
    a compiled graph, or anything that runs with `ainvoke`, whose state has `messages`."""
    max_graph_steps: int = 25
    """Steps of a graph (its recursion limit); one more fails the sample."""


class LangGraphKind(EpisodeKind):
    """Kind of episodes that are graphs."""

    Config = LangGraphConfig
    needs_chat = True
    config: LangGraphConfig

    def check(self) -> None:
        """Makes the graph, which shows what is wrong with it."""
        _made(self.config.graph)

    def tools(self) -> tuple[ToolSpec, ...]:
        """Returns the tools that the graph binds to its model as it is made."""
        model, _ = _made(self.config.graph)
        return model.bound_tools

    def create(self) -> Episode:
        """Makes the graph, once for all episodes of a process."""
        return GraphEpisode(self.config)


class GraphEpisode:
    """Runs a graph on the prompt's messages.

    Where its last state has a number `reward`, that is the sample's; else the recipe's reward scores the last message.
    """

    def __init__(self, config: LangGraphConfig) -> None:
        self._config = config
        _, self._graph = _made(config.graph)

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Runs the graph to its end."""
        from interlace.agents.chat_model import SESSION

        token = SESSION.set((session, asyncio.get_running_loop()))
        try:
            state = await self._graph.ainvoke(
                {"messages": [to_mapping(message) for message in prompt.messages]},
                {
                    "recursion_limit": self._config.max_graph_steps,
                    "configurable": {"thread_id": f"{prompt.uid}#{session.seed}"},
                    "metadata": {"uid": prompt.uid},
                },
            )
        finally:
            SESSION.reset(token)
        return _outcome(state)


def _made(spec: str) -> "tuple[PolicyChatModel, Any]":
    """Makes a model and the graph around it. UserError where the function gives none."""
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


def _outcome(state: object) -> Outcome:
    if not isinstance(state, Mapping) or not state.get("messages"):
        raise TypeError("the graph's last state has no `messages`, of which the last one is the answer")
    reward, last = state.get("reward"), state["messages"][-1]
    text = last.content if isinstance(last.content, str) else str(last.text)
    return Outcome(reward=None if reward is None else float(reward), text=text)
