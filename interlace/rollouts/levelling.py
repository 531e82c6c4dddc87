"""Moves requests that are queued on draining engines to engines that have already swapped weights."""

from collections.abc import Callable, Iterable, Sequence

from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.engine_job import Job


def give_queued_jobs(
    queues: Iterable[EngineDriver], taker: EngineDriver, deal: Callable[[Sequence[Job], list[EngineDriver]], None]
) -> None:
    """Gives an engine queued requests of engines with pending weights, first from the engine with the largest load.

    Those engines start no request before the swap. An engine that has swapped starts them earlier under the same
    version. The samples do not change, because the request is the key of its sampling noise.

    queues: engines with queued requests and pending weights. deal: dispatches jobs again, to the given engines.
    """
    for source in sorted(queues, key=lambda other: (-other.load.live_tokens, other.number)):
        if jobs := source.jobs.give(taker.calls.room, taker.load.live_tokens):
            deal(jobs, [taker])
