"""The renderer of any Hugging Face chat template. It appends each turn to the existing tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from interlace.core.errors import UserError
from interlace.core.messages import Message, Messages, ToolCall, ToolSpec, to_mapping, tool_mapping
from interlace.core.types import JSON, IntArray
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.parsers.base import MarkedText, Parser, split_thought
from interlace.rollouts.rendering.proof import Kind, Proof, prove
from interlace.rollouts.rendering.text import TokenText, longest_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_VARIANTS = 16
"""Maximum number of cached renderers for requests with variables of the template."""
MOST_WRITTEN = 256
"""Maximum number of kinds of conversations for which a renderer stores that its template writes the tools."""
MARKS = tuple(map(chr, range(0xE002, 0xE042)))
"""Private characters. One that the messages after an answer do not contain is the placeholder for the content of the
answer: the rendered text after it is the text that a turn adds."""
TOOLS_HEAD = (
    "You may call functions to answer. They are described within <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write its name and arguments as JSON:\n<tool_call>\n{{"name": NAME, "arguments": ARGUMENTS}}\n'
    "</tool_call>"
)
"""Description of tools for templates without tools: they are called and answered in plain text."""


class Renderer:
    """Renders conversations as tokens of one model, and parses its answers. Conversations may share a renderer.

    It renders only the messages after an answer, so no tokens are tokenized again.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        parser: Parser,
        config: RendererConfig,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """stop_token_ids: further ones than the tokenizer's and the template's. One that is text, or a tag of the
        parser such as </tool_call>, is part of the answer. Raises UserError without a template.
        """
        if not tokenizer.chat_template:
            raise UserError(
                "the tokenizer has no chat template, and messages need one. Take an instruct model or its tokenizer "
                "(model.tokenizer)."
            )
        self._tokenizer, self._parser, self._config = tokenizer, parser, config
        self._text = TokenText(tokenizer)
        self.longest_token = longest_token(tokenizer)
        """Upper bound of the characters that one token stands for."""
        self._variants: dict[str, Renderer] = {}
        """Cached renderers with further variables of the template, in order of use."""
        self._written_tools: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()
        """Roles of messages and names of tools of conversations into which the template writes the tools."""
        self._written_parts: frozenset[str] = frozenset()
        """Parts of answers that the template is known to write."""
        self._calls_are_text = False
        """True if the template requires the arguments of a call as JSON text."""
        self._no_tools: list[dict[str, JSON]] | None = None
        """Argument `tools` of the template for conversations without tools."""
        said = [Message(role="user", content="a"), Message(role="assistant", content=MARKS[0])]
        try:
            self.text(said, (), prompts=False)
        except UserError:
            self._no_tools = []  # for templates such as Hermes' that iterate over the tools in any case
        end = self.text(said, (), prompts=False).rpartition(MARKS[0])[2]
        self._closing = next((tag for tag in self._text.tags if end.startswith(tag)), "")
        """Tag that ends an answer. Empty if the tag of the next message ends it."""
        ends = {tokenizer.eos_token_id, self._text.tags.get(self._closing)}
        others = self._text.special_ids & set(stop_token_ids) - {self._text.tags.get(tag) for tag in parser.tags}
        self.stop_token_ids = tuple(sorted({*others, *[int(end) for end in ends if end is not None]}))
        """Tokens that end an answer."""
        self._opens_thought = self._ends_in_thought()
        self.proof: Proof = prove(self)
        """Kinds of turns that can be appended under this template."""

    def variant(self, variables: Mapping[str, JSON]) -> "Renderer":
        """Returns the renderer with further variables for the template: the same object for the same variables."""
        merged = {**self._config.chat_template_kwargs, **variables}
        if merged == self._config.chat_template_kwargs:
            return self
        name = json.dumps(merged, sort_keys=True, default=str)
        found = self._variants.pop(name, None)
        if found is None:
            config = RendererConfig.parse({**self._config.model_dump(), "chat_template_kwargs": merged})
            found = Renderer(self._tokenizer, self._parser, config, self.stop_token_ids)
        self._variants[name] = found
        for oldest in list(self._variants)[:-MOST_VARIANTS]:
            self._variants.pop(oldest, None)
        return found

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompts: bool = True) -> str:
        """Renders a conversation as text, with masked tags of users. Raises UserError if the template refuses it.

        prompts: whether the text ends with the beginning of the next answer.
        """
        if self._config.tools == "prompt":
            messages, tools = _write_out_tools(messages, tools), ()
        as_text = self._calls_are_text
        try:
            return self._apply_template(messages, tools, prompts=prompts, as_text=as_text)
        except UserError:
            if as_text or not any(message.tool_calls for message in messages):
                raise
            found = self._apply_template(messages, tools, prompts=prompts, as_text=True)
            self._calls_are_text = True  # only after a success: other threads render conversations meanwhile
            return found

    def _apply_template(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, prompts: bool, as_text: bool
    ) -> str:
        from interlace.data.chat_template_limits import ChatTemplateError, render_chat  # imports jinja

        # The content of an answer keeps its tags.
        written = [self._text.hold_message(to_mapping(message, as_text=as_text)) for message in messages]
        shown = [cast(dict[str, JSON], self._text.hold(tool_mapping(tool))) for tool in tools]
        try:
            return render_chat(
                self._tokenizer,
                written,
                tools=shown or self._no_tools,
                add_generation_prompt=prompts,
                variables=self._config.chat_template_kwargs,
            )
        except ChatTemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise UserError(
                f"the tokenizer's chat template cannot be applied to messages of {roles}: {error}. Change the messages."
            ) from None

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Writes a whole conversation and the beginning of the answer.

        Raises UserError if the template refuses it or leaves out all tools.
        """
        text = self.text(messages, tools)
        if tools:
            self._check_tools_written(text, messages, tools)
        return self._text.encode(text)

    def _check_tools_written(self, text: str, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
        """Raises UserError unless a rendered text has names of tools that do not come from its messages.

        The test renders the conversation again, so it is made once for conversations with equal roles and tools.
        """
        kind = tuple(message.role for message in messages), tuple(tool.name for tool in tools)
        if kind in self._written_tools:
            return
        try:
            without = self.text(messages, ())
        except UserError:
            without = ""
        if not any(text.count(tool.name) > without.count(tool.name) for tool in tools):
            names = ", ".join(tool.name for tool in tools)
            raise UserError(
                f"the tokenizer's chat template writes no tools, so that the model would not know {names}. Set "
                "renderer.tools=prompt, which describes them in the system message, or take a model that knows tools."
            )
        self._written_tools = {*self._written_tools, kind} if len(self._written_tools) < MOST_WRITTEN else {kind}

    def answer(self, messages: Sequence[Message], answer: Message, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Writes an answer to `messages` as the model would sample it, including its end token: an example.

        Raises UserError for an answer that has text after the end token, which a model could not sample.
        """
        begin = self.text(messages, tools)
        whole = self.text([*messages, answer], tools, prompts=False)
        if not whole.startswith(begin):
            raise UserError(
                "the chat template changes the text of a conversation when an answer follows, so examples cannot be "
                "rendered with it. Take another model, or examples that are text."
            )
        said, closing, rest = (
            whole[len(begin) :].partition(self._closing) if self._closing else (whole[len(begin) :], "", "")
        )
        if closing and closing in rest and rest.replace(closing, "").strip():
            raise UserError(
                f"the text of an answer continues after {closing!r}, with which this chat template ends an answer, so "
                "the model would stop there. Remove the tag from the text, or give the further messages separately."
            )
        end = [] if closing else [int(self._tokenizer.eos_token_id)]
        return [*self._text.encode_after(begin, said + closing), *end]

    def check_written(
        self, messages: Sequence[Message], answer: Message, tools: Sequence[ToolSpec], drawn: Sequence[int]
    ) -> None:
        """Raises UserError if the template leaves out the thoughts or the calls of an answer. drawn: from answer().

        The test renders the answer again, so it is made until a template has written each of them once.
        """
        parts = {
            "thoughts": replace(answer, reasoning=None) if (answer.reasoning or "").strip() else None,
            "calls": replace(answer, tool_calls=()) if answer.tool_calls else None,
        }
        for part, without in parts.items():
            if without is None or part in self._written_parts:
                continue
            try:
                rest = self.answer(messages, without, tools)
            except UserError:  # Nemotron 3 begins each answer with a thought, and refuses one without.
                rest = []
            if rest == drawn:
                raise UserError(
                    f"the tokenizer's chat template leaves out the {part} of an answer, so that the model would not "
                    f"learn them. Write the {part} into the text of the answer, or take a model whose template has "
                    "them."
                )
            self._written_parts |= {part}

    def parse(
        self, token_ids: Sequence[int], *, prompt_ids: Sequence[int] | IntArray = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        """Reads an answer: content, reasoning, tool calls. prompt_ids: the context of the answer."""
        found = self._parser.parse(self._cut_answer(token_ids), tools, in_thought=self._opens_thought)
        first = len(prompt_ids) % 10**7
        calls = [replace(call, id=f"{first:07d}{place % 100:02d}") for place, call in enumerate(found.calls)]
        return Message(
            role="assistant", content=found.content, reasoning=found.reasoning or None, tool_calls=tuple(calls)
        )

    def read_answer(self, token_ids: Sequence[int]) -> str:
        """Reads the text of an answer after its reasoning, with the calls as the model wrote them."""
        answer = self._cut_answer(token_ids)
        text, tags = answer.text, self._parser.thoughts
        if tags:
            text = split_thought(answer, tags, in_thought=self._opens_thought)[1]
        return answer.plain(text).strip()

    def begun(self, token_ids: Sequence[int], *, tools: Sequence[ToolSpec] = ()) -> Message:
        """Reads an incomplete answer: the reasoning and the content that no further token can change, without calls.

        The content of the complete answer begins with this content, except for an incomplete character at its end.
        """
        found = self._parser.begun(self._cut_answer(token_ids), tools, in_thought=self._opens_thought)
        return Message(role="assistant", content=found.content, reasoning=found.reasoning or None)

    def _cut_answer(self, token_ids: Sequence[int]) -> MarkedText:
        """Returns the text of an answer, without the tokens that end it."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self._text.marked(ids, self._parser.tags)

    def extend(
        self,
        previous_ids: Sequence[int],
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Appends `new_messages` to tokens that end with an answer of the model.

        answer: the message that was read from these tokens. An answer that was cut gets the tokens that close it.
        Returns the whole context, which begins with `previous_ids`; None if the template requires that the whole
        conversation is written again.
        """
        kinds: set[Kind] = {"tool" if message.role == "tool" else "user" for message in new_messages}
        if not new_messages or any(message.role == "assistant" for message in new_messages):
            return None
        is_branch = self._config.on_rewrite == "branch"
        if not all(self.proof.may_append(kind, branch_on_rewrite=is_branch) for kind in kinds):
            return None
        tail = self.tail_text(answer, new_messages, tools)
        if tail is None:
            return None
        ids = self._text.encode(tail, continues=True)
        if previous_ids[-1] in self.stop_token_ids:
            # Any end token of the answer, such as one after a call, replaces the template's end tag.
            if ids and (ids[0] == previous_ids[-1] or ids[0] == self._text.tags.get(self._closing)):
                ids = ids[1:]
            return [*previous_ids, *ids]
        return [*previous_ids, *self._close_thought(previous_ids), *ids]

    def tail_text(
        self,
        answer: Message | None,
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        before: Sequence[Message] = (Message(role="user", content="a"),),
    ) -> str | None:
        """Returns the text after an answer: its end tag, the new messages, and the beginning of the next answer.

        answer: only the number and names of its calls matter. before: messages before it. None if the template refuses,
        or if the new messages contain all MARKS.
        """
        said_texts = [
            text for message in new_messages for text in (message.content, message.name, message.tool_call_id)
        ]
        mark = next((mark for mark in MARKS if not any(mark in text for text in said_texts if text)), None)
        if mark is None:
            return None
        calls = _dummy_calls(answer, new_messages, mark) if new_messages and new_messages[0].role == "tool" else ()
        for some in (calls, calls[:1]) if len(calls) > 1 else (calls,):
            content = "" if some else mark
            said = [*before, Message(role="assistant", content=content, tool_calls=some)]
            try:
                whole = self.text([*said, *new_messages], tools)
                alone = self.text(said, tools, prompts=False) if some else ""
            except UserError:
                continue
            return self._find_tail(whole, alone, mark)
        return None

    def _find_tail(self, whole: str, alone: str, mark: str) -> str | None:
        """Returns the part of a rendered conversation after its answer.

        alone: the conversation without new messages, if the answer has calls. mark: placeholder in the answer.
        """
        _, found, tail = whole.rpartition(mark)
        if not found:
            return None
        if not alone:
            return tail
        if self._closing:
            _, there, rest = tail.partition(self._closing)
            return self._closing + rest if there else None
        behind = alone.rpartition(mark)[2]
        return tail.removeprefix(behind) if tail.startswith(behind) else None

    def _ends_in_thought(self) -> bool:
        begins = self._parser.thoughts[0] if self._parser.thoughts else None
        return begins is not None and self.text([Message(role="user", content="a")], ()).rstrip().endswith(begins)

    def _close_thought(self, previous_ids: Sequence[int]) -> list[int]:
        """Returns the tokens that close a truncated thought. Empty if the last thought is closed."""
        if not self._parser.thoughts:
            return []
        begin, end = (self._text.tags.get(tag) for tag in self._parser.thoughts)
        for token in reversed(previous_ids):
            if token == end or begin is None or end is None:
                return []
            if token == begin:
                return self._text.encode(f"\n{self._parser.thoughts[1]}\n\n", continues=True)
        return []

    @property
    def notes(self) -> tuple[str, ...]:
        return self.proof.notes(branch_on_rewrite=self._config.on_rewrite == "branch")


def _dummy_calls(answer: Message | None, new_messages: Sequence[Message], mark: str) -> tuple[ToolCall, ...]:
    """Returns one call for each tool message, with the same id and name. Each has the mark as its argument."""
    names = {call.id: call.name for call in answer.tool_calls} if answer else {}
    tools = [message for message in new_messages if message.role == "tool"]
    return tuple(
        ToolCall(
            id=message.tool_call_id or f"{place:09d}",
            name=message.name or names.get(message.tool_call_id or "") or "tool",
            arguments={"a": mark},
        )
        for place, message in enumerate(tools)
    )


def _write_out_tools(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Messages:
    """Returns the conversation with its tools, calls and tool messages written as text in Hermes' format."""
    found = [_write_calls(message) for message in messages]
    if tools:
        lines = [json.dumps(tool_mapping(tool), ensure_ascii=False, default=dict) for tool in tools]
        head = TOOLS_HEAD.format(tools="\n".join(lines))
        if found and found[0].role == "system":
            found[0] = replace(found[0], content=f"{found[0].content}\n\n{head}")
        else:
            found.insert(0, Message(role="system", content=head))
    return tuple(_join_messages(found))


def _write_calls(message: Message) -> Message:
    if message.role == "tool":
        return Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [f"<tool_call>\n{_call_text(call)}\n</tool_call>" for call in message.tool_calls]
    return replace(message, content="\n".join([part for part in (message.content, *calls) if part]), tool_calls=())


def _call_text(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, default=dict)


def _join_messages(messages: Sequence[Message]) -> Sequence[Message]:
    """Joins consecutive messages of the user, because templates require alternating roles."""
    found: list[Message] = []
    for message in messages:
        if found and message.role == found[-1].role == "user":
            found[-1] = replace(found[-1], content=f"{found[-1].content}\n{message.content}")
        else:
            found.append(message)
    return found
