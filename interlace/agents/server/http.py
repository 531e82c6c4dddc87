"""Answers as HTTP responses: JSON, or server-sent events."""

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from interlace.agents.server.body import as_api_error
from interlace.agents.server.conversation import Asked
from interlace.agents.server.dialect import AnswerStream, Event
from interlace.core.types import JSON

if TYPE_CHECKING:
    from aiohttp import web


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
