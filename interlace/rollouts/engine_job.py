"""Jobs of the engine drivers, and the interface through which a driver reports to the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from interlace.core.progress import Draft
from interlace.core.types import Request, Response
from interlace.runtime.decode_curve import DecodeCurve

if TYPE_CHECKING:
    from interlace.rollouts.driver import EngineDriver

Deliver: TypeAlias = Callable[[Response], None]
OnDraft: TypeAlias = Callable[[Draft], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A request and the receiver of its response."""

    request: Request
    order: float
    """Priority among jobs that have not started: the smallest is first. Jobs that have tokens precede all others."""
    expected_tokens: float
    deliver: Deliver
    """Called with the response."""
    on_draft: OnDraft | None = None
    """Called with each draft before the response, if the request streams."""
    max_new_tokens: int | None
    """Limit that the caller requested; a budget may lower the request's limit below it. None outside the flow."""
    asked_s: float = 0.0
    """Time of the request, in seconds of the run's clock. 0 outside the flow."""
    num_before: int = 0
    """Generated tokens of the request when its budget was set."""
    num_history: int = 0
    """Tokens of the context that belong to earlier turns of the sample."""

    @property
    def started(self) -> bool:
        """True if the job is a partial, which already has generated tokens."""
        return bool(self.request.generated_ids)


class EngineHost(Protocol):
    """Receiver of a driver's reports: the dispatcher of the engine pool."""

    curve: DecodeCurve | None
    """Decode speed, fitted to each call. None if the dispatch policy does not use it."""
    on_response: Callable[[Job, Response], None]
    """Called with the response of each job that ended."""

    def fill(self, driver: "EngineDriver") -> None:
        """Gives an engine requests that are queued for engines with pending weights."""
        ...

    def on_partials(self, jobs: Sequence[Job], onto: "list[EngineDriver] | None" = None) -> None:
        """Dispatches unfinished jobs again, which an engine gave up. onto: if given, only to these engines."""
        ...
