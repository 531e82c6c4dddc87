"""A request and its answers in a form that all routes share."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from interlace.agents.server.body import ApiError
from interlace.core.messages import Message, ToolCall, ToolSpec
from interlace.core.types import JSON, FinishReason, IntArray, SamplingParams
from interlace.rollouts.base import Context, Turn

MOST_STOP_CHARACTERS = 1 << 16
"""Most characters of all stop texts of a request. A stream compares its end with each of them at each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """A request for answers."""

    context: Context
    other_contexts: tuple[Context, ...] = ()
    """Contexts of the further prompts of a text completion. Its answers are in the order of the prompts."""
    tools: tuple[ToolSpec, ...] = ()
    model: str = ""
    """Name that the client gave. The answer repeats it: the server has one model."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, in addition to the model's."""
    ignore_eos: bool = False
    """True if the model's end tokens do not end an answer."""
    one_call: bool = False
    """True if an answer contains at most one call of a tool (`parallel_tool_calls: false`)."""
    chat_template_kwargs: Mapping[str, JSON] = field(default_factory=dict)
    """Variables that the chat template reads."""
    sampling: Mapping[str, JSON] = field(default_factory=dict)
    """Further fields of SamplingParams that the client set."""
    num_answers: int = 1
    """Answers to each prompt."""
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    """True if a stream ends with a chunk that counts tokens."""
    logprobs: bool = False
    token_ids: bool = False
    """True if the answer contains token ids and versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Answers to a request."""

    id: str
    created: int
    """Seconds since 1970."""
    ask: Ask
    turns: Sequence[Turn] = ()
    """One turn for each answer; empty while the answers are sampled."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the contexts, each counted once."""
        return sum(len(turn.prompt_ids) for turn in self.turns[:: self.ask.num_answers])

    @property
    def num_drawn_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest version that drew a token."""
        found = [version for turn in self.turns for version in turn.versions.values]
        return min(found, default=0), max(found, default=0)


class TextCodec(Protocol):
    """Conversion between text and tokens without a chat template."""

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, including the tokens that begin every text. Called on a thread.

        Raises UserError for a text that exceeds the longest context.
        """

    def spell(self, token_id: int) -> bytes:
        """Returns the bytes of a token. They may be a part of a character."""


def merge_params(base: SamplingParams, ask: Ask, *, keeps_distribution: bool) -> SamplingParams:
    """Returns the sampling parameters of a request.

    base: the run's parameters. keeps_distribution: if True, the distribution of `base` applies to any request, because
    it is the trained distribution; the client still sets the length of an answer and the tokens and texts that end it.
    """
    length = base.max_new_tokens if ask.max_tokens is None else ask.max_tokens
    ends = () if ask.ignore_eos else base.stop_token_ids
    changed: dict[str, object] = {
        "max_new_tokens": min(length, base.max_new_tokens) if keeps_distribution else length,
        "stop": tuple(dict.fromkeys((*base.stop, *ask.stop))),
        "stop_token_ids": tuple(dict.fromkeys((*ends, *ask.stop_token_ids))),
    }
    if not keeps_distribution:
        changed |= ask.sampling
    if changed.items() <= base.model_dump().items():
        return base
    return SamplingParams.parse({**base.model_dump(), **changed}, where="sampling")


def check_tools(tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Returns the tools. Raises ApiError if two have the same name."""
    [(name, count)] = Counter(tool.name for tool in tools).most_common(1) or [("", 0)]
    if count > 1:
        raise ApiError(400, f"two tools have the name {name!r}.", param="tools")
    return tuple(tools)


def check_stops(stops: list[str]) -> list[str]:
    """Returns the stop texts of a request. Raises ValueError if they are too long in all."""
    if (size := sum(map(len, stops))) > MOST_STOP_CHARACTERS:
        raise ValueError(f"it has {size} characters in all; at most {MOST_STOP_CHARACTERS} are read")
    return stops


def calls_of(message: Message) -> tuple[ToolCall, ...]:
    """Returns the calls of a message that could be read."""
    return tuple(call for call in message.tool_calls if not call.error)


def make_shown_message(turn: Turn, ask: Ask) -> Message:
    """Returns an answer in the form that its client gets.

    The answer is cut before the client's stop texts. If none of its calls could be read, the calls stay text; else the
    client gets those that could be read. A client that requested one call gets the first.
    """
    message = turn.message
    if message.tool_calls and not calls_of(message):
        content = turn.text if turn.answer is None else turn.answer
        message = replace(message, content=content, tool_calls=())
    elif message.tool_calls:
        message = replace(message, tool_calls=calls_of(message)[: 1 if ask.one_call else None])
    return cut_before(message, ask.stop)


def cut_before(message: Message, stops: Sequence[str]) -> Message:
    """Returns an answer whose content ends before the first of the stop texts; it then has no calls."""
    cuts = [place for stop in stops if (place := message.content.find(stop)) >= 0]
    return replace(message, content=message.content[: min(cuts)], tool_calls=()) if cuts else message


def finish_of(turn: Turn, ask: Ask) -> str:
    """Returns the reason why an answer ended, in OpenAI's terms.

    An answer that reached its limit of tokens has the reason `length` even if it contains calls: others may be missing.
    """
    if turn.finish_reason == FinishReason.LENGTH:
        return "length"
    return "tool_calls" if calls_of(make_shown_message(turn, ask)) else "stop"


def usage_of(answer: Answers) -> dict[str, JSON]:
    """Returns the token counts, in OpenAI's format."""
    prompt, drawn = answer.num_prompt_tokens, answer.num_drawn_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(answer)},
    }


def cached_tokens(answer: Answers) -> int:
    """Returns the number of context tokens that were in an engine's cache."""
    return max((turn.num_cached_tokens for turn in answer.turns), default=0)


def prompt_of(answer: Answers, prompt_ids: IntArray) -> dict[str, JSON]:
    """Returns the context's token ids, if the client requested them."""
    return {"prompt_token_ids": prompt_ids.tolist()} if answer.ask.token_ids else {}


def tokens_of(answer: Answers, turn: Turn) -> dict[str, JSON]:
    """Returns an answer's token ids and [version, number of tokens] pairs, if the client requested them."""
    if not answer.ask.token_ids:
        return {}
    runs: list[JSON] = [[version, count] for version, count in turn.versions.pieces]
    return {"token_ids": turn.token_ids.tolist(), "weight_versions": runs}


def details_of(answer: Answers) -> dict[str, JSON]:
    """Returns token ids, versions and log-probs of the only answer, if the client requested them."""
    turn = answer.turns[0]
    if not answer.ask.token_ids:
        return {}
    return {**prompt_of(answer, turn.prompt_ids), **tokens_of(answer, turn), "logprobs": turn.logprobs.tolist()}


def spell_token(token: int, codec: TextCodec | None) -> bytes:
    """Returns a token's bytes, or `token_id:N` without a tokenizer."""
    return codec.spell(token) if codec else f"token_id:{token}".encode()


def token_name(token: int, codec: TextCodec | None) -> str:
    """Returns a token's text, in which U+FFFD replaces a part of a character."""
    return spell_token(token, codec).decode(errors="replace")


def logprobs_of(turn: Turn, codec: TextCodec | None) -> dict[str, JSON]:
    """Writes the log-probs of the distribution that was sampled from, in the chat form."""
    content: list[JSON] = []
    for token, logprob in zip(turn.token_ids.tolist(), turn.logprobs.tolist(), strict=True):
        spelled = spell_token(token, codec)
        name = spelled.decode(errors="replace")
        content.append({"token": name, "logprob": logprob, "bytes": list(spelled), "top_logprobs": []})
    return {"content": content, "refusal": None}
