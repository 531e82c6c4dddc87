"""A recorded run again, on the virtual clock: the controller sees what it saw, when it saw it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from interlace.core.errors import UserError
from interlace.core.types import SampleKey
from interlace.data.loading import load_prompts
from interlace.data.stream import PromptStream
from interlace.flows.policy import policy_optimization
from interlace.flows.run import Ended, StepResult
from interlace.jobs.assemble import assemble
from interlace.jobs.evaluation import Evaluator
from interlace.jobs.launch import ModelSources, launch_roles
from interlace.jobs.saving import Saver
from interlace.jobs.state import RunState
from interlace.jobs.virtual import HANG_AFTER_S, Timed, on_virtual_clock
from interlace.models.loading import load_tokenizer
from interlace.observe.checkpoints import Checkpoints
from interlace.observe.run_folder import RunFolder
from interlace.recipes.config import Recipe, algorithm_of
from interlace.recipes.load import load_recipe
from interlace.runtime.timeline import Records
from interlace.runtime.trace import finished_samples
from interlace.simulate.recording import Recording
from interlace.simulate.replayed import ReplayCluster


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
    """Runs the flow again on what a run recorded.

    Of a resumed run, on what its last process did. Raises UserError where too little was recorded or kept, and
    PartedError at the first call of a worker that the run did not make.
    """
    recipe, recording = load_recipe(str(folder.config)), Recording.read(folder)
    session = _Session(recipe, recording, folder)
    on_virtual_clock(session.run)
    completed, completed_again = recording.completion_order, session.completed
    uids = {ended.sample.key.gid: ended.sample.prompt.uid for ended in session.ended}
    # What was in flight when the run ended went on in the one, and may not have in the other.
    count = min(len(completed), len(completed_again))
    return Replayed(
        admitted=[recording.uids[gid] for gid in sorted(recording.uids)],
        admitted_again=[uids.get(gid, "none") for gid in sorted(recording.uids)],
        completed=completed[:count],
        completed_again=completed_again[:count],
    )


def _difference(what: str, first: Sequence[object], second: Sequence[object]) -> str:
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if one != other:
            return f"{what} {number}: {one} in the run, {other} in the replay"
    return ""


@dataclass(kw_only=True, slots=True)
class _CompletionLog:
    """A recorder of who was finished, in order."""

    keys: list[SampleKey] = field(default_factory=list)

    def keep(self, records: Records) -> None:
        for span in records.spans:
            self.keys += finished_samples(span)

    def close(self, records: Records) -> None:
        self.keep(records)


class _Session:
    """What a training run does with its workers, from its first weights to its last step."""

    def __init__(self, recipe: Recipe, recording: Recording, folder: RunFolder) -> None:
        self._recipe, self._recording, self._checkpoints = recipe, recording, folder.checkpoints
        done_steps = recording.done_steps
        resumed_from = folder.checkpoints / f"step_{done_steps}"
        if done_steps and not resumed_from.is_dir():
            raise UserError(
                f"{folder.path} was resumed after step {done_steps}, and {resumed_from}, where that began, is gone. A "
                "run whose keep_checkpoints is high enough can be replayed."
            )
        self._state = RunState.read(resumed_from) if done_steps else None
        """Where the run stood when it was resumed; None where it was not."""
        self._log = _CompletionLog()
        self.ended: list[Ended] = []
        self._stream: PromptStream
        self._saver: Saver
        self._evaluator: Evaluator

    @property
    def completed(self) -> Sequence[SampleKey]:
        """Who was finished, in order."""
        return self._log.keys

    async def run(self) -> None:
        """As recorded."""
        cluster = ReplayCluster(self._recipe.schedule.resolved, self._recording, hang_after_s=HANG_AFTER_S)
        try:
            with cluster.timeline.recorded_by(self._log):
                await cluster.run(self._work(cluster))
        finally:
            await cluster.shutdown()

    async def _work(self, cluster: ReplayCluster) -> None:
        recipe = self._recipe
        prompts = load_prompts(recipe.task, load_tokenizer(recipe.model))
        stream = self._stream = PromptStream(prompts.train, recipe.seed)
        groups = await launch_roles(cluster, ModelSources(recipe=recipe, policy=recipe.model, initial=recipe.model))
        # It asks for what a run asked for; on this cluster nothing is written.
        self._saver = Saver(cluster, Checkpoints(self._checkpoints, keep=recipe.keep_checkpoints), groups)
        if self._state:
            stream.restore(self._state.stream)
        ready = await assemble(
            cluster,
            recipe,
            Timed(algorithm_of(recipe)),
            groups,
            stream,
            self,
            resumed=self._state,
        )
        self._evaluator = Evaluator(recipe, ready.sampling, prompts.heldout, ready.run, groups.reward)
        await ready.run.start()
        if self._evaluator.has_prompts and self._state is None:
            await self._evaluator.evaluate()
        await policy_optimization(ready.run)
        self.ended += ready.run.finish()

    async def on_step(self, result: StepResult) -> bool:
        """What followed each step. False where the recording ends."""
        self.ended += result.ended
        is_last = result.step >= self._recording.last_step
        if is_last and not self._recording.is_whole:
            return False
        if self._is_due(self._recipe.eval_every, result.step) and self._evaluator.has_prompts:
            await self._evaluator.evaluate()
        if self._is_due(self._recipe.checkpoint_every, result.step):
            await self._saver.copy()
            nothing = RunState(done_steps=result.step, num_groups=0, stream=self._stream.state([]), before=None)
            self._saver.write(nothing)
        return not is_last

    @staticmethod
    def _is_due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0
