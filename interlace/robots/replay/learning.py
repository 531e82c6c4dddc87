"""Learning again from trajectories of earlier steps, beside the on-policy update of each step."""

from asyncio import gather
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from interlace.algorithms.base import Needs
from interlace.core.types import EMPTY_FLOAT, Metrics, Sample
from interlace.robots.episodes.robot import IMAGINED_SUCCESS
from interlace.robots.replay.buffer import Drawn, Replay, ReplayLearnerConfig
from interlace.robots.world_model.flow import WorldLearning
from interlace.rollouts.role_groups import ActorGroup
from interlace.stages.batches import Batch
from interlace.stages.train import with_proximal

TINY_PRIORITY = 1e-6
"""Priority of a trajectory without any advantage, which may still be drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """Trajectories of a run, and what is learnt from them again."""

    replay: Replay
    config: ReplayLearnerConfig
    world: WorldLearning | None = None
    """None: no world model is fitted."""


class ReplayRole:
    """Learner that trains the actor on minibatches of trajectories of this step and of earlier ones.

    A sample of the flow is trained on-policy exactly once, whatever is drawn here, and its terminal event is its own.
    All draws of a step are made before the first update, by a counted key: they depend on nothing but the trajectories.
    """

    def __init__(self, actor: ActorGroup, needs: Needs, version: Callable[[], int]) -> None:
        """version: returns the current one of the weights."""
        self.learning: Learning | None = None
        """None: each sample is trained on once."""
        self._actor, self._version = actor, version
        self._recomputes = needs.proximal_logprobs
        self.num_updates = 0
        """Steps of the optimizer that were begun."""

    async def learn(self, batch: Batch) -> None:
        """Keeps the samples of a batch that was trained on, and trains on what is drawn; metrics go to the batch."""
        if self.learning is None:
            return
        found, config = self.learning.replay, self.learning.config
        ordered = sorted(batch.groups, key=lambda group: group.gid)
        samples = [sample for group in ordered for sample in group.samples if is_real(sample)]
        found.add(samples, priorities=[_priority(sample) for sample in samples])
        least = config.imitate_from if config.learner == "imitation" else None
        draws = [found.draw(config.draw_size, version=self._version(), min_reward=least) for _ in range(config.updates)]
        drawn = [draw for draw in draws if draw]
        world = self.learning.world
        to_fit = world.drawn(found, self._version()) if world else []
        learnt, fitted = await gather(self._train(drawn), self._fit(batch.step + 1, samples, to_fit))
        batch.metrics.update(learnt | fitted | _metrics(found, [one for draw in drawn for one in draw]))

    async def _fit(self, step: int, fresh: Sequence[Sample], drawn: Sequence[Sample]) -> Metrics:
        """Fits the world model, where there is one, while the policy learns."""
        world = self.learning.world if self.learning else None
        return await world.fit(step, fresh, drawn) if world else {}

    async def _train(self, drawn: Sequence[Sequence[Drawn]]) -> Metrics:
        """Makes one update for each draw. Returns the actor's metrics of them, under `replay/`."""
        if not self.learning or not drawn:
            return {}
        imitates = self.learning.config.learner == "imitation"
        async with self._actor.hold("replay"):
            for draw in drawn:
                samples = [to_imitate(one.sample) if imitates else one.sample for one in draw]
                if self._recomputes and not imitates:
                    samples = await with_proximal(self._actor, samples)
                await self._actor.accumulate_replayed(samples)
                self.num_updates += 1
                await self._actor.optimizer_step()
            metrics = await self._actor.step_metrics()
        return {f"replay/{name.removeprefix('actor/')}": value for name, value in metrics.items()}


def is_real(sample: Sample) -> bool:
    """Says whether a sample's episode was played, not imagined."""
    return IMAGINED_SUCCESS not in sample.reward_parts


def to_imitate(sample: Sample) -> Sample:
    """Returns a sample as a demonstration: each token counts alike, and no policy is corrected for."""
    return replace(
        sample,
        segments=tuple(replace(segment, logprobs=EMPTY_FLOAT) for segment in sample.segments),
        advantages=np.ones(sample.num_tokens, np.float32),
        proximal_logprobs=None,
    )


def _priority(sample: Sample) -> float:
    """Returns the mean size of a sample's advantages: how far it was from what had been expected."""
    if sample.advantages is None or not sample.num_sampled:
        return TINY_PRIORITY
    mask = sample.loss_mask
    sizes = np.abs(sample.advantages if mask is None else sample.advantages[mask])
    return float(sizes.mean()) + TINY_PRIORITY


def _metrics(kept: Replay, drawn: Sequence[Drawn]) -> Metrics:
    """Counts what is kept, and how stale and how often used what was drawn is."""
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
