"""A recorded run again, on the virtual clock: the controller sees what it saw, when it saw it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from interlace.core.profile import InferenceCosts, Profile, RolloutCosts, TrainCosts
from interlace.core.types import FinishReason, Prompt, SampleKey
from interlace.data.loading import load_prompts
from interlace.models.loading import load_tokenizer
from interlace.observe.run_folder import RunFolder
from interlace.recipes.config import Recipe
from interlace.recipes.load import load_recipe
from interlace.recipes.virtual import SimulatedRole, run_virtually
from interlace.runtime.group import Rank
from interlace.runtime.sim.cluster import Around
from interlace.runtime.timeline import Records
from interlace.runtime.worker import WorkerContext
from interlace.schedule.placement import Device
from interlace.simulate.pace import Pace
from interlace.simulate.recording import Recording, ReplayedEngine, ReplayedRank, ReplayedReward
from interlace.simulate.workers import SimulatedInference, SimulatedTrainer

FREE = Profile(
    device="nothing costs anything but what the recording says",
    device_memory_bytes=1,
    rollout=RolloutCosts(steps=((1, 1.0),), kv_tokens=1),
    actor=TrainCosts(token_s=0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A run and its replay."""

    admitted: Sequence[str]
    """Prompts in order of admission, as recorded ..."""
    admitted_again: Sequence[str]
    """... and as the replay admitted them."""
    completed: Sequence[SampleKey]
    completed_again: Sequence[SampleKey]

    @property
    def is_same(self) -> bool:
        """Whether admission and completion went in the recorded order."""
        return not (self.admission_difference or self.completion_difference)

    @property
    def admission_difference(self) -> str:
        """The first; empty where there is none."""
        return _difference("group", self.admitted, self.admitted_again)

    @property
    def completion_difference(self) -> str:
        """The first; empty where there is none."""
        return _difference("completion", self.completed, self.completed_again)


def replay(folder: RunFolder) -> Replayed:
    """Runs the flow again on what a run recorded. Raises UserError where it recorded too little, as a resumed one."""
    recipe, recording = load_recipe(str(folder.config)), Recording.read(folder)
    completed = tuple(recording.completion_order)
    log = _CompletionLog()
    again = run_virtually(recipe, _Replay(recording=recording), name=folder.name, recorder=lambda: log)
    uids = {ended.sample.key.gid: ended.sample.prompt.uid for ended in again.events}
    # What was in flight when the run ended was never finished in the one, and may be in the other.
    count = min(len(completed), len(log.keys))
    return Replayed(
        admitted=[recording.uids[gid] for gid in sorted(recording.uids)],
        admitted_again=[uids.get(gid, "none") for gid in sorted(recording.uids)],
        completed=completed[:count],
        completed_again=log.keys[:count],
    )


def _difference(what: str, first: Sequence[object], second: Sequence[object]) -> str:
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if one != other:
            return f"{what} {number}: {one} in the run, {other} in the replay"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replay:
    """Stands in for the workers."""

    recording: Recording

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(
            Device(index=index, pool="sim", pool_index=index, memory_bytes=1)
            for index in range(self.recording.num_devices)
        )

    @property
    def around(self) -> Around:
        def recorded(rank: Rank, context: WorkerContext) -> Rank:
            return ReplayedRank(rank, context, self.recording)

        return recorded

    def prompts(self, recipe: Recipe) -> Sequence[Prompt]:
        return load_prompts(recipe.task, load_tokenizer(recipe.model)).train

    def roles(self, recipe: Recipe) -> Mapping[str, SimulatedRole]:
        del recipe
        pace = Pace(FREE)
        trainer = partial(SimulatedTrainer, costs=FREE.actor, pace=pace)
        return {
            "rollout": (partial(ReplayedEngine, recording=self.recording), ReplayedEngine),
            "reward": (partial(ReplayedReward, recording=self.recording), ReplayedReward),
            "reference": (partial(SimulatedInference, costs=InferenceCosts(token_s=0), pace=pace), SimulatedInference),
            "critic": (trainer, SimulatedTrainer),
            "actor": (trainer, SimulatedTrainer),
        }


@dataclass(kw_only=True, slots=True)
class _CompletionLog:
    """A recorder of who was finished, in order."""

    keys: list[SampleKey] = field(default_factory=list)

    def keep(self, records: Records) -> None:
        for served in records.served:
            found = [response.completion for response in served.responses]
            self.keys += [done.request.key for done in found if done.finish_reason != FinishReason.ABORTED]

    def close(self, records: Records) -> None:
        self.keep(records)
