"""Dispatch policies, one file each, found by name. A policy assigns requests to engines, and sets their order."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.core.decode_costs import DecodeCosts
from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, load_callable


# Not frozen: the engine's driver updates it, so that a small wave over many engines makes no objects.
@dataclass(kw_only=True, slots=True)
class Load:
    """Current load of one engine, as a policy sees it."""

    num_requests: int
    """Requests of the engine, running or queued."""
    live_tokens: float
    """Tokens that its requests hold and are predicted to add. It decreases when a request ends."""
    number: int = 0
    """Number of the engine in `changed`."""
    changed: "dict[int, Load] | None" = field(default=None, compare=False, repr=False)
    """Loads that have changed, by number, for a reader that follows changes. If None, nothing follows them."""

    def change(self, num_requests: int, live_tokens: float) -> None:
        """Adds to both, and reports the change."""
        self.set(self.num_requests + num_requests, self.live_tokens + live_tokens)

    def set(self, num_requests: int, live_tokens: float) -> None:
        """Sets both, and reports the change."""
        self.num_requests, self.live_tokens = num_requests, live_tokens
        if self.changed is not None:
            self.changed[self.number] = self


class DispatchPolicy(ABC):
    """Policy that assigns a wave of requests at once.

    The lower engine number breaks ties, so a policy is deterministic.
    """

    longest_first = False
    """True if engines start the longest predicted requests first, instead of in order of admission."""
    adapts = False
    """True if the policy uses the time of decode steps. Once it is measured, learn() is called before assign()."""

    def learn(self, costs: DecodeCosts) -> None:  # noqa: B027 - most policies do not need it
        """Receives the measured costs of an engine."""

    @abstractmethod
    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """Returns the engine of each request. expected_tokens: one entry per request. loads: one entry per engine."""


def create_dispatch(spec: str) -> DispatchPolicy:
    """Makes a built-in policy by name, or a user's `package.module:Name`. Each run gets a separate policy.

    Raises UserError if the name is unknown, or if it does not make a policy.
    """
    import interlace.schedule.dispatch as package

    factory = (
        load_callable("dispatch policy", spec)
        if ":" in spec
        else builtin_module("dispatch policy", package, spec).create
    )
    try:
        policy = factory()
    except TypeError as error:  # also raised for a class without assign()
        raise UserError(f"dispatch = {spec!r} is called without arguments, which fails: {error}.") from error
    if not isinstance(policy, DispatchPolicy):
        raise UserError(f"dispatch = {spec!r} made a {type(policy).__name__}, which is not a DispatchPolicy.")
    return _Checked(spec, policy) if ":" in spec else policy


class _Checked(DispatchPolicy):
    """Checks the assignments of a user's policy, because an error that they cause later would not name the policy."""

    def __init__(self, spec: str, policy: DispatchPolicy) -> None:
        self._spec, self._policy = spec, policy
        self.longest_first, self.adapts = policy.longest_first, policy.adapts

    def learn(self, costs: DecodeCosts) -> None:
        self._policy.learn(costs)

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        chosen = self._policy.assign(expected_tokens, loads)
        engines = range(len(loads))
        if (
            not isinstance(chosen, list)
            or len(chosen) != len(expected_tokens)
            or any(each not in engines for each in chosen)
        ):
            raise UserError(
                f"dispatch = {self._spec!r} returned {chosen!r:.200} for {len(expected_tokens)} requests and "
                f"{len(loads)} engines. assign() returns a list with the engine of each request, a number below "
                f"{len(loads)}."
            )
        return [int(each) for each in chosen]
