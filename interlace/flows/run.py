"""Interface of the policy flow: the roles of one run, joined by one channel of samples."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from interlace.algorithms.base import Algorithm, check_advantages, check_shapes
from interlace.core.prompts import PromptSource
from interlace.core.recovery import SampleFailure
from interlace.core.types import (
    Prompt,
    Request,
    Response,
    Sample,
    SampleGroup,
    SampleKey,
    SamplingParams,
    TerminalEvent,
)
from interlace.flows.baseline import GreedyBaseline
from interlace.flows.failed_samples import FailedSamples
from interlace.flows.replay import ReplayRole
from interlace.flows.roles import CriticRole, ReferenceRole, RewardRole, RolloutRole
from interlace.flows.step_metrics import StepMeter, failure_rates
from interlace.flows.steps import Ended, LoopSettings, StepObserver, StepResult
from interlace.observe.goodput import Ledger
from interlace.rollouts.base import Episode
from interlace.rollouts.episodes.single_turn import SingleTurn
from interlace.rollouts.generate import Player
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.role_groups import ActorGroup, CriticGroup, EnvGroup, ReferenceGroup, RewardGroup, RolloutGroup
from interlace.rollouts.stream import ADVANTAGES_DONE, MARKS, SELECTED, Columns, Stream
from interlace.runtime.channel import Channel, with_columns
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.stages.admission import Admission
from interlace.stages.batches import Batch
from interlace.stages.factory import StageFactory
from interlace.stages.group import GroupStage
from interlace.stages.redraws import Redraws
from interlace.stages.train import SkippedStage


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleGroups:
    """The worker groups of a run. A role that the algorithm does not need is None or empty."""

    rollout: Sequence[RolloutGroup]
    actor: ActorGroup
    reward: RewardGroup | None = None
    """None if the episode returns the reward."""
    reference: Sequence[ReferenceGroup] = ()
    """The actor's group if the actor trains an adapter: the base model under the adapter is the reference."""
    env: Sequence[EnvGroup] = ()
    critic: CriticGroup | None = None
    """The critic or the process reward model. No algorithm has both."""
    others: Mapping[str, Sequence[WorkerGroup[Any]]] = field(default_factory=dict)
    """Instances of further roles that a user's flow uses, by role."""

    @classmethod
    def of(cls, started: Mapping[str, Sequence[WorkerGroup[Any]]]) -> "RoleGroups":
        """Sorts the started instances of each role into the fields."""

        def one(role: str) -> WorkerGroup[Any] | None:
            return next(iter(started.get(role, ())), None)

        # Only here a group gets the type of its role: the workers launched for a role have the operations of its type.
        return cls(
            rollout=cast(Sequence[RolloutGroup], started.get("rollout", ())),
            actor=cast(ActorGroup, started["actor"][0]),
            reward=cast(RewardGroup | None, one("reward")),
            reference=cast(Sequence[ReferenceGroup], started.get("reference", ())),
            env=cast(Sequence[EnvGroup], started.get("env", ())),
            critic=cast(CriticGroup | None, one("critic")),
            others={role: groups for role, groups in started.items() if role not in cls.__dataclass_fields__},
        )


SINGLE_TURN = SingleTurn()


def shares_base(groups: RoleGroups) -> bool:
    """Returns whether the reference is the base model of the actor's adapter."""
    actor: object = groups.actor
    return any(group is actor for group in groups.reference)


class OutsideGeneration:
    """Requests and episodes outside the flow, for an evaluation, on the engines of a run."""

    def __init__(self, pool: EnginePool, player: Player, meter: StepMeter) -> None:
        self._pool, self._player, self._meter = pool, player, meter

    async def complete(self, requests: Sequence[Request]) -> list[Response]:
        """Serves requests and returns their responses, in the order of the requests."""
        self._meter.evaluating()
        return await self._pool.complete(requests, who="evaluation")

    async def play(self, asked: Sequence[tuple[Prompt, int]], params: SamplingParams) -> list[Sample]:
        """Runs episodes, one for each prompt and index; see Player."""
        self._meter.evaluating()
        return await self._player.play(asked, params)


class PolicyRun:
    """The roles of a policy optimization. The lines of `flows/policy.py` call these stages:

    * `rollout.generate`: `Admission`, then `GenerateStage` over `EnginePool`.
    * `reward.score`, `reference.logprobs`, `critic.values`: a `MapStage` each.
    * `select`, `advantages`: a `GroupStage` each. `batches`: a `GroupStage` that feeds `Batches`.
    * `actor.update`, `critic.update`: a `TrainStage` each. `replay.learn`: `ReplayRole`, on kept samples.
    * `publish`: `Publisher`, then `Admission` again.
    """

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
        """stages: factory with the sizes of the loop. episode: generates each sample."""
        self.prompts, self.needs = prompts, algorithm.needs
        self._cluster, self._settings, self._algorithm = cluster, settings, algorithm
        self._observer: StepObserver | None = None
        self._sizes = stages.sizes
        self._ended: list[Ended] = []
        self._failed = FailedSamples(cluster, stages.sizes.samples_per_step)
        self._min_samples = 2 if algorithm.is_group_relative else 1
        may_open = lambda: not self.admission.closed  # noqa: E731
        self._channel: Channel[SampleKey, Sample] = Channel(
            "samples", Sample, cluster.waits, marks=MARKS, may_open=may_open, on_end=self._on_end
        )
        refill_rounds = algorithm.settings.refill_rounds
        self.admission: Admission = stages.admission(
            prompts, self._channel, refill_rounds=refill_rounds, on_admit=self._on_admit
        )
        self._meter = StepMeter(cluster, adds_verdicts=settings.adds_verdicts)
        self._stopped = False
        self.rollout = RolloutRole(stages, groups.rollout, settings, self.admission, episode, self._on_failed)
        generate = self.rollout.stage.generate
        self.redraws = Redraws(settings.recovery, cluster, self.admission, generate=generate, give_up=self._fail_sample)
        player = Player(cluster, self.rollout.pool, episode, settings.limits)
        self.outside = OutsideGeneration(self.rollout.pool, player, self._meter)
        self._baseline = self._make_greedy_baseline(groups.reward, episode) if algorithm.needs.greedy_baseline else None
        self.reward = RewardRole(
            stages,
            groups.reward,
            self.admission,
            settings.shaping,
            on_failed=self._on_failed,
            on_scored=self.redraws.record_score,
            is_needed=algorithm.needs.reward,
        )
        self.reference = self._make_reference(stages, groups)
        whole = algorithm.needs.batch_statistics
        self.critic = CriticRole(stages, groups.critic, algorithm.needs, whole_batch=whole, on_failed=self._on_failed)
        proximal = groups.actor if algorithm.needs.proximal_logprobs else None
        self.actor = (
            stages.train_stage("actor", groups.actor, whole_batch=whole, proximal=proximal)
            if algorithm.needs.on_policy
            else SkippedStage()
        )
        self.replay = ReplayRole()
        finish, draw_again = partial(_add_batch_statistics, algorithm), self.redraws.take_group
        self._batches = stages.batches(self.admission, self.rollout.pool, finish=finish, draw_again=draw_again)
        self.publisher = stages.publisher(groups.actor, self.rollout.pool)
        self._watch_stalls = stages.watch_stalls

    def _make_reference(self, stages: StageFactory, groups: RoleGroups) -> ReferenceRole:
        if shares_base(groups):
            return ReferenceRole(stages, [groups.actor], ActorGroup.base_logprobs, on_failed=self._on_failed)
        num_top = self._algorithm.needs.teacher_top
        scoring = ReferenceGroup.top_logprobs if num_top else ReferenceGroup.logprobs
        return ReferenceRole(stages, groups.reference, scoring, num_top=num_top, on_failed=self._on_failed)

    def _make_greedy_baseline(self, reward: RewardGroup | None, episode: Episode) -> GreedyBaseline:
        if not isinstance(episode, SingleTurn) or reward is None:  # the check of the recipe refuses this earlier
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
            groups_per_step=self._sizes.prompts_per_step,
            on_failed=self._failed.note,
        )

    @property
    def version(self) -> int:
        return self.admission.gate.version

    @property
    def num_groups(self) -> int:
        """Number of groups admitted so far, including before a resume. It is the number of the next group."""
        return self.admission.gate.admitted

    async def start(self, observer: StepObserver | None = None) -> None:
        """Starts the engines. An evaluation may precede the flow. observer: called at step boundaries."""
        self._observer = observer
        self.rollout.pool.start()
        await self.publisher.install()

    def select(self, samples: Stream) -> Stream:
        """Drops groups from which the algorithm learns nothing, before further models read their samples.

        Consumes: scored samples.
        Produces: samples of kept groups. Other groups end as `filtered`, and `Admission` replaces them.
        Waits for: the last sample of each group.
        Released by: that sample, or its tombstone.
        """
        needs = self._algorithm.needs
        if not (self._algorithm.selects or needs.reference or needs.critic or needs.process_reward):
            return samples  # dropping would save no computation, and the advantages wait for the whole group anyway

        def decide(group: SampleGroup) -> None:
            if not self._algorithm.keeps(group):
                self.admission.retire(group.gid, TerminalEvent.FILTERED)
                return
            for sample in group.samples:
                self._channel.put(sample.key, {}, marks=(SELECTED,))

        GroupStage("select", self.admission, min_samples=self._min_samples, on_group=decide).attach(samples)
        return samples.plus(SELECTED)

    def advantages(self, samples: Stream) -> Stream:
        """Adds `advantages`, and `returns` if the algorithm has a critic.

        Consumes: samples with all columns that the algorithm reads.
        Produces: samples with advantages. A group with too few surviving samples ends as `filtered`.
        Waits for: the last sample of each group, and its greedy baseline if the algorithm uses one.
        Released by: that sample or its tombstone, and the baseline.
        """

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
        """Opens the gate and yields one batch per step, which fills while the loop's body trains on it.

        Consumes: samples with advantages, as whole groups.
        Produces: batches.
        Waits for: groups that the batcher releases.
        Released by: a complete or dropped group, a publication, the end of the data.
        """
        GroupStage("batches", self.admission, min_samples=1, on_group=self._batches.complete).attach(groups)
        self._cluster.spawn(self._batches.watch(), name="batcher")
        self._watch_stalls()  # last, because only an attached stage can release rows
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
        """Ends the step: may publish a version, calls the observer with the metrics, and admits new groups.

        Consumes: a batch that was trained on.
        Produces: a new version every `sync_every` steps. The samples of the batch end as `trained`.
        Waits for: the weights of the actor, the engines' swaps if the schedule blocks for them, and the observer.
        Released by: the workers and the observer. `Admission` then fills the room of the gate.
        """
        for group in batch.groups:
            for sample in group.samples:
                self._channel.end(sample.key, TerminalEvent.TRAINED)
        self.admission.step_ended()
        self._batches.step_ended()
        await self.publisher.publish(batch.step)
        ended, self._ended = self._ended, []
        metrics = self._meter.measure(batch, self.version, ended, len(self._channel)) | self._settings.counts()
        metrics |= failure_rates([entry.cause for entry in ended]) | self.redraws.metrics()
        metrics |= self._baseline.metrics() if self._baseline else {}
        metrics |= {f"rollout/{name}": value for name, value in self.rollout.pool.engine_metrics().items()}
        result = StepResult(step=batch.step + 1, version=self.version, metrics=metrics, ended=ended)
        self._stopped = self._observer is not None and not await self._observer.on_step(result)
        self._meter.start()
        if not self._stopped:
            self.admission.pump()

    @property
    def num_updates(self) -> int:
        """Optimizer steps of all roles that were started in this process."""
        return self.actor.num_updates + self.critic.num_updates + self.replay.num_updates

    @property
    def scoring(self) -> str:
        """Summary of scoring in this process so far, as text for users."""
        baselines = self._baseline.describe() if self._baseline else ""
        return self._failed.describe(self.reward.num_scored) + baselines

    def _on_failed(self, key: SampleKey, failure: SampleFailure) -> bool:
        """Draws the sample again and returns True, or records its failure."""
        if self.redraws.take(key, failure):
            return True
        self._failed.count(key, failure, num_scored=self.reward.num_scored)
        return False

    def _fail_sample(self, key: SampleKey, failure: SampleFailure) -> None:
        self._failed.count(key, failure, num_scored=self.reward.num_scored)
        self._channel.end(key, TerminalEvent.FAILED)

    def ledger(self) -> Ledger:
        """Returns the ledger of device-seconds since the start of the run."""
        return self._meter.finish()

    @property
    def ended(self) -> Sequence[Ended]:
        """Samples that ended since the last step."""
        return self._ended

    def finish(self) -> Sequence[Ended]:
        """Ends all live samples as `surplus`, after the flow. Returns all samples that ended since the last step."""
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
        failure = self._failed.take(sample.key) if event is TerminalEvent.FAILED else None
        reason, cause = (failure.reason, failure.cause) if failure else ("", None)
        self._ended.append(Ended(sample=sample, event=event, reason=reason, cause=cause))


def _add_batch_statistics(algorithm: Algorithm, groups: list[SampleGroup]) -> list[SampleGroup]:
    """Returns the groups of a batch, ordered by gid, with the algorithm's advantages over the whole batch.

    Returns the groups unchanged if the algorithm uses no statistics of the batch. Raises InterlaceError if the
    advantages do not have the shapes of the samples.
    """
    if not algorithm.needs.batch_statistics or not groups:  # all of a step's groups may have been dropped
        return groups
    ordered = sorted(groups, key=lambda group: group.gid)
    samples = [sample for group in ordered for sample in group.samples]
    whole = algorithm.batch_advantages(samples)
    check_shapes("batch_advantages", "advantages", whole, samples)
    found = iter(whole)
    return [
        replace(group, samples=tuple([with_columns(sample, {"advantages": next(found)}) for sample in group.samples]))
        for group in ordered
    ]
