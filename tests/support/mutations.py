"""Mutations that each remove one rule of the schedule, to show the behaviour of the runtime without it."""

from collections.abc import Callable, Sequence
from typing import Any

from interlace.core.types import Sample
from interlace.forecast.costs.lengths import ResponseLengths
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.weight_swap import WeightSwap
from interlace.runtime.channel import Cursor
from interlace.runtime.group import WorkerGroup
from interlace.schedule.arbiter import Arbiter, Claim, WaitingClaim
from interlace.schedule.rounds import Rounds
from interlace.schedule.staleness import Batcher, Gate, Ticket
from interlace.schedule.steps import Steps, Taken
from interlace.stages import train
from interlace.stages.admission import Admission
from interlace.stages.factory import StageFactory
from interlace.stages.map import MapStage
from interlace.stages.publish import Publisher
from interlace.stages.train import Minibatches

Mutation = Sequence[tuple[object, str, object]]
"""(owner, name, replacement) of each changed attribute."""


def slots_at_consumption() -> Mutation:
    """Returns slots of the gate when a group is taken, not at the publication."""
    consume = Admission.consume

    def consumed(self: Admission, need: int, step: int, may_take: Callable[[int], bool]) -> Taken:
        taken = consume(self, need, step, may_take)
        if taken.tickets:
            self._pump_soon()
        return taken

    def room(self: Gate) -> int:
        return min(self.consumed + self.capacity, self.total) - (self.admitted - self.returned)

    return [(Gate, "room", property(room)), (Admission, "consume", consumed)]


def no_slot_for_a_tombstone() -> Mutation:
    """Keeps the slot of a dropped group."""

    def keep(self: Steps, ticket: Ticket) -> None:
        self.batcher.drop(ticket)

    return [(Steps, "_return_slot", keep)]


def no_deadlines() -> Mutation:
    """Takes the first arrivals, regardless of deadlines."""

    def oldest(self: Batcher, step: int) -> Any:
        return min(self._ready, key=lambda place: self._ready[place][0][0], default=None)

    return [(Batcher, "_find_allowed_queue", oldest)]


def suspended_for_ever() -> Mutation:
    """Never resumes sequences that used up their budget."""
    return [(EnginePool, "resume", lambda self, gids=None: False)]


def not_resumed_when_due() -> Mutation:
    """Resumes such sequences only at a publication or a stall, even if no slack is left."""
    resume = EnginePool.resume
    return [(EnginePool, "resume", lambda self, gids=None: gids is None and resume(self))]


def not_resumed_at_a_publication() -> Mutation:
    """Resumes such sequences only when they are due or at a stall."""
    publish, resume = Publisher.publish, EnginePool.resume

    async def published(self: Publisher, step: int) -> bool:
        pool = self._pool
        pool.resume = lambda gids=None: gids is not None and resume(pool, gids)  # type: ignore[method-assign]
        try:
            return await publish(self, step)
        finally:
            del pool.resume

    return [(Publisher, "publish", published)]


def no_stall_rule() -> Mutation:
    """Calls no resolver at a stall."""
    return [(StageFactory, "watch_stalls", lambda self: None)]


def full_granules_only() -> Mutation:
    """Makes a stage wait for a whole granule although no more samples can arrive."""
    return [(Cursor, "starved", property(lambda self: False))]


def one_device_at_a_time() -> Mutation:
    """Lets a claim keep each device that it can get."""

    def is_blocked(self: Arbiter, entry: WaitingClaim) -> bool:
        for device in entry.claim.devices:
            self._holders[device] = self._holders[device] or entry.claim
        return any(self._holders[device] is not entry.claim for device in entry.claim.devices)

    return [(Arbiter, "_is_blocked", is_blocked)]


def no_reservations() -> Mutation:
    """Lets waiting claims reserve no devices."""

    def is_blocked(self: Arbiter, entry: WaitingClaim) -> bool:
        return any(self._holders[device] is not None for device in entry.claim.devices)

    return [(Arbiter, "_is_blocked", is_blocked)]


def upstream_first() -> Mutation:
    """Serves claims first come, first served."""

    def request(self: Arbiter, claim: Claim) -> None:
        self._sequence += 1
        entry = self._waiting[id(claim)] = WaitingClaim(place=(0, self._sequence), claim=claim)
        for device in claim.devices:
            self._queues[device].append(entry)
            self._changed[device] = None

    return [(Arbiter, "request", request)]


def everybody_is_preempted() -> Mutation:
    """Asks every upstream holder of a device to yield, preemptible or not."""

    def should_yield(self: Arbiter, entry: WaitingClaim) -> list[str]:
        holders = [self._holders[device] for device in entry.claim.devices if self._queues[device][0] is entry]
        return [holder.owner for holder in holders if holder and holder.stage < entry.claim.stage]

    return [(Arbiter, "_should_yield", should_yield)]


def devices_before_the_granule() -> Mutation:
    """Makes a stage take its devices first and then wait for samples."""

    async def serve(self: MapStage, replica: WorkerGroup[Any]) -> None:
        while True:
            async with replica.hold("a stage"):
                if not await self._granule_released(replica):
                    return
                rows = self._cursor.lease(self._released.popleft())
                results = await self._results(replica, rows)
            self._write(rows, results)

    return [(MapStage, "_serve", serve)]


def new_sequences_with_old_weights() -> Mutation:
    """Lets an engine with a pending update start new sequences."""
    return [(WeightSwap, "starts_new", property(lambda self: True))]


def swaps_not_awaited() -> Mutation:
    """Makes `all_at_once` wait for the commit only."""
    create = Publisher.__init__

    def init(self: Publisher, *args: Any) -> None:
        create(self, *args)
        self._waits_for_swap = False

    return [(Publisher, "__init__", init)]


def swaps_awaited() -> Mutation:
    """Makes `rolling` wait for every engine's swap too."""
    create = Publisher.__init__

    def init(self: Publisher, *args: Any) -> None:
        create(self, *args)
        self._waits_for_swap = True

    return [(Publisher, "__init__", init)]


def minibatches_by_arrival() -> Mutation:
    """Forms minibatches in the order in which groups finished."""
    create = Minibatches.__init__

    def init(self: Minibatches, *args: Any, **given: Any) -> None:
        create(self, *args, **given)
        self._in_order = False

    return [(Minibatches, "__init__", init)]


def batches_not_awaited() -> Mutation:
    """Starts training with the first granule, regardless of the algorithm's needs."""
    create = train.TrainStage.__init__

    def init(self: train.TrainStage, *args: Any, **given: Any) -> None:
        create(self, *args, **given)
        self._whole_batch = False

    return [(train.TrainStage, "__init__", init)]


def missing_groups_not_awaited() -> Mutation:
    """Fills a minibatch with the finished groups in order of admission, without waiting for pending ones."""
    return [(Steps, "pending", lambda self, step: [])]


def minibatches_wait_for_the_batch() -> Mutation:
    """With several minibatches, starts training only once the batch is closed."""
    create = train.TrainStage.__init__

    def init(self: train.TrainStage, *args: Any, **given: Any) -> None:
        create(self, *args, **given)
        self._whole_batch = self._minibatches > 1

    return [(train.TrainStage, "__init__", init)]


def replacements_for_later_steps() -> Mutation:
    """Assigns a group that replaces a filtered one to the step that is currently filled with prompts."""
    pump = Admission._pump_groups

    def pumped(self: Admission, most_groups: int) -> Any:
        self.steps._vacancies.clear()
        return pump(self, most_groups)

    return [(Admission, "_pump_groups", pumped)]


def proximal_of_the_weights_so_far() -> Mutation:
    """Computes the proximal log-probs of a minibatch only at its turn."""
    together = train.TrainStage._train

    async def one_by_one(self: train.TrainStage, parts: Sequence[train.Part]) -> list[Sample]:
        return [sample for part in parts for sample in await together(self, [part])]

    return [(train.TrainStage, "_train", one_by_one)]


def slow_prompts_are_lost() -> Mutation:
    """Loses a prompt whose group was not needed."""
    return [(Rounds, "keep_for_later_round", lambda self, prompt: None)]


def no_age_cap() -> Mutation:
    """Holds a round of long prompts only once there are enough of them."""
    return [(Rounds, "_is_long_due", lambda self: len(self._waiting) >= self._prompts_per_step)]


def sets_iterated() -> Mutation:
    """Resumes sequences in the order of a set."""

    def resume(self: EnginePool, gids: Sequence[int] | None = None) -> bool:
        suspended = self._budget.suspended
        chosen = {name for name, job in suspended.items() if gids is None or job.request.owner.gid in gids}
        self._dispatcher.dispatch([suspended.pop(name) for name in chosen])
        return bool(chosen)

    return [(EnginePool, "resume", resume)]


def noise_by_arrival() -> Mutation:
    """Draws sampling noise in the order in which requests reach an engine."""
    runs: list[tuple[ResponseLengths, dict[tuple[str, int, int], int]]] = []
    keyed = ResponseLengths.of

    def of(self: ResponseLengths, uid: str, attempt: int, index: int, turn: int = 0) -> float:
        if not runs or runs[-1][0] is not self:
            runs.append((self, {}))
        number = runs[-1][1].setdefault((uid, attempt, index, turn), len(runs[-1][1]))
        return keyed(self, "arrival", 0, number)

    return [(ResponseLengths, "of", of)]


def a_denominator_for_each_piece() -> Mutation:
    """Averages each accumulated piece over its own tokens only."""
    import torch

    from interlace.engines.train.engine import Aggregator

    return [
        (Aggregator, "weights", lambda self, lengths, device: torch.full((sum(lengths),), 1 / sum(lengths))),
        (Aggregator, "denominator", lambda self, lengths: 1.0),
    ]


def apply(mutation: Mutation) -> None:
    """Applies a mutation permanently, so it must run in a separate process."""
    for owner, name, instead in mutation:
        setattr(owner, name, instead)
