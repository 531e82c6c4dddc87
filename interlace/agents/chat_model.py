"""The policy as a LangChain chat model. Needs interlace[langgraph]."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.messages.tool import tool_call
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

from interlace.agents.server.ask import Ask, calls_of, cut_before, merge_params
from interlace.agents.shown_messages import ShownMessages
from interlace.core.errors import UserError
from interlace.core.messages import Message, ToolSpec, as_message, as_tool
from interlace.rollouts.base import Session, Turn
from interlace.rollouts.session import DISTRIBUTION


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelClient:
    """The chat model's access to the session of one episode."""

    session: Session
    loop: asyncio.AbstractEventLoop
    shown: ShownMessages = field(default_factory=ShownMessages)
    """Answers that end before a stop text, or have calls that could not be read, which LangChain's messages lose."""
    turns: list[Turn] = field(default_factory=list)


CLIENT: ContextVar[ModelClient] = ContextVar("client")
"""Client of the current episode; tasks and threads of a graph's nodes inherit their episode's value."""


class PolicyChatModel(BaseChatModel):
    """Chat model whose answers the policy generates, in the session of the calling episode. It can bind tools."""

    _bound: list[ToolSpec] = PrivateAttr(default_factory=list)

    @property
    def bound_tools(self) -> tuple[ToolSpec, ...]:
        return tuple(self._bound)

    def bind_tools(  # house: the signature is LangChain's
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Returns the model with tools. Raises UserError for a choice that forces a call."""
        if tool_choice not in (None, "auto", "none"):
            raise UserError(f"tool_choice = {tool_choice!r}: a call cannot be forced; write auto or none.")
        specs = [as_tool(convert_to_openai_tool(tool)) for tool in tools]
        self._bound[:] = specs
        return self.bind(tools=specs if tool_choice != "none" else [], **kwargs)

    @property
    def _llm_type(self) -> str:
        return "interlace-policy"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's
        **kwargs: Any,
    ) -> ChatResult:
        """Generates an answer from another thread; the session belongs to the episode's loop.

        Raises UserError on the thread of that loop, because the wait for the answer would stop the whole run.
        """
        loop = _find_client().loop
        if asyncio._get_running_loop() is loop:
            raise UserError("an async node calls the policy's chat model by invoke(); write await model.ainvoke(...).")
        return asyncio.run_coroutine_threadsafe(self._agenerate(messages, stop, **kwargs), loop).result()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002 - LangChain's
        **kwargs: Any,
    ) -> ChatResult:
        client, ask = _find_client(), _read_options(stop or (), kwargs)
        params = merge_params(client.session.params, ask, keeps_distribution=True)
        given = client.shown.find_sampled([_read_message(each) for each in convert_to_openai_messages(messages)])
        turn = await client.session.generate(given, tools=ask.tools, params=params)
        client.turns.append(turn)
        message = cut_before(turn.message, ask.stop)
        if ask.one_call:
            message = replace(message, tool_calls=message.tool_calls[:1])
        client.shown.add(replace(message, tool_calls=calls_of(message)), turn.message)
        return ChatResult(generations=[ChatGeneration(message=_make_answer(message, turn))])


def _read_options(stop: Sequence[str], options: Mapping[str, Any]) -> Ask:
    """Reads the options of a call. The run's distribution applies to any call, as to requests of its programs.

    Raises UserError for an option that would have no effect.
    """
    known = ("tools", "max_tokens", "max_completion_tokens", "parallel_tool_calls", "seed", *DISTRIBUTION)
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - set(known)):
        raise UserError(
            f"the policy's chat model was called with {unknown[0]} = {given[unknown[0]]!r:.80}, which has no effect: "
            f"leave it out. Known options: stop, {', '.join(known)}."
        )
    return Ask(
        context=(),
        tools=tuple(given.get("tools", ())),
        max_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
        stop=tuple(stop),
        one_call=given.get("parallel_tool_calls") is False,
    )


def _find_client() -> ModelClient:
    try:
        return CLIENT.get()
    except LookupError:
        raise UserError("the policy's chat model answers only within an episode, and no episode is running.") from None


def _read_message(value: Any) -> Message:
    content = value.get("content")
    if isinstance(content, list):
        if any(not isinstance(part, str) and part.get("type") != "text" for part in content):
            raise UserError("a message has a part that is not text: only text can be read.")
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    return as_message({**value, "content": content})


def _make_answer(message: Message, turn: Turn) -> AIMessage:
    invalid = [
        {"type": "invalid_tool_call", "id": call.id, "name": call.name, "args": "", "error": call.error}
        for call in message.tool_calls
        if call.error
    ]
    return AIMessage(
        content=message.content,
        tool_calls=[tool_call(name=call.name, args=dict(call.arguments), id=call.id) for call in calls_of(message)],
        invalid_tool_calls=invalid,
        response_metadata={"finish_reason": str(turn.finish_reason), "turn": turn.number},
        usage_metadata={
            "input_tokens": len(turn.prompt_ids),
            "output_tokens": len(turn.token_ids),
            "total_tokens": len(turn.prompt_ids) + len(turn.token_ids),
        },
    )
