"""Requests at an engine of this process, on the thread that steps the engine: their tokens become deltas."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from interlace.core.errors import UserError
from interlace.core.types import FinishReason, Request, Response
from interlace.engines.rollout.protocol import StepOutput
from interlace.engines.rollout.services.protocol import Delta
from interlace.engines.rollout.services.wire import runs_of

if TYPE_CHECKING:
    from interlace.engines.rollout.engine import NativeEngine

FLUSH_EVERY_S = 0.02
"""Seconds between two deltas of a request that continues. A server that dies loses at most the tokens of this time."""


@dataclass(slots=True, eq=False)
class HostedRequest:
    """A request at the engine, and the receiver of its deltas."""

    request: Request
    send: Callable[[Delta], None]
    """Callback on the engine's thread."""
    num_sent: int
    """Number of tokens that were sent to its client."""


class HostedRequests:
    """Submits requests to the engine and sends their deltas. All methods are called on the engine's thread.

    While the requests are paused, further requests wait.
    """

    def __init__(self, engine: "NativeEngine", now: Callable[[], float] = time.monotonic) -> None:
        """now: clock, in seconds."""
        self._engine, self._now = engine, now
        self._tickets: dict[str, HostedRequest] = {}
        self._waiting: list[HostedRequest] = []
        """Requests that arrived during a pause."""
        self.is_paused = False
        self._flushed_s = now()

    @property
    def is_idle(self) -> bool:
        """True if a step would do nothing."""
        return self.is_paused or not self._tickets

    def begin(self, tickets: Sequence[HostedRequest]) -> None:
        """Submits requests to the engine. A request that the engine refuses gets the reason."""
        if self.is_paused:
            self._waiting += tickets
            return
        for ticket in tickets:
            try:
                self._engine.submit(ticket.request)
            except (UserError, ValueError) as error:
                ticket.send(Delta(refusal=str(error)))
            else:
                self._tickets[ticket.request.id] = ticket

    def end(self, ids: Sequence[str] | set[str]) -> None:
        """Aborts requests; each gets its last delta."""
        wanted = set(ids)
        for ticket in [one for one in self._waiting if one.request.id in wanted]:
            self._waiting.remove(ticket)
            ticket.send(Delta(finish_reason=FinishReason.ABORTED))
        for response in self._engine.abort([name for name in ids if name in self._tickets]):
            self._finish_request(response)

    def pause(self, *, aborts: bool) -> None:
        """Stops the requests until resume(). aborts: the running ones end, and no later one reuses their tokens."""
        self.is_paused = True
        if aborts:
            self.end([*self._tickets])
            self._engine.clear_prefixes()

    def resume(self) -> None:
        """Continues the requests, and begins those that waited."""
        self.is_paused = False
        waiting, self._waiting = self._waiting, []
        self.begin(waiting)

    def deliver(self, output: StepOutput) -> None:
        """Sends the results of one step of the engine."""
        for response in output.finished:
            self._finish_request(response)
        if output.drawn:  # Requests whose clients follow each token.
            self._send_new([*output.drawn])
        if self._now() - self._flushed_s >= FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Sends the tokens so far of all live requests."""
        self._flushed_s = self._now()
        self._send_new([*self._tickets])

    def refuse_all(self, reason: str) -> None:
        """Ends all requests with a refusal."""
        tickets, self._tickets = [*self._tickets.values(), *self._waiting], {}
        for ticket in tickets:
            ticket.send(Delta(refusal=reason))

    def _send_new(self, ids: Sequence[str]) -> None:
        for response in self._engine.peek(ids):
            ticket = self._tickets[response.request.id]
            if len(response.token_ids) > ticket.num_sent:
                ticket.send(_make_delta(response, ticket.num_sent))
                ticket.num_sent = len(response.token_ids)

    def _finish_request(self, response: Response) -> None:
        ticket = self._tickets.pop(response.request.id, None)
        if ticket is None:
            return
        if response.failure:
            ticket.send(Delta(refusal=response.failure))
            return
        last = _make_delta(response, ticket.num_sent)
        ticket.send(replace(last, finish_reason=response.finish_reason, num_cached_tokens=response.num_cached_tokens))


def _make_delta(response: Response, first: int) -> Delta:
    return Delta(
        token_ids=response.token_ids[first:],
        logprobs=response.logprobs[first:],
        versions=runs_of(response.versions[first:]),
    )
