"""Settings of a loop, and the results of its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from interlace.core.recovery import Cause, RecoveryConfig
from interlace.core.types import Metrics, Sample, SamplingParams, TerminalEvent
from interlace.rewards.shaping import SourceShaping
from interlace.rollouts.membership import NO_CHANGES, MembershipRules
from interlace.rollouts.session import NO_LIMITS, SessionLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A sample that reached its terminal event."""

    sample: Sample
    event: TerminalEvent
    reason: str = ""
    """Reason if the sample failed, else empty."""
    cause: Cause | None = None
    """Cause of the failure; None if the sample did not fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of one step."""

    step: int
    """Number of the step, from 1."""
    version: int
    """Version of the weights when the step ended, after its publication."""
    metrics: Metrics
    ended: Sequence[Ended]
    """Samples that ended since the last step, with any event."""


class StepObserver(Protocol):
    """Observer of each step boundary, after the publication and before the gate opens."""

    async def on_step(self, result: StepResult) -> bool:
        """Receives the result of a step. Returning False ends the run after this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """Settings of sampling and rewards. The sizes of the loop are `LoopSizes` of the stages."""

    sampling: SamplingParams
    shaping: SourceShaping = SourceShaping()
    """Shaping of rewards. The flow adds the parts that need a whole group; scorers add the rest."""
    adds_verdicts: bool = False
    """True if responses without the tag of a reward have a verdict, also if its function returns numbers."""
    limits: SessionLimits = NO_LIMITS
    recovery: RecoveryConfig = RecoveryConfig()
    membership: MembershipRules = NO_CHANGES
    """Rules for engines that join, leave, or are lost."""
    counts: Callable[[], Metrics] = Metrics
    """Returns the counts of simulators since the last call."""
