"""Training on trajectories of earlier steps, in addition to the on-policy update of each step, or on demonstrations."""

from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from interlace.algorithms.advantages import list_trained_turns
from interlace.algorithms.base import Needs
from interlace.core.types import EMPTY_FLOAT, Metrics, Sample
from interlace.flows.warmup import ExampleSource
from interlace.robots.episodes.robot import IMAGINED_SUCCESS
from interlace.robots.replay.buffer import Drawn, Replay, ReplayLearnerConfig
from interlace.robots.replay.off_policy import OffPolicy
from interlace.robots.world_model.flow import WorldLearning
from interlace.rollouts.role_groups import ActorGroup
from interlace.stages.batches import Batch
from interlace.stages.train import with_proximal

TINY_PRIORITY = 1e-6
"""Priority of a trajectory whose advantages are 0, so that it can still be drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """Replay buffer of a run, and the learners that use it."""

    replay: Replay
    config: ReplayLearnerConfig
    world: WorldLearning | None = None
    """World model to fit; None for none."""
    off_policy: OffPolicy | None = None
    """Learner on single turns; None if the actor trains on whole trajectories."""
    demonstrations: ExampleSource | None = None
    """Demonstrations to imitate; None if the actor trains on episodes of the run."""

    def save(self, folder: Path) -> None:
        """Writes the buffer and the priorities of its turns into a folder of a checkpoint."""
        self.replay.save(folder)
        if self.off_policy and self.off_policy.priorities:
            self.off_policy.table.save(folder)


class TrajectoryLearner:
    """Learner that trains the actor on minibatches of replayed trajectories, of this step and of earlier ones.

    All draws of a step are made before its first update, with a counted random key, so they depend only on the
    trajectories. The learner of a run's `ReplayRole`.
    """

    def __init__(self, learning: Learning, actor: ActorGroup, needs: Needs, version: Callable[[], int]) -> None:
        """version: returns the current version of the weights."""
        self._learning, self._actor, self._version = learning, actor, version
        self._recomputes = needs.proximal_logprobs
        self.num_updates = 0
        """Number of changes of the weights or of the buffer that were started."""

    async def learn_offline(self) -> Metrics:
        """Trains an off-policy algorithm from demonstrations before the first step. Returns its metrics."""
        off_policy = self._learning.off_policy
        return await off_policy.learn_offline(self._actor) if off_policy else {}

    async def learn(self, batch: Batch) -> None:
        """Stores the samples of a trained batch, and trains on drawn trajectories. Adds metrics to the batch.

        With demonstrations, stores no sample, and trains on demonstrations.
        """
        found, config, off_policy = self._learning.replay, self._learning.config, self._learning.off_policy
        if demonstrations := self._learning.demonstrations:
            updates = range(batch.step * config.updates, (batch.step + 1) * config.updates)
            batch.metrics.update(await self._train_on([demonstrations.batch(update) for update in updates]))
            return
        ordered = sorted(batch.groups, key=lambda group: group.gid)
        samples = [sample for group in ordered for sample in group.samples if is_real(sample)]
        if config.learner == "expert":
            samples = [sample for sample in samples if has_labels(sample)]
        found.add(samples, priorities=[_compute_priority(sample) for sample in samples])
        # Before the updates: a stop in between saves neither their weights nor these samples as the last step's.
        self.num_updates += 1
        if off_policy:
            num_turns = sum(len(list_trained_turns(sample)) for sample in samples)
            learnt = await off_policy.learn(batch.step, found, num_turns, self._actor)
            batch.metrics.update(learnt | _metrics(found, []))
            return
        least = config.imitate_from if config.learner == "imitation" else None
        draws = [found.draw(config.draw_size, version=self._version(), min_reward=least) for _ in range(config.updates)]
        drawn = [draw for draw in draws if draw]
        world = self._learning.world
        to_fit = world.drawn(found, self._version()) if world else []
        prepare = {"imitation": to_imitate, "expert": to_follow}.get(config.learner)
        batches = [[prepare(one.sample) if prepare else one.sample for one in draw] for draw in drawn]
        training = self._train_on(batches, recomputes=self._recomputes and prepare is None)
        learnt, fitted = await gather(training, self._fit_world_model(batch.step + 1, samples, to_fit))
        batch.metrics.update(learnt | fitted | _metrics(found, [one for draw in drawn for one in draw]))

    async def _fit_world_model(self, step: int, fresh: Sequence[Sample], drawn: Sequence[Sample]) -> Metrics:
        """Fits the world model, if there is one, while the policy learns."""
        world = self._learning.world
        return await world.fit(step, fresh, drawn) if world else {}

    async def _train_on(self, batches: Sequence[Sequence[Sample]], *, recomputes: bool = False) -> Metrics:
        """Makes one update per batch. Returns the actor's metrics of them, under `replay/`.

        recomputes: True to compute the proximal log-probs of each batch before its update.
        """
        if not batches:
            return {}
        async with self._actor.hold("replay"):
            for batch in batches:
                await self._actor.accumulate_replayed(await with_proximal(self._actor, batch) if recomputes else batch)
                self.num_updates += 1
                await self._actor.optimizer_step()
            metrics = await self._actor.step_metrics()
        return {f"replay/{name.removeprefix('actor/')}": value for name, value in metrics.items()}


def is_real(sample: Sample) -> bool:
    """Returns whether a sample's episode was run in the simulator instead of the world model."""
    return IMAGINED_SUCCESS not in sample.reward_parts


def to_imitate(sample: Sample) -> Sample:
    """Returns a sample as a demonstration: equal weight for each token, and no off-policy correction."""
    return replace(
        sample,
        segments=tuple(replace(segment, logprobs=EMPTY_FLOAT) for segment in sample.segments),
        advantages=np.ones(sample.num_tokens, np.float32),
        proximal_logprobs=None,
    )


def has_labels(sample: Sample) -> bool:
    """Returns whether an expert labelled a turn of a sample."""
    return any(segment.shown_ids is not None for segment in sample.segments)


def to_follow(sample: Sample) -> Sample:
    """Returns a sample with the expert's answers in place of the policy's; only labelled turns are trained."""
    segments = tuple(
        replace(segment, sampled=np.zeros(len(segment.token_ids), np.bool_))
        if segment.shown_ids is None
        else replace(segment, token_ids=segment.shown_ids, sampled=None)
        for segment in sample.segments
    )
    return to_imitate(replace(sample, segments=segments))


def _compute_priority(sample: Sample) -> float:
    """Returns the mean absolute advantage of a sample: its distance from the expected return."""
    if sample.advantages is None or not sample.num_sampled:
        return TINY_PRIORITY
    mask = sample.loss_mask
    sizes = np.abs(sample.advantages if mask is None else sample.advantages[mask])
    return float(sizes.mean()) + TINY_PRIORITY


def _metrics(kept: Replay, drawn: Sequence[Drawn]) -> Metrics:
    """Returns the size of the buffer, and the staleness and uses of the drawn trajectories."""
    counts = kept.counts()
    metrics: Metrics = {
        "replay/size": counts.size,
        "replay/in_memory": counts.in_memory,
        "replay/evicted_unused": counts.evicted_unused,
        "replay/drawn": len(drawn),
    }
    if drawn:
        metrics["replay/uses"] = sum(one.uses for one in drawn) / len(drawn)
        metrics["replay/uses_max"] = counts.max_uses
        metrics["replay/staleness_mean"] = sum(one.staleness for one in drawn) / len(drawn)
        metrics["replay/staleness_max"] = max(one.staleness for one in drawn)
    return metrics
