"""Base classes of the routes: a format of requests and answers, its streams, and their HTTP responses."""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeAlias

from interlace.agents.server.ask import Answers, Ask, TextCodec
from interlace.agents.server.body import ApiError, Body, as_api_error, as_openai
from interlace.agents.server.conversation import Asked
from interlace.core.types import JSON
from interlace.rollouts.base import TurnDraft
from interlace.rollouts.rendering.parsers.base import open_end

if TYPE_CHECKING:
    from aiohttp import web


Event: TypeAlias = tuple[str, Mapping[str, JSON] | str]
"""One event of a stream: its name, which may be empty, and its data."""


class AnswerStream(ABC):
    """Writer of the events of one request's answers, while they are sampled."""

    def __init__(self, head: Answers, codec: TextCodec | None = None) -> None:
        """head: the answers without turns."""
        self._answer, self._codec = head, codec

    @abstractmethod
    def more(self, place: int, draft: TurnDraft) -> Iterator[Event]:
        """Writes the new part of a draft. place: index of the answer."""

    @abstractmethod
    def end(self, answer: Answers) -> Iterator[Event]:
        """Writes the rest of the answers, and the end of the stream."""

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Writes an error, which ends the stream."""
        yield "", as_openai(error)


class TextStream(AnswerStream):
    """Writer of one answer: text is sent while it is sampled, and a call when the answer is complete."""

    def __init__(self, head: Answers) -> None:
        super().__init__(head)
        self._sent = SentText()
        self._has_begun = self._is_text_open = False

    def more(self, place: int, draft: TurnDraft) -> Iterator[Event]:
        del place  # a request has one answer
        yield from self._begin(len(draft.prompt_ids))
        if new := self._sent.more(draft.read().content, self._answer.ask.stop):
            yield from self._text(new)

    def _begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        if not self._has_begun:
            self._has_begun = True
            yield from self._write_head(num_prompt_tokens)

    @abstractmethod
    def _write_head(self, num_prompt_tokens: int) -> Iterator[Event]:
        """Writes the first events."""

    @abstractmethod
    def _text(self, new: str) -> Iterator[Event]:
        """Writes further text, which may be empty."""


class Dialect(ABC):
    """Format of requests and answers on one route."""

    prefix: ClassVar[str]
    """Beginning of the ids of answers."""

    def __init__(self, codec: TextCodec | None) -> None:
        self._codec = codec

    @abstractmethod
    def read(self, body: Body) -> Ask:
        """Reads a request. Raises ApiError or UserError for a request that cannot be answered."""

    @abstractmethod
    def write(self, answer: Answers) -> dict[str, JSON]:
        """Writes a complete answer."""

    @abstractmethod
    def stream(self, head: Answers) -> AnswerStream:
        """Returns a writer of answers as events of a stream. head: the answers without turns."""

    def error(self, error: ApiError) -> dict[str, JSON]:
        """Writes an error; by default in OpenAI's format."""
        return as_openai(error)


PART_OF_A_CHARACTER = "\ufffd"
"""Character that a decoder writes for an incomplete character."""


@dataclass(slots=True)
class SentText:
    """Sent text of one answer."""

    text: str = ""

    def more(self, text: str, stops: Sequence[str] = ()) -> str:
        """Returns the new part of an incomplete text. stops: texts before which the answer ends."""
        return self.rest(cut_undecided_end(text, stops))

    def rest(self, text: str) -> str:
        new = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += new
        return new

    def finish(self, text: str) -> str:
        """Returns the new part of the complete text. Raises ApiError if it does not continue the sent text."""
        if not text.startswith(self.text):
            raise_sampled_again()
        return self.rest(text)


def raise_sampled_again() -> NoReturn:
    """Raises ApiError for a stream whose answer began again, under other weights, after the engine was lost."""
    raise ApiError(503, "the engine was lost, and the new answer does not continue the sent one: ask again.")


def cut_undecided_end(text: str, stops: Sequence[str]) -> str:
    """Returns the part of an incomplete text that no further token can change."""
    cuts = [place for stop in stops if (place := text.find(stop)) >= 0]
    if cuts:
        return text[: min(cuts)]
    whole = text.rstrip(PART_OF_A_CHARACTER)
    return whole[: len(whole) - open_end(whole, stops)]


def json_response(
    content: Mapping[str, JSON], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> "web.Response":
    """Returns a response with a JSON body."""
    from aiohttp import web

    body = json.dumps(content).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


async def stream_response(request: "web.Request", stream: AnswerStream, asked: Asked) -> "web.StreamResponse":
    """Sends answers as server-sent events. An error before the first event has its own status."""
    from aiohttp import web

    response = web.StreamResponse(headers={"Cache-Control": "no-cache", "x-request-id": asked.head.id})
    response.content_type = "text/event-stream"
    with contextlib.suppress(ConnectionResetError):  # the client has gone: leaving withdraws its request
        async with contextlib.aclosing(_group_events(stream, asked)) as found:
            async for events in found:
                await response.prepare(request)  # only the first call has an effect
                await response.write("".join(map(_format_event, events)).encode())
        await response.write_eof()
    return response


async def _group_events(stream: AnswerStream, asked: Asked) -> AsyncGenerator[list[Event], None]:
    """Yields lists of events that are sent together. Raises an error that occurs before the first event."""
    has_begun = False
    try:
        async for place, draft in asked.drafts():
            if events := [*stream.more(place, draft)]:
                yield events
                has_begun = True
        yield [*stream.end(await asked.answer())]
    except Exception as error:
        if not has_begun:
            raise
        yield [*stream.fail(as_api_error(error))]


def _format_event(event: Event) -> str:
    name, data = event
    return (f"event: {name}\n" if name else "") + f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
