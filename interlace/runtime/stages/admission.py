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
        waits: WaitRegistry,
    ) -> None:
        self.gate, self.batcher, self.channel = gate, batcher, channel
        self.samples_per_prompt = samples_per_prompt
        self.changed = Signal(waits)
        """Fires whenever the gate or the set of live groups changed."""
        self.on_admit: Callable[[Sequence[Sample]], None] = lambda _wave: None
        self._source = source
        self._live: dict[int, tuple[Ticket, Prompt]] = {}
        self._vacancies: list[int] = []
        self._next_gid = self._next_slot = gate.admitted
        self._pump_due = False
        channel.may_open = lambda: not self.closed

    @property
    def closed(self) -> bool:
        """Whether no group can be admitted until a publication or a return gives slots back."""
        return self._source.exhausted or self.gate.room <= 0

    def ticket(self, gid: int) -> Ticket | None:
        """A live group's ticket; None once it was consumed or dropped."""
        entry = self._live.get(gid)
        return entry[0] if entry else None

    def live_gids(self) -> list[int]:
        """The live groups, in order of admission."""
        return list(self._live)

    def unconsumed_prompts(self) -> list[Prompt]:
        """Prompts of the live groups, in order of admission: what a resumed run has to admit again."""
        return [prompt for _, prompt in self._live.values()]

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

    def consume(self, need: int, step: int) -> list[Ticket]:
        """Takes up to `need` finished groups for a step."""
        tickets = self.batcher.take(need, step)
        for ticket in tickets:
            del self._live[ticket.gid]
        return tickets

    def retire(self, gid: int, event: TerminalEvent) -> None:
        """A group ends untrained: its slot goes back and a replacement inherits its step. Nothing if it has ended."""
        entry = self._live.pop(gid, None)
        if entry is None:
            return
        ticket = entry[0]
        self.batcher.drop(ticket)
        self.gate.returned += 1
        heapq.heappush(self._vacancies, ticket.step)
        for index in range(self.samples_per_prompt):
            self.channel.end(SampleKey(gid, index), event)
        self.changed.fire()
        if not self._pump_due:
            # Not at once: this may be a reader's callback in the middle of a put.
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)

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
