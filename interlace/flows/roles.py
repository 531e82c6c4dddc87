"""The roles of a policy run beside its actor: each turns one stream of samples into the next."""

from collections.abc import Callable, Sequence
from typing import Protocol

from interlace.algorithms.base import Needs
from interlace.core.causes import Cause, SampleFailure
from interlace.core.types import (
    FloatArray,
    PromptSource,
    RewardResult,
    SampleGroup,
    SampleKey,
    SamplingParams,
    TerminalEvent,
)
from interlace.rewards.shaping import ShapingConfig, group_shaped
from interlace.rollouts.base import Episode
from interlace.rollouts.role_groups import CriticGroup, RewardGroup, RolloutGroup
from interlace.rollouts.session import SessionLimits
from interlace.rollouts.stream import Columns, OnFailed, Stream
from interlace.stages.admission import Admission
from interlace.stages.batches import Batch
from interlace.stages.factory import StageFactory
from interlace.stages.group import GroupStage
from interlace.stages.map import Compute, G


class RolloutSettings(Protocol):
    """Settings of generation."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def limits(self) -> SessionLimits: ...


class RolloutRole:
    """Generation."""

    def __init__(
        self,
        stages: StageFactory,
        engines: Sequence[RolloutGroup],
        settings: RolloutSettings,
        admission: Admission,
        episode: Episode,
        on_failed: OnFailed,
    ) -> None:
        """on_failed: called with each sample whose episode raised, and the reason."""
        params = settings.sampling
        self.pool = stages.engine_pool(engines, params, on_suspended=admission.changed.fire)
        self.stage = stages.generate_stage(
            self.pool, episode, params, admission, limits=settings.limits, on_failed=on_failed
        )
        self._admission = admission

    def generate(self, prompts: PromptSource) -> Stream:
        """Responses to the prompts that pass the gate."""
        del prompts  # the admission draws from them
        return self.stage.stream


class RewardRole:
    """Scoring, where the episode brings no reward of its own."""

    def __init__(
        self,
        stages: StageFactory,
        group: RewardGroup | None,
        admission: Admission,
        shaping: ShapingConfig,
        *,
        on_failed: OnFailed,
        on_scored: Callable[[], None],
    ) -> None:
        """on_failed: called with each sample that could not be scored. on_scored: with each that was."""
        self._admission, self._shaping = admission, shaping
        self.num_scored, self._on_failed, self._on_scored = 0, on_failed, on_scored
        self._stage = (
            stages.map_stage(
                "reward",
                [group],
                operation=RewardGroup.score,
                writes=("scored",) if shaping.length_weight else ("reward", "reward_parts"),
                to_columns=self._columns,
                on_failed=on_failed,
            )
            if group
            else None
        )

    def _count(self) -> None:
        self.num_scored += 1
        self._on_scored()

    def _columns(self, result: RewardResult) -> Columns | SampleFailure:
        if result.failure is not None:
            return SampleFailure(reason=result.failure, cause=result.cause)
        self._count()
        if self._shaping.length_weight:
            return {"scored": result}
        return {"reward": result.reward, "reward_parts": result.parts}

    def _take_outcomes(self, group: SampleGroup) -> None:
        channel = self._admission.channel
        for sample in group.samples:
            if sample.outcome is not None:
                self._count()
                channel.put(sample.key, {"reward": sample.outcome.reward, "reward_parts": sample.outcome.parts})
            else:
                reason = "its episode brought no reward, and the recipe has none"
                self._on_failed(sample.key, SampleFailure(reason=reason, cause=Cause.USER))
                channel.end(sample.key, TerminalEvent.FAILED)

    def score(self, samples: Stream) -> Stream:
        """Adds `reward`, the episode's own where it brings one; a sample without any ends as `failed`."""
        if self._stage is None:
            own = GroupStage("reward", self._admission, min_samples=1, on_group=self._take_outcomes)
            own.attach(samples)
            return samples.plus("reward", "reward_parts")
        scored = self._stage.attach(samples, given=lambda sample: sample.outcome)
        if not self._shaping.length_weight:
            return scored

        def shape(group: SampleGroup) -> None:
            results = [sample.scored for sample in group.samples if sample.scored is not None]
            lengths = [sample.num_sampled for sample in group.samples]
            for sample, result in zip(group.samples, group_shaped(results, lengths, self._shaping), strict=True):
                scored.channel.put(sample.key, {"reward": result.reward, "reward_parts": result.parts})

        GroupStage("length reward", self._admission, min_samples=1, on_group=shape).attach(scored)
        return scored.plus("reward", "reward_parts")


def _unexpected(key: SampleKey, failure: SampleFailure) -> bool:
    raise ValueError(f"sample {key}: {failure.reason}")


class ReferenceRole:
    """Log-probs of the reference policy, where they are needed."""

    def __init__(self, stages: StageFactory, replicas: Sequence[G], operation: Compute[G, FloatArray]) -> None:
        def columns(logprobs: FloatArray) -> Columns:
            return {"ref_logprobs": logprobs}

        self._stage = (
            stages.map_stage(
                "reference",
                replicas,
                operation=operation,
                writes=("ref_logprobs",),
                to_columns=columns,
                on_failed=_unexpected,
            )
            if replicas
            else None
        )

    def logprobs(self, samples: Stream) -> Stream:
        """Adds `ref_logprobs`."""
        return self._stage.attach(samples) if self._stage else samples


class CriticRole:
    """A trained model that judges each token, where one is needed: a critic, or a process reward model."""

    def __init__(self, stages: StageFactory, group: CriticGroup | None, needs: Needs, *, whole_batch: bool) -> None:
        column = "process_rewards" if needs.process_reward else "values"

        def columns(values: FloatArray) -> Columns:
            return {column: values}

        self._values = self._train = None
        if group:
            self._values = stages.map_stage(
                "critic",
                [group],
                operation=CriticGroup.process_rewards if needs.process_reward else CriticGroup.values,
                writes=(column,),
                to_columns=columns,
                on_failed=_unexpected,
            )
            # Several minibatches wait for the whole batch: values of what comes late would be of updated weights.
            whole_batch = whole_batch or stages.sizes.minibatches > 1
            self._train = stages.train_stage("critic", group, whole_batch=whole_batch)

    def values(self, samples: Stream) -> Stream:
        """Adds `values`, or `process_rewards`."""
        return self._values.attach(samples) if self._values else samples

    @property
    def num_updates(self) -> int:
        """Steps of its optimizer that were begun."""
        return self._train.num_updates if self._train else 0

    async def update(self, batch: Batch) -> None:
        """Trains it on the batch."""
        if self._train:
            await self._train.update(batch)
