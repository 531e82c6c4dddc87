"""Request model of each route: every field that a client may send, with its type and bounds.

A field is used, or may only have values without effect, or changes no answer (`Unused`). Any other field or value gets
status 400 with the field's name.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator

from interlace.agents.server.ask import Ask, check_stops
from interlace.agents.server.body import RequestModel, drop_nulls
from interlace.core.messages import Message, ToolCall, ToolSpec, as_message, as_tool, read_arguments
from interlace.core.sampling import LARGEST, LARGEST_INT32, MAX_STOP_LENGTH, MAX_STOPS
from interlace.core.types import JSON
from interlace.rollouts.base import Context

MOST_ANSWERS = 128
"""Largest `n`, as at OpenAI."""
MOST_CHOICES = 2048
"""Maximum number of answers to all prompts of a text completion."""
MOST_BIASES = 1 << 16
"""Most tokens of `logit_bias`."""

Unused: TypeAlias = Any
"""Field that changes no answer: names of the client, storage, billing, caches."""
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST_INT32)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Name: TypeAlias = Annotated[str, Field(max_length=1024)]
"""Name of a model. Each event of a stream repeats it."""
Seed: TypeAlias = Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST_INT32)]


def only(*allowed: JSON, why: str) -> AfterValidator:
    """Returns the check of a field that may only have values without effect; None is always allowed."""

    def check(value: Any) -> Any:
        given = drop_nulls(value)
        # 1 == True in Python, so types are compared as well.
        if given is not None and not any(given == one and type(given) is type(one) for one in allowed):
            raise ValueError(why)
        return value

    return AfterValidator(check)


def _join_parts(value: Any) -> Any:
    """Returns the text of a content, which may be a list of parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ValueError("it must be text, or a list of parts")
    for part in value:
        if part.get("type") not in ("text", "input_text", "output_text"):
            raise ValueError(f"it has a part of type {part.get('type')!r:.80}: only text can be read")
        if not isinstance(part.get("text"), str):
            raise ValueError("it has a part without text")
    return "".join(part["text"] for part in value)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text: TypeAlias = Annotated[str | None, BeforeValidator(_join_parts)]
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopList: TypeAlias = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Stops: TypeAlias = Annotated[StopList, BeforeValidator(_as_list), AfterValidator(check_stops)]
NO_FORM = "the form of an answer cannot be forced"
NO_PREFILL = "an answer begins a turn, and cannot continue the assistant's last message"
NO_CALL = "a call cannot be forced; write auto or none"


class ClientPart(RequestModel):
    """Base of parts of a request, such as its messages. Their unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class StreamOptions(RequestModel):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Unused = None


class SamplingFields(RequestModel):
    """Fields that every route accepts."""

    temperature: Annotated[float, Field(ge=0, le=LARGEST)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1 / LARGEST, le=LARGEST)] | None = None
    presence_penalty: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None = None
    frequency_penalty: Annotated[
        Any, only(0, 0.0, why="it is not supported; set presence_penalty or repetition_penalty")
    ] = None
    logit_bias: dict[str, Annotated[float, Field(le=LARGEST, allow_inf_nan=True)]] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[Any, only(0, why="a least length is not supported")] = None
    return_token_ids: bool | None = None
    model: Name | None = None
    stream: bool | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_tokens(cls, biases: Any) -> Any:
        tokens = biases if isinstance(biases, dict) else {}
        if len(tokens) > MOST_BIASES:
            raise ValueError(f"it may have at most {MOST_BIASES} tokens")
        for token in tokens:
            if not (token.isascii() and token.isdigit() and len(token) <= 10):
                raise ValueError(f"the key {token[:20]!r} is not a token id")
        return biases

    @property
    def sampling(self) -> dict[str, JSON]:
        """Returns the fields of SamplingParams that are set and change the distribution."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        found: dict[str, JSON] = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.top_k is not None:
            found["top_k"] = max(0, self.top_k)  # serving engines write -1 for the whole vocabulary
        if self.logit_bias:
            found["logit_bias"] = [[int(token), value] for token, value in self.logit_bias.items()]
        return found

    def begin_ask(self, context: Context) -> Ask:
        """Returns a request for answers to a context, with these fields."""
        return Ask(
            context=context,
            model=self.model or "",
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            sampling=self.sampling,
            stream=bool(self.stream),
            token_ids=bool(self.return_token_ids),
        )


class OpenAIFields(SamplingFields):
    """Fields of OpenAI's routes, including vLLM's."""

    seed: Seed | None = None
    user: Unused = None
    metadata: Unused = None
    client_metadata: Unused = None
    store: Unused = None
    service_tier: Unused = None
    safety_identifier: Unused = None
    prompt_cache_key: Unused = None
    prompt_cache_retention: Unused = None


class CompletionFields(OpenAIFields):
    """Fields that chat and text completions share."""

    max_tokens: Count | None = None
    stop: Stops | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    stream_options: StreamOptions | None = None

    def begin_ask(self, context: Context) -> Ask:
        return replace(
            super().begin_ask(context),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop or ()),
            num_answers=self.n or 1,
            seed=self.seed,
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
        )


class ChatMessage(ClientPart):
    """A message in OpenAI's chat format. Fields of answers that clients send back, such as `refusal`, are ignored."""

    role: str
    content: Text = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    def message(self, where: str) -> Message:
        """Returns the message. where: its position, for errors."""
        role = "system" if self.role == "developer" else self.role
        return as_message({**self.model_dump(exclude_none=True), "role": role, "content": self.content}, where)


class ChatRequest(CompletionFields):
    """`/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    tools: list[Any] | None = None
    tool_choice: Annotated[Any, only("auto", "none", why=NO_CALL)] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Any, only(0, why="only the log-probs of sampled tokens are known")] = None
    response_format: Annotated[Any, only({"type": "text"}, why=NO_FORM)] = None
    modalities: Annotated[Any, only(["text"], why="an answer is text")] = None
    add_generation_prompt: Annotated[Any, only(True, why="an answer always begins a turn")] = None
    continue_final_message: Annotated[Any, only(False, why=NO_PREFILL)] = None
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], BeforeValidator(drop_nulls)] | None = None

    def list_tools(self) -> tuple[ToolSpec, ...]:
        """Returns the tools; none if the choice is `none`."""
        given = self.tools if self.tool_choice != "none" else None
        return tuple(as_tool(tool, f"tools[{place}]") for place, tool in enumerate(given or ()))


class CompletionRequest(CompletionFields):
    """`/v1/completions`."""

    prompt: Any
    echo: Annotated[Any, only(False, why="the prompt is not repeated")] = None
    suffix: Annotated[Any, only("", why="an answer cannot be inserted before a text")] = None
    best_of: Annotated[Any, only(1, why="only `n` answers are sampled")] = None
    logprobs: Annotated[Any, only(0, why="only the log-probs of sampled tokens are known; write 0")] = None


class Ids(RequestModel):
    """A prompt of token ids."""

    prompt: TokenIds


class GenerateSampling(CompletionFields):
    """`sampling_params` of `/inference/v1/generate`. The answer always contains token ids and their log-probs."""

    logprobs: Annotated[Any, only(0, 1, why="only the log-probs of sampled tokens are known")] = None
    detokenize: Unused = None
    skip_special_tokens: Unused = None


class GenerateRequest(RequestModel):
    """`/inference/v1/generate`."""

    token_ids: TokenIds
    sampling_params: GenerateSampling = GenerateSampling()
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: Unused = None
    cache_salt: Unused = None
    priority: Unused = None


class ResponseItem(ClientPart):
    """Item of a response's input: a message, a call of a function or its output."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Text = None

    def call(self, where: str) -> ToolCall:
        """Returns the call of a function. where: its position, for errors."""
        return ToolCall(id=self.call_id, name=self.name, arguments=read_arguments(self.arguments, where))


class ResponseTool(ClientPart):
    """A function in the format of the Responses API."""

    type: Annotated[Any, only("function", why="only functions can be called")]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ResponsesRequest(OpenAIFields):
    """`/v1/responses`."""

    input: Annotated[
        list[ResponseItem],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(lambda given: [{"role": "user", "content": given}] if isinstance(given, str) else given),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[Any, only("auto", "none", why=NO_CALL)] = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[Any, only(why="responses are not stored: send the whole conversation as input")] = (
        None
    )
    conversation: Annotated[Any, only(why="conversations are not stored: send the whole conversation as input")] = None
    background: Annotated[Any, only(False, why="the client waits for a response")] = None
    text: Annotated[Any, only({}, {"format": {"type": "text"}}, why=NO_FORM)] = None
    top_logprobs: Annotated[Any, only(0, why="only the log-probs of sampled tokens are known")] = None
    truncation: Annotated[Any, only("disabled", why="nothing is cut from a conversation")] = None
    include: Annotated[Any, only([], ["reasoning.encrypted_content"], why="no such part of an answer exists")] = None
    reasoning: Annotated[Any, only({}, why="the model decides how it reasons")] = None
    stream_options: StreamOptions | None = None


class AnthropicBlock(ClientPart):
    """A block of an Anthropic message."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Text = None


class AnthropicMessage(ClientPart):
    """A message in Anthropic's form."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[AnthropicBlock],
        Field(fail_fast=True),
        BeforeValidator(lambda given: [{"type": "text", "text": given}] if isinstance(given, str) else given),
    ]


class AnthropicTool(ClientPart):
    """A tool in Anthropic's form."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Annotated[Any, only("custom", why="only a client's tools can be called")] = None


def _check_thinking(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in (None, "adaptive", "disabled"):
        raise ValueError("the model decides how it reasons; write the type adaptive, or leave it out")
    return value


def _check_edits(value: Any) -> Any:
    """Checks the edits of a conversation. The model reads no earlier thoughts in any case."""
    edits = value.get("edits") if isinstance(value, dict) else [value] if value is not None else []
    if not isinstance(edits, list | None):
        raise ValueError(f'edits is {edits!r:.50}; write a list, such as [{{"type": "clear_thinking_20251015"}}]')
    for edit in edits or []:
        if not (isinstance(edit, dict) and str(edit.get("type")).startswith("clear_thinking")):
            raise ValueError("nothing but thoughts is cut from a conversation")
    return value


class AnthropicChoice(RequestModel):
    """Anthropic's tool_choice."""

    type: Annotated[Any, only("auto", "none", why=NO_CALL)]
    disable_parallel_tool_use: bool | None = None


def _check_last(messages: list[AnthropicMessage]) -> list[AnthropicMessage]:
    if messages[-1].role == "assistant":
        raise ValueError("the last message is the assistant's: an answer begins a turn, and cannot continue it")
    return messages


class CountRequest(RequestModel):
    """`/v1/messages/count_tokens`."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True), AfterValidator(_check_last)]
    model: Name | None = None
    system: Text = None
    tools: Annotated[list[AnthropicTool], Field(fail_fast=True)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Annotated[Any, AfterValidator(_check_thinking)] = None
    context_management: Annotated[Any, AfterValidator(_check_edits)] = None
    output_config: Annotated[Any, only({}, why=NO_FORM)] = None
    output_format: Annotated[Any, only(why=NO_FORM)] = None
    cache_control: Unused = None


class MessagesRequest(CountRequest, SamplingFields):
    """`/v1/messages`."""

    max_tokens: Count | None = None
    stop_sequences: Stops | None = None
    metadata: Unused = None
    service_tier: Unused = None


class SessionRequest(RequestModel):
    """`/v1/sessions`."""

    seed: Seed | None = None


class RewardRequest(RequestModel):
    """`/v1/session/reward` and `/v1/session/end`."""

    reward: float | None = None
