"""The books of admitted groups: through the gate, until they are trained or dropped."""

import asyncio
import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from interlace.core.types import Prompt, Sample, SampleKey, TerminalEvent
from interlace.runtime.stages.stream import ADMITTED, SampleChannel
from interlace.runtime.waits import Signal, WaitRegistry
from interlace.schedule.batcher import Batcher, Ticket
from interlace.schedule.gate import Gate


class PromptSource(Protocol):
    """Where prompts come from, in a fixed order."""

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing left."""
        ...

    def __next__(self) -> Prompt: ...


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
        waits: WaitRegistry,
    ) -> None:
        """max_refills: groups of a step that may be replaced."""
        self.gate, self.batcher, self.channel = gate, batcher, channel
        self.samples_per_prompt = samples_per_prompt
        self.changed = Signal(waits)
        """Fires whenever the gate or the set of live groups changed."""
        self.on_admit: Callable[[Sequence[Sample]], None] = lambda _wave: None
        self._source = source
        self._live: dict[int, tuple[Ticket, Prompt]] = {}
        self._vacancies: list[int] = []
        self._max_refills = max_refills
        self._num_refills: dict[int, int] = {}
        self._empty: dict[int, None] = {}
        self._next_gid = self._next_slot = gate.admitted
        self._pump_due = False
        channel.may_open = lambda: not self.closed

    @property
    def closed(self) -> bool:
        """Whether no group can be admitted until a publication or a return gives slots back."""
        return self._source.exhausted or self.gate.room <= 0

    def ticket(self, gid: int) -> Ticket | None:
        """A live group's ticket; None once it was consumed or dropped."""
        return self._live[gid][0] if self._is_live(gid) else None

    def live_gids(self) -> list[int]:
        """The live groups, in order of admission."""
        return [gid for gid in self._live if self._is_live(gid)]

    def unconsumed_prompts(self) -> list[Prompt]:
        """Prompts of the live groups, in order of admission: what a resumed run has to admit again."""
        return [self._live[gid][1] for gid in self.live_gids()]

    def pump(self) -> None:
        """Admits as many groups as there is room for."""
        self._pump_due = False
        wave: list[Sample] = []
        while not self.closed:
            wave += self._admit(next(self._source))
        if wave:
            self.on_admit(wave)
        self.channel.wake()
        self.changed.fire()

    def consume(self, need: int, step: int) -> tuple[list[Ticket], int]:
        """Takes up to `need` places of a step: (finished groups, places that stay empty)."""
        tickets = self.batcher.take(need, step)
        for ticket in tickets:
            del self._live[ticket.gid]
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
        self._num_refills[ticket.step] = self._num_refills.get(ticket.step, 0) + 1
        if self._num_refills[ticket.step] <= self._max_refills:
            del self._live[gid]
            self.batcher.drop(ticket)
            self.gate.returned += 1
            heapq.heappush(self._vacancies, ticket.step)
        else:
            self._empty[gid] = None
            self.batcher.ready(ticket)
        for index in range(self.samples_per_prompt):
            self.channel.end(SampleKey(gid, index), event)
        self.changed.fire()
        if not self._pump_due:
            # Not at once: this may be a reader's callback in the middle of a put.
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)

    def _is_live(self, gid: int) -> bool:
        return gid in self._live and gid not in self._empty

    def _admit(self, prompt: Prompt) -> list[Sample]:
        step = heapq.heappop(self._vacancies) if self._vacancies else self._take_slot()
        ticket = Ticket(gid=self._next_gid, step=step, deadline=self.gate.deadline)
        self._next_gid += 1
        self._live[ticket.gid] = (ticket, prompt)
        self.gate.admitted += 1
        self.batcher.admit(ticket)
        samples = [Sample(key=SampleKey(ticket.gid, index), prompt=prompt) for index in range(self.samples_per_prompt)]
        for sample in samples:
            self.channel.open(sample.key, sample, ADMITTED)
        return samples

    def _take_slot(self) -> int:
        self._next_slot += 1
        return (self._next_slot - 1) // self.gate.prompts_per_step
