"""Factory of the stages of a run. Flows compose these stages and never read the schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from interlace.core.prompts import PromptSource
from interlace.core.recovery import SampleFailure
from interlace.core.types import Sample, SampleGroup, SamplingParams
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.lending import Lending
from interlace.rollouts.membership import MembershipRules
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.role_groups import ActorGroup, RolloutGroup, TrainedGroup
from interlace.rollouts.stream import Columns, OnFailed, SampleChannel
from interlace.runtime.cluster import Cluster
from interlace.schedule.lengths import LengthPredictor
from interlace.schedule.rounds import Rounds
from interlace.schedule.schedule import Oversample, Schedule, TailBatching
from interlace.schedule.staleness import Batcher, Gate
from interlace.schedule.steps import Steps
from interlace.stages.admission import Admission
from interlace.stages.batches import Batches
from interlace.stages.map import Compute, G, MapStage, R
from interlace.stages.publish import Publisher
from interlace.stages.train import TrainStage


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSizes:
    """Sizes of one run, read from the recipe once and defined nowhere else."""

    prompts_per_step: int
    """Groups per step."""
    samples_per_prompt: int
    num_steps: int
    """Steps of the whole run."""
    done_steps: int = 0
    """Steps that a resumed run has trained before."""
    minibatches: int = 1
    """Optimizer updates per pass over the samples of a step."""
    epochs: int = 1
    """Passes over the samples of a step."""

    @property
    def samples_per_step(self) -> int:
        """Samples that a step trains on if none is dropped."""
        return self.prompts_per_step * self.samples_per_prompt


class StageFactory:
    """Creates the stages of one run on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        schedule: Schedule,
        sizes: LoopSizes,
        predictor: LengthPredictor | None = None,
    ) -> None:
        """predictor: predicts response lengths. If None, the pool trains a ranker."""
        self.cluster, self._schedule, self.sizes = cluster, schedule, sizes
        self._predictor = predictor
        self.gate = Gate(
            schedule,
            prompts_per_step=sizes.prompts_per_step,
            num_steps=sizes.num_steps,
            done_steps=sizes.done_steps,
        )
        self.live = LiveSchedule(cluster, schedule, self.gate)
        """Changes of the schedule during the run."""
        self._flushes: list[Callable[[], bool]] = []
        """Functions that release the rows which a stage holds back, in the order of a stall: downstream to upstream."""

    def admission(
        self,
        source: PromptSource,
        channel: SampleChannel,
        *,
        refill_rounds: int,
        on_admit: Callable[[Sequence[Sample]], None],
    ) -> Admission:
        """Creates the first stage, which opens rows of `channel`. refill_rounds: see AlgorithmConfig.

        on_admit: called with the samples of each wave.
        """
        tail = self._schedule.tail
        rounds = (
            Rounds(
                tail,
                source,
                prompts_per_step=self.sizes.prompts_per_step,
                samples_per_prompt=self.sizes.samples_per_prompt,
            )
            if isinstance(tail, Oversample | TailBatching)
            else None
        )
        batcher = Batcher(self.gate, self._schedule.batching)
        return Admission(
            steps=Steps(self.gate, batcher, max_refills=refill_rounds * self.sizes.prompts_per_step),
            source=source,
            channel=channel,
            samples_per_prompt=self.sizes.samples_per_prompt,
            rounds=rounds,
            waits=self.cluster.waits,
            on_admit=on_admit,
        )

    def engine_pool(
        self,
        engines: Sequence[RolloutGroup],
        params: SamplingParams,
        rules: MembershipRules,
        *,
        on_suspended: Callable[[], None],
    ) -> EnginePool:
        """Creates the pool of rollout engines. params: parameters of most requests. on_suspended: see EnginePool."""
        pool = EnginePool(
            self.cluster,
            engines,
            self._schedule,
            samples_per_step=self.sizes.samples_per_step,
            expected_tokens=params.max_new_tokens,
            on_suspended=on_suspended,
            predictor=self._predictor,
            rules=rules,
        )
        self.live.pool = pool
        return pool

    def map_stage(
        self,
        name: str,
        replicas: Sequence[G],
        *,
        operation: Compute[G, R],
        writes: Sequence[str],
        to_columns: Callable[[R], Columns | SampleFailure],
        on_failed: OnFailed,
    ) -> MapStage[G, R]:
        """Creates a stage that adds columns, with the schedule's granule. Create upstream stages first."""
        stage = MapStage(
            name,
            self.cluster,
            replicas,
            operation=operation,
            writes=writes,
            to_columns=to_columns,
            granule=self._granule(name),
            on_failed=on_failed,
        )
        self._flushes.insert(0, stage.flush)
        return stage

    def train_stage(
        self,
        name: str,
        group: TrainedGroup,
        *,
        whole_batch: bool,
        proximal: ActorGroup | None = None,
    ) -> TrainStage:
        """Creates the training stage of a role. proximal: see TrainStage."""
        stage = TrainStage(
            group,
            granule=self._granule(name),
            samples_per_prompt=self.sizes.samples_per_prompt,
            minibatches=self.sizes.minibatches,
            epochs=self.sizes.epochs,
            in_order=self._schedule.batches_are_fixed,
            whole_batch=whole_batch,
            proximal=proximal,
        )
        self._flushes.append(stage.flush)
        return stage

    def publisher(self, actor: ActorGroup, pool: EnginePool) -> Publisher:
        return Publisher(actor, pool, self.gate, self._schedule, self.cluster.timeline)

    def batches(
        self,
        admission: Admission,
        pool: EnginePool,
        *,
        finish: Callable[[list[SampleGroup]], list[SampleGroup]],
        draw_again: Callable[[int], None],
    ) -> Batches:
        """Creates the stage that forms batches. finish, draw_again: see Batches."""
        trained = [device for role in ("actor", "critic") for devices in self.cluster.place(role) for device in devices]
        lending = Lending(pool.drivers, [device.index for device in trained], self._schedule.lend_until)
        self.live.lending = lending
        return Batches(
            admission,
            pool,
            self._schedule,
            self.cluster.waits,
            lending=lending,
            finish=finish,
            draw_again=draw_again,
        )

    def watch_stalls(self) -> None:
        """Registers the stages with the watchdog. Call it after all stages are created."""
        # Suspended samples are resumed first, because all other stages may wait for them alone.
        resume = [self.live.pool.resume] if self.live.pool else []
        for resolver in [*resume, *self._flushes]:
            self.cluster.watchdog.on_stall(resolver)

    def _granule(self, stage: str) -> int:
        return self._schedule.granule_samples(
            stage, prompts_per_step=self.sizes.prompts_per_step, samples_per_prompt=self.sizes.samples_per_prompt
        )


LIVE = frozenset({"max_staleness", "pipeline_depth", "dispatch", "concurrency", "on_update", "lend_until", "placement"})
"""Fields that can change in a running process. Of the placement, only the engines that generate."""


class LiveSchedule:
    """The schedule of a running process, and the parts that can follow a change of it.

    Engines that a new placement leaves out finish their sequences elsewhere and stay loaded; they join again when a
    placement contains their devices. No sample is lost, and each keeps the deadline that it was admitted with.
    """

    def __init__(self, cluster: Cluster, schedule: Schedule, gate: Gate) -> None:
        self._cluster, self._gate, self.schedule = cluster, gate, schedule
        self._most_adapters: int | None = None
        self.pool: EnginePool | None = None
        self.lending: Lending | None = None

    def limit_adapters(self) -> None:
        """States that engines hold as many versions of an adapter as the current schedule needs, and no more."""
        self._most_adapters = self.schedule.adapters_beside

    def may_become(self, schedule: Schedule) -> bool:
        """Returns whether the run can follow a schedule without a restart."""
        now = self.schedule
        differing = {name for name in type(now).model_fields if getattr(now, name) != getattr(schedule, name)}
        if not differing <= LIVE or self.pool is None:
            return False
        if now.batches_are_fixed != schedule.batches_are_fixed:  # stages keep the order of groups, or do not
            return False
        if now.overtake is not None and now.depth != schedule.depth:  # the window has the size of the first depth
            return False
        if self._most_adapters is not None and schedule.adapters_beside > self._most_adapters:
            return False
        others = [name for name in type(now.placement).model_fields if name != "rollout"]
        if any(now.placement.of(name) != schedule.placement.of(name) for name in others):
            return False
        wanted = self._engines_of(schedule)
        return bool(wanted) and wanted <= {_devices_of(driver) for driver in self.pool.drivers}

    def become(self, schedule: Schedule) -> None:
        """Follows a schedule that may_become() accepts. Call it between two steps."""
        if not self.may_become(schedule) or self.pool is None:
            raise ValueError("this schedule needs a restart of the run")
        self.schedule = schedule
        self._gate.follow(schedule)
        self.pool.follow(schedule)
        if self.lending:
            self.lending.until = schedule.lend_until
        wanted = self._engines_of(schedule)
        self.pool.membership.follow_placement([each for each in self.pool.drivers if _devices_of(each) in wanted])

    def _engines_of(self, schedule: Schedule) -> set[tuple[int, ...]]:
        instances = schedule.instances("rollout", self._cluster.devices)
        return {tuple(device.index for device in instance) for instance in instances}


def _devices_of(driver: EngineDriver) -> tuple[int, ...]:
    return tuple(driver.group.device_indices)
