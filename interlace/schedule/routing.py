"""Which engine gets a later turn of an episode: the one that kept its context, while waiting there costs less."""

from collections.abc import Sequence
from dataclasses import dataclass

from interlace.schedule.dispatch import DispatchPolicy, Load

PREFILL_COST = 0.5
"""Time of computing a token of a context again, against that of drawing one among others: both keep an engine busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptContext:
    """Beginning of a request's context whose keys and values an engine has."""

    engine: int
    num_tokens: int


def route(
    policy: DispatchPolicy,
    expected_tokens: Sequence[float],
    kept: Sequence[KeptContext | None],
    loads: Sequence[Load],
) -> list[int]:
    """Returns the engine of each request of a wave: its own where it stays, else what the dispatch policy says.

    kept: of each request. loads: one an engine.
    """
    if not any(kept):
        return policy.assign(expected_tokens, loads)
    after = [Load(num_requests=load.num_requests, live_tokens=load.live_tokens) for load in loads]
    chosen: dict[int, int] = {}
    for place, (own, tokens) in enumerate(zip(kept, expected_tokens, strict=True)):
        if own is not None and stays(own, after):
            chosen[place] = own.engine
            after[own.engine].num_requests += 1
            after[own.engine].live_tokens += tokens
    others = [place for place in range(len(expected_tokens)) if place not in chosen]
    if others:
        engines = policy.assign([expected_tokens[place] for place in others], after)
        chosen.update(zip(others, engines, strict=True))
    return [chosen[place] for place in range(len(expected_tokens))]


def stays(own: KeptContext, loads: Sequence[Load]) -> bool:
    """Says whether a turn goes where its context is.

    What that engine has to do beyond the one with least to do is waited for; what was kept is computed again elsewhere.
    So no engine gets further ahead of the others than a kept context and a request are long.
    """
    waits = loads[own.engine].live_tokens - min(load.live_tokens for load in loads)
    return waits <= PREFILL_COST * own.num_tokens
