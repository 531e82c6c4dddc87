"""Interface of the policy flow: the roles of one run, joined by a channel."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from interlace.algorithms.base import Algorithm
from interlace.core.causes import Cause, SampleFailure
from interlace.core.errors import InterlaceError
from interlace.core.recovery import RecoveryConfig
from interlace.core.types import (
    Metrics,
    Prompt,
    PromptSource,
    Request,
    Response,
    Sample,
    SampleGroup,
    SampleKey,
    SamplingParams,
    TerminalEvent,
)
from interlace.flows.advantage_checks import check_advantages, check_shapes
from interlace.flows.baseline import GreedyBaseline
from interlace.flows.roles import CriticRole, ReferenceRole, RewardRole, RolloutRole
from interlace.flows.step_metrics import StepMeter, failure_rates
from interlace.observe.goodput import Ledger
from interlace.observe.step_line import brief
from interlace.rewards.shaping import ShapingConfig
from interlace.robots.replay.learning import ReplayRole
from interlace.rollouts.base import Episode
from interlace.rollouts.episodes.single_turn import SingleTurn
from interlace.rollouts.play import Player
from interlace.rollouts.role_groups import ActorGroup, CriticGroup, EnvGroup, ReferenceGroup, RewardGroup, RolloutGroup
from interlace.rollouts.session import NO_LIMITS, SessionLimits
from interlace.rollouts.stream import ADVANTAGES_DONE, MARKS, SELECTED, Columns, Stream
from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.stages.admission import Admission
from interlace.stages.batches import Batch
from interlace.stages.factory import StageFactory
from interlace.stages.group import GroupStage
from interlace.stages.redraws import Redraws


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleGroups:
    """The workers of a run. None or empty where the algorithm has no need of the role."""

    rollout: Sequence[RolloutGroup]
    actor: ActorGroup
    reward: RewardGroup | None = None
    """None where the episode brings its own reward."""
    reference: Sequence[ReferenceGroup] = ()
    """The actor's own group where the actor trains an adapter: the base under it is the reference."""
    env: Sequence[EnvGroup] = ()
    critic: CriticGroup | None = None
    """Or the process reward model: no algorithm has both."""
    others: Mapping[str, Sequence[WorkerGroup[Any]]] = field(default_factory=dict)
    """Instances of the roles that a flow of its own uses, by role."""

    @classmethod
    def of(cls, started: Mapping[str, Sequence[WorkerGroup[Any]]]) -> "RoleGroups":
        """Sorts what was started, the instances of each role, into the flow's places."""

        def one(role: str) -> WorkerGroup[Any] | None:
            return next(iter(started.get(role, ())), None)

        # The one place where a group gets the type of its role: what was launched for the role has its operations.
        return cls(
            rollout=cast(Sequence[RolloutGroup], started["rollout"]),
            actor=cast(ActorGroup, started["actor"][0]),
            reward=cast(RewardGroup | None, one("reward")),
            reference=cast(Sequence[ReferenceGroup], started.get("reference", ())),
            env=cast(Sequence[EnvGroup], started.get("env", ())),
            critic=cast(CriticGroup | None, one("critic")),
            others={role: groups for role, groups in started.items() if role not in cls.__dataclass_fields__},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A sample that reached its terminal event."""

    sample: Sample
    event: TerminalEvent
    reason: str = ""
    """Why it failed."""
    cause: Cause | None = None
    """Cause of its failure; None if it did not fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of one step."""

    step: int
    """Steps done, this one included: the first is 1."""
    version: int
    """Current when the step ended, after its publication."""
    metrics: Metrics
    ended: Sequence[Ended]
    """Samples that ended since the last step, whatever their event."""


class StepObserver(Protocol):
    """Observer of each step boundary, after the publication and before the gate opens."""

    async def on_step(self, result: StepResult) -> bool:
        """Takes in a step's result; returning False ends the run here."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """Settings of drawing and rewarding samples. The loop's sizes are the stages'."""

    sampling: SamplingParams
    shaping: ShapingConfig = ShapingConfig()
    """Shaping of rewards: the parts that need a whole group are added here; the rest where samples are scored."""
    limits: SessionLimits = NO_LIMITS
    """Limits of each episode."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Limits of recovery from failures."""
    counts: Callable[[], Metrics] = Metrics
    """Returns what was counted around the samples since its last call: by simulators."""


SINGLE_TURN = SingleTurn()


def shares_base(groups: RoleGroups) -> bool:
    """Says whether the reference is the base of the actor's adapter."""
    return any(group is groups.actor for group in groups.reference)


class PolicyRun:
    """The roles of a policy optimization, each a point where the flow's stream passes."""

    def __init__(
        self,
        cluster: Cluster,
        stages: StageFactory,
        groups: RoleGroups,
        algorithm: Algorithm,
        settings: LoopSettings,
        prompts: PromptSource,
        episode: Episode = SINGLE_TURN,
    ) -> None:
        """stages: made for the sizes of the loop. episode: how a sample comes to be."""
        self.prompts = prompts
        self._cluster, self._settings, self._algorithm = cluster, settings, algorithm
        self._observer: StepObserver | None = None
        self._sizes = stages.sizes
        self._ended: list[Ended] = []
        self._failures: dict[SampleKey, SampleFailure] = {}
        may_open = lambda: not self.admission.closed  # noqa: E731
        self._channel: Channel[SampleKey, Sample] = Channel(
            "samples", Sample, cluster.waits, marks=MARKS, may_open=may_open, on_end=self._on_end
        )
        refill_rounds = algorithm.settings.refill_rounds
        self.admission: Admission = stages.admission(
            prompts, self._channel, refill_rounds=refill_rounds, on_admit=self._on_admit
        )
        self._meter = StepMeter(cluster)
        self._stopped = False
        self.rollout = RolloutRole(stages, groups.rollout, settings, self.admission, episode, self._on_failed)
        self.redraws = Redraws(settings.recovery, cluster, self.admission, generate=self.rollout.stage.generate)
        self._player = Player(cluster, self.rollout.pool, episode, settings.limits)
        self._baseline = self._greedy_baseline(groups.reward, episode) if algorithm.needs.greedy_baseline else None
        self.reward = RewardRole(
            stages,
            groups.reward,
            self.admission,
            settings.shaping,
            on_failed=self._on_failed,
            on_scored=self.redraws.scored,
        )
        self._num_not_scored, self._first_failure = 0, ""
        self.reference = (
            ReferenceRole(stages, [groups.actor], ActorGroup.base_logprobs)
            if shares_base(groups)
            else ReferenceRole(stages, groups.reference, ReferenceGroup.logprobs)
        )
        whole = algorithm.needs.batch_statistics
        self.critic = CriticRole(stages, groups.critic, algorithm.needs, whole_batch=whole)
        self.actor = stages.train_stage(
            "actor",
            groups.actor,
            whole_batch=whole,
            proximal=groups.actor if algorithm.needs.proximal_logprobs else None,
        )
        self.replay = ReplayRole(groups.actor, algorithm.needs, lambda: self.version)
        self._batches = stages.batches(self.admission, self.rollout.pool, finish=self._with_batch_statistics)
        self.publisher = stages.publisher(groups.actor, self.rollout.pool)
        self._watch_stalls = stages.watch_stalls

    def _greedy_baseline(self, reward: RewardGroup | None, episode: Episode) -> GreedyBaseline:
        if not isinstance(episode, SingleTurn) or reward is None:  # a recipe that asks for it was refused before
            raise ValueError(
                "a greedy baseline is a single response, scored by the reward role; here are "
                f"{type(episode).__name__} and {'a reward role' if reward else 'no reward role'}"
            )
        return GreedyBaseline(
            self._cluster,
            self.rollout.pool,
            reward,
            self.admission,
            self._settings.sampling,
            on_failed=self._note_failure,
        )

    @property
    def version(self) -> int:
        """The current version of the weights."""
        return self.admission.gate.version

    @property
    def num_groups(self) -> int:
        """Groups admitted so far, over all of a run's processes: the next one's number."""
        return self.admission.gate.admitted

    async def start(self, observer: StepObserver | None = None) -> None:
        """Starts the engines, before the flow: an evaluation can come first. observer: called at step boundaries."""
        self._observer = observer
        self.rollout.pool.start()
        await self.publisher.install()

    async def install_weights(self) -> None:
        """Brings the actor's weights to all engines without a new version: at the end, between two publications."""
        await self.publisher.install()

    async def complete(self, requests: Sequence[Request]) -> list[Response]:
        """Serves requests outside the flow, for an evaluation."""
        self._meter.evaluating()
        return await self.rollout.pool.complete(requests, who="evaluation")

    async def play(self, asked: Sequence[tuple[Prompt, int]], params: SamplingParams) -> list[Sample]:
        """Plays the run's episodes outside the flow, one for each prompt and index; see Player."""
        self._meter.evaluating()
        return await self._player.play(asked, params)

    def unconsumed_prompts(self) -> list[Prompt]:
        """Prompts that were drawn and not trained on, in their order: part of a checkpoint."""
        return self.admission.unconsumed_prompts()

    def select(self, samples: Stream) -> Stream:
        """Drops groups that the algorithm has no use for."""
        needs = self._algorithm.needs
        if not (self._algorithm.selects or needs.reference or needs.critic or needs.process_reward):
            return samples  # nothing is saved by dropping, and the advantages wait for the whole group anyway

        def decide(group: SampleGroup) -> None:
            if not self._algorithm.keeps(group):
                self.admission.retire(group.gid, TerminalEvent.FILTERED)
                return
            for sample in group.samples:
                self._channel.put(sample.key, {}, marks=(SELECTED,))

        GroupStage("select", self.admission, min_samples=self._min_samples, on_group=decide).attach(samples)
        return samples.plus(SELECTED)

    def advantages(self, samples: Stream) -> Stream:
        """Advantages of each group, as soon as its last sample is here."""

        def compute(group: SampleGroup) -> None:
            if self._baseline:
                group = replace(group, baseline_reward=self._baseline.take(group.gid))
            result = self._algorithm.advantages(group)
            check_advantages(result, group, self._algorithm.needs)
            for place, sample in enumerate(group.samples):
                columns: Columns = {"advantages": result.advantages[place]}
                if result.returns is not None:
                    columns["returns"] = result.returns[place]
                self._channel.put(sample.key, columns, marks=(ADVANTAGES_DONE,))

        if self._baseline:
            samples = self._baseline.attach(samples)
        GroupStage("advantages", self.admission, min_samples=self._min_samples, on_group=compute).attach(samples)
        return samples.plus(ADVANTAGES_DONE)

    async def batches(self, groups: Stream) -> AsyncIterator[Batch]:
        """Yields one batch a step."""
        GroupStage("batches", self.admission, min_samples=1, on_group=self._batches.complete).attach(groups)
        self._cluster.spawn(self._batches.watch(), name="batcher")
        self._watch_stalls()  # not before: a stage that is not attached has nothing to let go
        self.admission.pump()
        self._meter.start()
        async for batch in self._batches.iterate(self._sizes.done_steps, self._sizes.num_steps):
            self._cluster.timeline.step = batch.step + 1
            yield batch
            if not batch.closed:
                raise ValueError(f"step {batch.step} was left before its batch was closed")
            if self._stopped:
                break

    async def publish(self, batch: Batch) -> None:
        """Ends the step: samples are trained, a new version may be made, the observer is called, the gate opens."""
        for group in batch.groups:
            for sample in group.samples:
                self._channel.end(sample.key, TerminalEvent.TRAINED)
        self.admission.step_ended()
        self._batches.step_ended()
        await self.publisher.publish(batch.step)
        ended, self._ended = self._ended, []
        events = [(entry.sample, entry.event) for entry in ended]
        metrics = self._meter.measure(batch, self.version, events, len(self._channel)) | self._settings.counts()
        metrics |= failure_rates([entry.cause for entry in ended]) | self.redraws.metrics()
        metrics |= {f"rollout/{name}": value for name, value in self.rollout.pool.engine_metrics().items()}
        result = StepResult(step=batch.step + 1, version=self.version, metrics=metrics, ended=ended)
        self._stopped = self._observer is not None and not await self._observer.on_step(result)
        self._meter.start()
        if not self._stopped:
            self.admission.pump()

    @property
    def num_updates(self) -> int:
        """Steps of the optimizers that were begun, in this process."""
        return self.actor.num_updates + self.critic.num_updates + self.replay.num_updates

    @property
    def scoring(self) -> str:
        """Account of scoring so far in this process, for people."""
        scored, failed = self.reward.num_scored, self._num_not_scored
        first = f", the first of them by {brief(self._first_failure)}" if failed else ""
        return f"{scored} samples scored, {failed} failed{first}"

    def _note_failure(self, key: SampleKey, failure: SampleFailure) -> bool:
        self._failures[key] = failure
        return False

    def _on_failed(self, key: SampleKey, failure: SampleFailure) -> bool:
        """Draws the sample again, or notes its failure.

        A first step's worth of samples that all fail ends the run: others would take their places.
        """
        if self.redraws.take(key, failure):
            return True
        self._note_failure(key, failure)
        self._num_not_scored += 1
        self._first_failure = self._first_failure or failure.reason
        if not self.reward.num_scored and self._num_not_scored == self._sizes.samples_per_step:
            self._cluster.fail(
                InterlaceError(
                    f"the first {self._num_not_scored} samples, a whole step, all failed, so there is nothing to train "
                    f"on. The first failed by {brief(self._first_failure)}."
                )
            )
        return False

    def _with_batch_statistics(self, groups: list[SampleGroup]) -> list[SampleGroup]:
        if not self._algorithm.needs.batch_statistics or not groups:  # all of a step's groups may have been dropped
            return groups
        ordered = sorted(groups, key=lambda group: group.gid)
        samples = [sample for group in ordered for sample in group.samples]
        whole = self._algorithm.batch_advantages(samples)
        check_shapes("batch_advantages", "advantages", whole, samples)
        found = iter(whole)
        return [
            replace(group, samples=tuple(replace(sample, advantages=next(found)) for sample in group.samples))
            for group in ordered
        ]

    @property
    def _min_samples(self) -> int:
        return 2 if self._algorithm.is_group_relative else 1

    def ledger(self) -> Ledger:
        """Returns the ledger of device-seconds from the start until now."""
        return self._meter.finish()

    @property
    def ended(self) -> Sequence[Ended]:
        """Samples that ended since the last step."""
        return self._ended

    def finish(self) -> Sequence[Ended]:
        """Ends as `surplus`, after the flow, what was admitted and not needed. Returns it, with what ended since."""
        self.admission.end()
        self._channel.close()
        return self._ended

    def _on_admit(self, wave: Sequence[Sample]) -> None:
        self.rollout.stage.generate(wave)
        if self._baseline:
            self._baseline.admitted(wave)

    def _on_end(self, sample: Sample, event: TerminalEvent | None) -> None:
        if event is None:
            raise ValueError(f"sample {sample.key} left the channel without a terminal event")
        if sample.finish_reason is None:
            self.rollout.stage.cancel(sample.key)
        self.redraws.ended(sample.key)
        failure = self._failures.pop(sample.key, None)
        reason, cause = (failure.reason, failure.cause) if failure else ("", None)
        self._ended.append(Ended(sample=sample, event=event, reason=reason, cause=cause))
