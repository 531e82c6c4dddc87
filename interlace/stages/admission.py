"""The first stage: admits groups through the gate as rows of the channel, and tracks each until its end."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from interlace.core.payload import StoredSegments, is_lost
from interlace.core.prompts import PromptSource
from interlace.core.types import Prompt, Sample, SampleKey, TerminalEvent
from interlace.rollouts.stream import ADMITTED, ADVANTAGES_DONE, EPISODE, GENERATED, SELECTED, SampleChannel
from interlace.runtime.channel import with_columns
from interlace.runtime.waits import Signal, WaitRegistry
from interlace.schedule.rounds import Launch, Rounds
from interlace.schedule.staleness import Ticket
from interlace.schedule.steps import Places, Steps, Taken


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupInFlight:
    """A group that was admitted and not yet trained on. A resumed run admits it again, under its number."""

    gid: int
    prompt: Prompt
    ended: Sequence[int] = ()
    """Indices of its samples that have ended. They are not drawn again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlight:
    """Prompts of a run at a step boundary that were drawn and not trained on."""

    groups: Sequence[GroupInFlight]
    """The groups that were admitted, in order of their numbers."""
    waiting: Sequence[Prompt]
    """Prompts without a group, which are drawn before new ones."""
    places: Places | None = None
    """The places of steps. If None, the groups take the first places that are left."""


class GroupRows:
    """Opens the rows of a group and ends them. A group is live from its first row until its end."""

    def __init__(self, channel: SampleChannel) -> None:
        self._channel = channel
        self._launches: dict[int, Launch] = {}
        """Launch of each live group, by gid."""

    def open(self, gid: int, launch: Launch) -> list[Sample]:
        """Opens one row for each sample of a group. Returns the samples."""
        self._launches[gid] = launch
        indices = launch.indices
        first = Sample(key=SampleKey(gid, indices[0]), prompt=launch.prompt)
        others = [{"key": SampleKey(gid, index)} for index in indices[1:]]
        samples = [first, *(with_columns(first, key) for key in others)]
        for sample in samples:
            self._channel.open(sample.key, sample, ADMITTED)
        return samples

    def find_keys(self, gid: int) -> list[SampleKey]:
        """Returns the keys of the rows that were opened for a live group."""
        return [SampleKey(gid, index) for index in self._launches[gid].indices]

    def find_ended(self, gid: int) -> list[int]:
        """Returns the indices of a live group's samples that have ended."""
        indices = range(self._launches[gid].num_samples)
        return [index for index in indices if SampleKey(gid, index) not in self._channel]

    def reopen(self, gid: int) -> list[Sample]:
        """Opens the rows of a generated group again, with the generated columns of samples whose content exists.

        Samples that have ended stay ended, and samples that are being generated continue. Returns the samples whose
        content is lost, as they were.
        """
        self._launches[gid] = replace(self._launches[gid], ended=self.find_ended(gid))
        samples = [self._channel.record(key) for key in self.find_keys(gid)]
        lost: list[Sample] = []
        columns: tuple[str, ...]
        for sample in samples:
            if sample.finish_reason is None:
                continue
            again, columns = _keep_generated(sample), (*ADMITTED, *GENERATED)
            if is_lost(sample.segments):
                lost.append(sample)
                again, columns = Sample(key=sample.key, prompt=sample.prompt), ADMITTED
            self._channel.reopen(sample.key, again, columns, without=(SELECTED, ADVANTAGES_DONE))
        return lost

    def find_prompt(self, gid: int) -> Prompt:
        return self._launches[gid].prompt

    def end(self, gid: int, event: TerminalEvent) -> None:
        for index in self._launches.pop(gid).indices:
            self._channel.end(SampleKey(gid, index), event)

    def forget(self, gid: int) -> None:
        """Removes a group that was taken. Its consumer ends the rows."""
        del self._launches[gid]


def _keep_generated(sample: Sample) -> Sample:
    """Returns a sample without the columns that stages computed. Late results for the sample before are ignored."""
    kept = {name: sample.__dict__[name] for name in (*GENERATED, *EPISODE)}
    segments = sample.segments
    kept["segments"] = copy(segments) if isinstance(segments, StoredSegments) else (*segments,)
    return with_columns(Sample(key=sample.key, prompt=sample.prompt), kept)


class ResumedGroups:
    """The groups in flight of a checkpoint. They are admitted before new groups, under their numbers."""

    def __init__(self, rows: GroupRows, steps: Steps, samples_per_prompt: int, *, keeps_places: bool) -> None:
        """keeps_places: the groups take their places in steps again; else the first places that are left."""
        self._rows, self._steps, self._samples_per_prompt = rows, steps, samples_per_prompt
        self._keeps_places = keeps_places
        self._waiting: deque[GroupInFlight] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Sequence[GroupInFlight]:
        """Groups that are not admitted again yet."""
        return tuple(self._waiting)

    def add(self, groups: Iterable[GroupInFlight], places: Places | None) -> None:
        """Adds the groups of the checkpoint, in order of their numbers. Called before the first group is admitted."""
        self._waiting.extend(groups)
        if places and self._keeps_places:
            self._steps.restore(places)

    def open_next(self) -> list[Sample]:
        """Admits the next group. Returns its samples."""
        group = self._waiting.popleft()
        return self._rows.open(self._steps.readmit(group.gid).gid, self._make_launch(group))

    def end(self, source: PromptSource | None = None) -> None:
        """Ends the groups that were not admitted again as `surplus`. source: takes back their prompts."""
        if source:
            source.hand_back([group.prompt for group in self._waiting])
        while self._waiting:
            group = self._waiting.popleft()
            self._rows.open(group.gid, self._make_launch(group))
            self._rows.end(group.gid, TerminalEvent.SURPLUS)

    def _make_launch(self, group: GroupInFlight) -> Launch:
        return Launch(prompt=group.prompt, num_samples=self._samples_per_prompt, ended=group.ended)


class Admission:
    """Admits groups of samples while the gate has room.

    `Steps` assigns each group to a step. With an oversampling tail, `Rounds` chooses the groups that a step launches.

    Consumes: prompts of the source.
    Produces: rows of the channel, in waves, each of which is passed to `on_admit`; tombstones of dropped groups.
    Waits for: room in the gate.
    Released by: a publication (`pump`), a dropped group (`retire`), the end of a step (`step_ended`).
    """

    def __init__(
        self,
        *,
        steps: Steps,
        source: PromptSource,
        channel: SampleChannel,
        samples_per_prompt: int,
        rounds: Rounds | None,
        waits: WaitRegistry,
        on_admit: Callable[[Sequence[Sample]], None],
    ) -> None:
        """rounds: set if steps launch more samples than they train on.

        on_admit: called with the samples of each wave after their rows are open.
        """
        self.gate, self.batcher, self.channel = steps.gate, steps.batcher, channel
        self.changed = Signal(waits)
        """Fires at each change of the gate or of the set of live groups."""
        self._on_admit = on_admit
        self._source, self._samples_per_prompt, self._rounds = source, samples_per_prompt, rounds
        self.steps, self.rows = steps, GroupRows(channel)
        self.resumed = ResumedGroups(self.rows, steps, samples_per_prompt, keeps_places=rounds is None)
        """Groups in flight of the checkpoint that the run continues from."""
        self._round_step = 0
        self._pump_due = self._ended = self._paused = False

    @property
    def closed(self) -> bool:
        """True if no group can be admitted before a publication or a dropped group returns slots."""
        exhausted = self._rounds.exhausted if self._rounds else self._source.exhausted and not self.resumed
        return self._ended or exhausted or self.gate.room <= 0

    def ticket(self, gid: int) -> Ticket | None:
        """Returns the ticket of a live group, or None if the group was taken or dropped."""
        return self.steps.ticket(gid)

    def live_gids(self) -> list[int]:
        """Returns the live groups, in order of admission."""
        return self.steps.live_gids()

    def in_flight(self) -> InFlight:
        """Returns the prompts that were drawn and not trained on, for a checkpoint."""
        live = [
            GroupInFlight(gid=gid, prompt=self.rows.find_prompt(gid), ended=self.rows.find_ended(gid))
            for gid in self.live_gids()
        ]
        waiting = self._rounds.waiting_prompts if self._rounds else []
        groups = [*live, *self.resumed.waiting]
        return InFlight(groups=groups, waiting=waiting, places=None if self._rounds else self.steps.list_places())

    def end(self) -> None:
        """Ends the run: live groups end as `surplus`, and no further group is admitted."""
        self._ended = True
        for gid in self.live_gids():
            self.retire(gid, TerminalEvent.SURPLUS)
        self.resumed.end()

    def pump(self) -> None:
        """Admits groups until the gate has no room."""
        self._pump_due = False
        if not self._ended and not self._paused:
            self._admit()

    def set_paused(self, paused: bool) -> None:
        """Begins or ends a pause, in which no group is admitted. The gate stays open, so groups follow at its end."""
        self._paused = paused
        self.pump()

    def admit_probe(self) -> None:
        """Admits one group, or one round, during a pause."""
        if not self._ended:
            self._admit(most_groups=1)

    def reopen(self, sample: Sample, columns: Sequence[str]) -> None:
        """Replaces a live sample by one without results, which is drawn again."""
        if self._rounds and self.channel.record(sample.key).segments:
            self._rounds.redrawn(sample.key.gid)
        self.channel.reopen(sample.key, sample, columns)

    def _admit(self, most_groups: float = math.inf) -> None:
        wave = self._pump_round(self._rounds) if self._rounds else self._pump_groups(most_groups)
        if wave:
            self._on_admit(wave)
        self.channel.wake()
        self.changed.fire()

    def generated(self, key: SampleKey) -> None:
        """Records a generated sample. Its group, and then the round, may be complete with it."""
        rounds = self._rounds
        if rounds and self.ticket(key.gid) and rounds.generated(key.gid):
            for other in self.rows.find_keys(key.gid):
                self.channel.end_unwritten(other, "segments", TerminalEvent.SURPLUS)
            self._end_surplus_of_full(rounds)

    def consume(self, need: int, step: int, may_take: Callable[[int], bool]) -> Taken:
        """Takes up to `need` complete groups or empty places of a step. may_take: see Batcher.take()."""
        taken = self.steps.take(need, step, may_take)
        for ticket in taken.tickets:
            self.rows.forget(ticket.gid)
        return taken

    def retire(self, gid: int, event: TerminalEvent) -> None:
        """Ends a group without training. Its place is refilled or stays empty. Does nothing if the group has ended."""
        if self.ticket(gid) is None:
            return
        if self._rounds:
            self._rounds.dropped(gid)
            self.steps.drop(gid)  # the next pump() replaces the group if the round needs another
        else:
            self.steps.replace(gid)
        self.rows.end(gid, event)
        self.changed.fire()
        self._pump_soon()

    def restart(self, gid: int) -> None:
        """Ends a group as `stale` and admits its prompt again."""
        self._source.hand_back([self.rows.find_prompt(gid)])
        self.retire(gid, TerminalEvent.STALE)

    def step_ended(self) -> None:
        """Records that a batch was trained on."""
        if self._rounds:
            self._rounds.end()

    def _pump_groups(self, most: float) -> list[Sample]:
        wave: list[Sample] = []
        while not self.closed and most > 0:
            most -= 1
            if self.resumed:
                wave += self.resumed.open_next()
                continue
            launch = Launch(prompt=next(self._source), num_samples=self._samples_per_prompt)
            wave += self.rows.open(self.steps.admit().gid, launch)
        return wave

    def _pump_round(self, rounds: Rounds) -> list[Sample]:
        """Opens one round per step. Within a round, replaces dropped groups when too few live groups are left."""
        wave: list[Sample] = []
        self.resumed.end(self._source)  # rounds launch other numbers of samples, so groups cannot be taken over
        if not rounds.is_open and self.gate.room >= self.gate.prompts_per_step:
            step = self._round_step = self.steps.begin_step()
            return [
                sample for launch in rounds.begin() for sample in self.rows.open(self.steps.admit(step).gid, launch)
            ]
        while rounds.is_open and not self.closed:
            if self.steps.use_refill(self._round_step):
                wave += self.rows.open(self.steps.admit(self._round_step).gid, rounds.refill())
            else:
                self.steps.add_empty(self._round_step)
                rounds.count_empty_place()
                self._end_surplus_of_full(rounds)
        return wave

    def _end_surplus_of_full(self, rounds: Rounds) -> None:
        """Ends the groups that a full round does not need. Their prompts are drawn again later."""
        if not rounds.is_full:
            return
        for gid in self.live_gids():
            if not rounds.is_accepted(gid):
                rounds.keep_for_later_round(self.rows.find_prompt(gid))
                self.steps.drop(gid)
                self.rows.end(gid, TerminalEvent.SURPLUS)
        self.changed.fire()

    def _pump_soon(self) -> None:
        # Deferred, because the caller may be a reader's callback within a put.
        if not self._pump_due:
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self.pump)
