"""Chooses the engine of a later turn: the engine that kept its context, unless another engine starts it sooner."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.schedule.dispatch import DispatchPolicy, Load
from interlace.schedule.loads import Loads


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
    chosen: dict[int, int] = {}
    before: dict[int, tuple[int, float]] = {}
    try:  # the loads include the requests of this wave until its end: a copy would read thousands of loads for one turn
        for place, (own, tokens) in enumerate(zip(kept, expected_tokens, strict=True)):
            if own is not None and keeps_engine(own, loads, prefill_cost=prefill_cost):
                chosen[place] = own.engine
                load = loads[own.engine]
                before.setdefault(own.engine, (load.num_requests, load.live_tokens))
                load.change(1, tokens)
        others = [place for place in range(len(expected_tokens)) if place not in chosen]
        if others:
            engines = policy.assign([expected_tokens[place] for place in others], loads)
            chosen.update(zip(others, engines, strict=True))
    finally:
        for engine, (num_requests, live_tokens) in before.items():
            loads[engine].set(num_requests, live_tokens)
    return [chosen[place] for place in range(len(expected_tokens))]


def keeps_engine(own: KeptContext, loads: Sequence[Load], *, prefill_cost: float) -> bool:
    """Returns whether a turn goes to the engine that has its context.

    The wait is the work of that engine in excess of the least loaded engine. It must not exceed the cost of computing
    the context again elsewhere. So no engine gets further ahead of the others than one kept context and one request.
    """
    least = loads.find_least() if isinstance(loads, Loads) else min(load.live_tokens for load in loads)
    return loads[own.engine].live_tokens - least <= prefill_cost * own.num_tokens
