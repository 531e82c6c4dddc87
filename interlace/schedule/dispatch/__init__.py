"""Dispatch policies, one file each, found by name: which engine gets which request, and in which order."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.core.decode_costs import DecodeCosts
from interlace.core.errors import UserError
from interlace.core.plugins import builtin_module, load_callable


# Not frozen: the engine's driver keeps it up to date, so that a small wave over many engines makes no objects.
@dataclass(kw_only=True, slots=True)
class Load:
    """One engine now, as a policy sees it."""

    num_requests: int
    """Requests it has, running or queued."""
    live_tokens: float
    """Tokens that its requests hold and are expected to add; falls when a request ends."""


class DispatchPolicy(ABC):
    """Policy, called with a wave of requests at once; the lower engine number breaks ties: it is deterministic."""

    longest_first = False
    """True if engines start the requests that are expected to be longest first, instead of in order of admission."""
    adapts = False
    """True if the policy uses the time of decode steps: learn() is called before assign() once it was measured."""

    def learn(self, costs: DecodeCosts) -> None:  # noqa: B027 - most policies have no use for it
        """Takes in the measured costs of an engine."""

    @abstractmethod
    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        """expected_tokens: one a request. loads: one an engine. Returns the engine of each request."""


def create_dispatch(spec: str) -> DispatchPolicy:
    """Makes a built-in by name, or a user's `package.module:Name`; each run gets a policy of its own.

    Raises UserError where there is none, or what the name stands for makes none.
    """
    import interlace.schedule.dispatch as package

    factory = (
        load_callable("dispatch policy", spec)
        if ":" in spec
        else builtin_module("dispatch policy", package, spec).create
    )
    try:
        policy = factory()
    except TypeError as error:  # also of a class that lacks assign()
        raise UserError(f"dispatch = {spec!r} is called without arguments, which fails: {error}.") from error
    if not isinstance(policy, DispatchPolicy):
        raise UserError(f"dispatch = {spec!r} made a {type(policy).__name__}, which is not a DispatchPolicy.")
    return _Checked(spec, policy) if ":" in spec else policy


class _Checked(DispatchPolicy):
    """A user's own. What an answer that does not fit sets off later would not name the policy."""

    def __init__(self, spec: str, policy: DispatchPolicy) -> None:
        self._spec, self._policy, self.longest_first = spec, policy, policy.longest_first
        self.adapts, self.learn = policy.adapts, policy.learn  # type: ignore[method-assign]

    def assign(self, expected_tokens: Sequence[float], loads: Sequence[Load]) -> list[int]:
        chosen = self._policy.assign(expected_tokens, loads)
        engines = range(len(loads))
        if (
            not isinstance(chosen, list)
            or len(chosen) != len(expected_tokens)
            or any(each not in engines for each in chosen)
        ):
            raise UserError(
                f"dispatch = {self._spec!r} answered {chosen!r:.200} for {len(expected_tokens)} requests and "
                f"{len(loads)} engines. assign() returns a list with the engine of each request, a number below "
                f"{len(loads)}."
            )
        return [int(each) for each in chosen]
