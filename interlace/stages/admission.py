"""The books of admitted groups: through the gate, until they are trained or dropped."""

import asyncio
import heapq
from collections.abc import Callable, Sequence

from interlace.core.types import Prompt, Sample, SampleKey, TerminalEvent
from interlace.runtime.channel import with_columns
from interlace.runtime.waits import Signal, WaitRegistry
from interlace.schedule.batcher import Batcher, Ticket
from interlace.schedule.gate import Gate
from interlace.stages.rounds import Launch, Rounds
from interlace.stages.sources import PromptSource
from interlace.stages.stream import ADMITTED, SampleChannel


class Admission:
    """Admits groups as the gate allows, and keeps count of them until each is consumed or returned."""

    def __init__(
        self,
        *,
        gate: Gate,
        batcher: Batcher,
        source: PromptSource,
        channel: SampleChannel,
        samples_per_prompt: int,
        max_refills: int,
        rounds: Rounds | None,
        waits: WaitRegistry,
    ) -> None:
        """max_refills: groups of a step that may be replaced. rounds: where steps launch more than they need."""
        self.gate, self.batcher, self.channel = gate, batcher, channel
        self.changed = Signal(waits)
        """Fires whenever the gate or the set of live groups changed."""
        self.on_admit: Callable[[Sequence[Sample]], None] = lambda _wave: None
        self._source, self._samples_per_prompt, self._rounds = source, samples_per_prompt, rounds
        self._live: dict[int, tuple[Ticket, Launch]] = {}
        self._vacancies: list[int] = []
        self._max_refills = max_refills
        self._num_refills: dict[int, int] = {}
        self._empty: dict[int, None] = {}
        self._round_step = 0
        self._next_gid, self._next_slot = gate.admitted, gate.consumed
        self._pump_due = self._ended = False
        channel.may_open = lambda: not self.closed
        if rounds:
            rounds.on_group_accepted = self._end_unfinished_samples
            rounds.on_closed = self._close_round

    @property
    def closed(self) -> bool:
        """Whether no group can be admitted until a publication or a return gives slots back."""
        exhausted = self._rounds.exhausted if self._rounds else self._source.exhausted
        return self._ended or exhausted or self.gate.room <= 0

    def ticket(self, gid: int) -> Ticket | None:
        """A live group's ticket; None once it was consumed or dropped."""
        found = self._live.get(gid)
        return found[0] if found and gid not in self._empty else None

    def size_of(self, gid: int) -> int:
        """Samples that a live group was launched with."""
        return self._live[gid][1].num_samples

    def live_gids(self) -> list[int]:
        """The live groups, in order of admission."""
        return [gid for gid in self._live if gid not in self._empty]

    def pending(self, step: int) -> list[int]:
        """The live groups of a step that were not taken, in order of admission."""
        return [gid for gid, (ticket, _) in self._live.items() if ticket.step == step and gid not in self._empty]

    def unconsumed_prompts(self) -> list[Prompt]:
        """Prompts that were drawn and not trained on: what a resumed run has to admit again."""
        kept = self._rounds.waiting_prompts if self._rounds else []
        return [self._live[gid][1].prompt for gid in self.live_gids()] + kept

    def end(self) -> None:
        """The run is over: what is live ends as `surplus`, and nothing is admitted any more."""
        self._ended = True
        for gid in self.live_gids():
            self.retire(gid, TerminalEvent.SURPLUS)

    def pump(self) -> None:
        """Admits as many groups as there is room for."""
        self._pump_due = False
        if self._ended:
            return
        wave = self._pump_round(self._rounds) if self._rounds else self._pump_groups()
        if wave:
            self.on_admit(wave)
        self.channel.wake()
        self.changed.fire()

    def generated(self, key: SampleKey) -> None:
        """A sample is generated: its group, and with it the round, may have enough."""
        if self._rounds and self.ticket(key.gid):
            self._rounds.generated(key)

    def consume(self, need: int, step: int) -> tuple[list[Ticket], int]:
        """Takes up to `need` places of a step: (finished groups, places that stay empty)."""
        tickets = self.batcher.take(need, step)
        for ticket in tickets:
            self._live.pop(ticket.gid, None)
        filled = [ticket for ticket in tickets if ticket.gid not in self._empty]
        for ticket in tickets:
            self._empty.pop(ticket.gid, None)
        return filled, len(tickets) - len(filled)

    def retire(self, gid: int, event: TerminalEvent) -> None:
        """A group ends untrained; nothing if it has ended.

        Its slot goes back and a replacement inherits its step. Once the step has been refilled enough, the group is
        taken as an empty place instead: to the rules it is a group like any other, with a deadline and a slot.
        """
        ticket = self.ticket(gid)
        if ticket is None:
            return
        size = self.size_of(gid)
        if self._rounds:
            self._rounds.dropped(gid)
            self._return_slot(ticket)  # what a round lacks, if anything, is made up for by the next pump()
        elif self._may_refill(ticket.step):
            self._return_slot(ticket)
            heapq.heappush(self._vacancies, ticket.step)
        else:
            self._empty[gid] = None
            self.batcher.ready(ticket)
        self._end_samples(gid, size, event)
        self.changed.fire()
        self._pump_soon()

    def restart(self, gid: int) -> None:
        """A group ends as stale, and its prompt is admitted again."""
        self._source.hand_back([self._live[gid][1].prompt])
        self.retire(gid, TerminalEvent.STALE)

    def step_ended(self) -> None:
        """A batch was trained on."""
        if self._rounds:
            self._rounds.end()

    def _may_refill(self, step: int) -> bool:
        self._num_refills[step] = self._num_refills.get(step, 0) + 1
        return self._num_refills[step] <= self._max_refills

    def _pump_groups(self) -> list[Sample]:
        wave: list[Sample] = []
        while not self.closed:
            launch = Launch(prompt=next(self._source), num_samples=self._samples_per_prompt)
            step = heapq.heappop(self._vacancies) if self._vacancies else self._take_step()
            wave += self._admit(launch, step)
        return wave

    def _pump_round(self, rounds: Rounds) -> list[Sample]:
        """A new round with each step; within it, groups in place of dropped ones that nothing launched can replace."""
        wave: list[Sample] = []
        if not rounds.is_open and self.gate.room >= self.gate.prompts_per_step:
            self._round_step = self._take_step(self.gate.prompts_per_step)
            return [sample for launch in rounds.begin() for sample in self._admit(launch, self._round_step)]
        while rounds.is_open and not self.closed:
            if self._may_refill(self._round_step):
                wave += self._admit(rounds.refill(), self._round_step)
            else:
                nobody = self._new_ticket(self._round_step)
                self._empty[nobody.gid] = None
                self.batcher.ready(nobody)
                rounds.place_stays_empty()
        return wave

    def _new_ticket(self, step: int) -> Ticket:
        ticket = Ticket(gid=self._next_gid, step=step, deadline=self.gate.deadline)
        self._next_gid += 1
        self.gate.admitted += 1
        self.batcher.admit(ticket)
        return ticket

    def _admit(self, launch: Launch, step: int) -> list[Sample]:
        ticket = self._new_ticket(step)
        self._live[ticket.gid] = (ticket, launch)
        first = Sample(key=SampleKey(ticket.gid, 0), prompt=launch.prompt)
        others = [{"key": SampleKey(ticket.gid, index)} for index in range(1, launch.num_samples)]
        samples = [first, *(with_columns(first, key) for key in others)]
        for sample in samples:
            self.channel.open(sample.key, sample, ADMITTED)
        return samples

    def _take_step(self, num_slots: int = 1) -> int:
        step = self._next_slot // self.gate.prompts_per_step
        self._next_slot += num_slots
        return step

    def _return_slot(self, ticket: Ticket) -> None:
        del self._live[ticket.gid]
        self.batcher.drop(ticket)
        self.gate.returned += 1

    def _end_samples(self, gid: int, size: int, event: TerminalEvent) -> None:
        for index in range(size):
            self.channel.end(SampleKey(gid, index), event)

    def _end_unfinished_samples(self, gid: int) -> None:
        for index in range(self.size_of(gid)):
            self.channel.end_unwritten(SampleKey(gid, index), "segments", TerminalEvent.SURPLUS)

    def _close_round(self) -> None:
        if self._rounds is None:
            return
        for gid in self.live_gids():
            if not self._rounds.is_accepted(gid):
                ticket, launch = self._live[gid]
                self._rounds.too_slow(launch.prompt)
                self._return_slot(ticket)
                self._end_samples(gid, launch.num_samples, TerminalEvent.SURPLUS)
        self.changed.fire()

    def _pump_soon(self) -> None:
        # Not at once: this may be a reader's callback in the middle of a put.
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)
