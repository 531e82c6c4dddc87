"""A request on its way through the engines, and the reports of a driver to the pool of all engines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from interlace.core.types import Draft, Request, Response
from interlace.runtime.decode_curve import DecodeCurve
from interlace.runtime.waits import Signal

if TYPE_CHECKING:
    from interlace.rollouts.driver import EngineDriver

Deliver: TypeAlias = Callable[[Response], None]
OnDraft: TypeAlias = Callable[[Draft], None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """A request and what to do with its response."""

    request: Request
    order: float
    """Smaller goes first among jobs that have not started; those that have tokens already go before all others."""
    expected_tokens: float
    deliver: Deliver
    max_new_tokens: int | None
    """Limit that the caller asked for, where a budget may have lowered the request's; None outside the flow."""
    num_before: int = 0
    """Tokens that it had when its budget began."""
    num_history: int = 0
    """Tokens of its context that earlier turns of its sample had."""

    @property
    def started(self) -> bool:
        """True if the job is a partial that goes on."""
        return bool(self.request.generated_ids)


class EngineHost(Protocol):
    """Receiver of a driver's reports: the pool of all engines."""

    curve: DecodeCurve | None
    """Learns from each call; None where calls are of no interest."""
    listeners: dict[str, OnDraft]
    """Receivers of drafts, by request."""
    num_unswapped: int
    """Engines that have new weights and serve older ones yet."""
    standing: Signal
    """Fired where an engine swapped, or left: whatever waits for a version looks again."""

    def fill(self, driver: "EngineDriver") -> None:
        """Gives an engine that may start sequences the requests that wait for other engines to swap."""
        ...

    def on_response(self, job: Job, response: Response) -> None:
        """Takes in the response of a job that ended."""
        ...

    def on_partials(self, jobs: Sequence[Job], onto: "list[EngineDriver] | None" = None) -> None:
        """Takes in jobs that were taken out unfinished, to be dispatched again. onto: only to these, if given."""
        ...

    def on_swapped(self) -> None:
        """Notes that new weights serve."""
        ...

    on_lost: "Callable[[EngineDriver, str], None]"
    """Notes that an engine cannot serve any more, and why: its jobs go to others, and it may return."""
