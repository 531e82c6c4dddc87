"""Chooses the engine of a later turn: the engine that kept its context, unless another engine starts it sooner."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.schedule.dispatch import DispatchPolicy, Load


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptContext:
    """Part at the start of a request's context whose keys and values an engine has."""

    engine: int
    num_tokens: int


def route(
    policy: DispatchPolicy,
    expected_tokens: Sequence[float],
    kept: Sequence[KeptContext | None],
    loads: Sequence[Load],
    *,
    prefill_cost: float,
) -> list[int]:
    """Returns the engine of each request of a wave: the engine with its context, or the choice of the policy.

    kept: one for each request. loads: one for each engine. prefill_cost: as in `Schedule`.
    """
    if not any(kept):
        return policy.assign(expected_tokens, loads)
    after = [Load(num_requests=load.num_requests, live_tokens=load.live_tokens) for load in loads]
    chosen: dict[int, int] = {}
    for place, (own, tokens) in enumerate(zip(kept, expected_tokens, strict=True)):
        if own is not None and stays(own, after, prefill_cost=prefill_cost):
            chosen[place] = own.engine
            after[own.engine].num_requests += 1
            after[own.engine].live_tokens += tokens
    others = [place for place in range(len(expected_tokens)) if place not in chosen]
    if others:
        engines = policy.assign([expected_tokens[place] for place in others], after)
        chosen.update(zip(others, engines, strict=True))
    return [chosen[place] for place in range(len(expected_tokens))]


def stays(own: KeptContext, loads: Sequence[Load], *, prefill_cost: float) -> bool:
    """Returns whether a turn goes to the engine that has its context.

    The wait is the work of that engine in excess of the least loaded engine. It must not exceed the cost of computing
    the context again elsewhere. So no engine gets further ahead of the others than one kept context and one request.
    """
    waits = loads[own.engine].live_tokens - min(load.live_tokens for load in loads)
    return waits <= prefill_cost * own.num_tokens
