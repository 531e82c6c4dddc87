"""ReAct agent in LangGraph: it thinks, calls the calculator, and thinks again.

The recipe `react` trains it: `episode: {name: langgraph, graph: "interlace.agents.examples.react_graph:graph"}`.
Needs interlace[langgraph].
"""

from typing import Any

from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from interlace.agents.tools.calculator import calculator as compute


@tool
def calculator(expression: str) -> str:
    """Computes an arithmetic expression."""
    return compute(expression)


def graph(model: Any) -> Any:
    """Returns the compiled graph; `model` is the policy."""
    bound = model.bind_tools([calculator])

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    agent = StateGraph(MessagesState)
    agent.add_node("think", think)
    agent.add_node("tools", ToolNode([calculator], handle_tool_errors=True))  # the model reads the error of its call
    agent.add_edge(START, "think")
    agent.add_conditional_edges("think", tools_condition)
    agent.add_edge("tools", "think")
    return agent.compile()
