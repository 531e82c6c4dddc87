"""The rows of groups in the channel of samples: opened, opened again, and ended together."""

from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from interlace.core.payload import StoredSegments, is_lost
from interlace.core.prompts import PromptSource
from interlace.core.types import Prompt, Sample, SampleKey, TerminalEvent
from interlace.rollouts.stream import ADMITTED, ADVANTAGES_DONE, EPISODE, GENERATED, SELECTED, SampleChannel
from interlace.runtime.channel import with_columns
from interlace.schedule.rounds import Launch
from interlace.schedule.steps import Steps


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

    def __init__(self, rows: GroupRows, samples_per_prompt: int) -> None:
        self._rows, self._samples_per_prompt = rows, samples_per_prompt
        self._waiting: deque[GroupInFlight] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Sequence[GroupInFlight]:
        """Groups that are not admitted again yet."""
        return tuple(self._waiting)

    def add(self, groups: Iterable[GroupInFlight]) -> None:
        """Adds the groups of the checkpoint, in order of their numbers. Called before the first group is admitted."""
        self._waiting.extend(groups)

    def open_next(self, steps: Steps) -> list[Sample]:
        """Admits the next group. Returns its samples."""
        group = self._waiting.popleft()
        return self._rows.open(steps.readmit(group.gid).gid, self._make_launch(group))

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
