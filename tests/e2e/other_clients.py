"""Unmodified clients of other projects that use the server of sessions. Runs in an environment with these clients."""

import asyncio
import sys
import types

import anthropic
import numpy as np
import openai
import verifiers.legacy as verifiers
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from datasets import Dataset
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from interlace.agents.server.app import SessionAddress, SessionServer, serving
from interlace.core.messages import Message, ToolCall
from interlace.core.types import Prompt
from interlace.rollouts.config import create_kind, parse_episode
from tests.support.scripted_session import ScriptedSession

CALL = Message(
    role="assistant", content="", tool_calls=(ToolCall(id="abcdefghi", name="add", arguments={"a": 1, "b": 2}),)
)
THREE = Message(role="assistant", content="3")
QUESTION = [{"role": "user", "content": "1+2"}]
ROLES = ["user", "assistant", "tool"]


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def roles(session: ScriptedSession) -> list[str]:
    """Roles of the last request's messages."""
    return [message.role for message in session.asked[-1][0]]


async def ask_by_anthropic(address: SessionAddress, session: ScriptedSession) -> None:
    client = anthropic.AsyncAnthropic(base_url=address.base_url.removesuffix("/v1"), api_key=address.api_key)
    tools = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
    first = await client.messages.create(model="any", max_tokens=10, messages=QUESTION, tools=tools)
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "3"}
    said = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    async with client.messages.stream(model="any", max_tokens=10, messages=said, tools=tools) as stream:
        assert (await stream.get_final_message()).content[0].text == "3"
    assert roles(session) == ROLES


async def ask_by_langchain(address: SessionAddress, session: ScriptedSession) -> None:
    model = ChatOpenAI(model="gpt-4o", base_url=address.base_url, api_key=address.api_key).bind_tools([add])
    first = await model.ainvoke("1+2")
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    second = await model.ainvoke([HumanMessage("1+2"), first, ToolMessage("3", tool_call_id=call["id"])])
    assert second.content == "3" and roles(session) == ROLES


async def ask_by_agents(address: SessionAddress, session: ScriptedSession, model: type) -> None:
    client = openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key)
    agent = Agent(name="adder", tools=[function_tool(add)], model=model(model="gpt", openai_client=client))
    assert (await Runner.run(agent, "1+2")).final_output == "3"
    assert roles(session) == ROLES


async def run_verifiers() -> None:
    def load_environment() -> object:
        def right(completion: list, answer: str) -> float:
            return float(completion[-1]["content"] == answer)

        data = Dataset.from_list([{"question": "1+2", "answer": "3"}])
        return verifiers.SingleTurnEnv(dataset=data, rubric=verifiers.Rubric(funcs=[right]))

    package = types.ModuleType("own_sums")
    package.load_environment = load_environment
    sys.modules["own_sums"] = package
    messages = (Message(role="user", content="1+2"),)
    row = Prompt(uid="x", token_ids=np.arange(3, dtype=np.int32), text="", answer="3", messages=messages)
    episode = create_kind(parse_episode({"name": "environment", "verifiers": "own-sums"})).create()
    outcome = await episode.run(row, ScriptedSession([THREE]))
    assert outcome.reward == 1.0 and outcome.parts["right"] == 1.0


async def main() -> None:
    """Asks by each client in a session of its own."""
    set_tracing_disabled(True)
    server = SessionServer()
    async with serving(server):
        for ask, *more in (
            (ask_by_anthropic,),
            (ask_by_langchain,),
            (ask_by_agents, OpenAIResponsesModel),
            (ask_by_agents, OpenAIChatCompletionsModel),
        ):
            session = ScriptedSession([CALL, THREE])
            _, address = server.open(session)
            await ask(address, session, *more)
    await run_verifiers()
    print("all were served")


if __name__ == "__main__":
    asyncio.run(main())
