"""The roles of a policy run: rollout, reward, reference and critic. Each maps a stream of samples to the next.

The methods are the lines of `flows/policy.py`. A method that returns a stream attaches its stage and returns at once.
The docstrings have the four lines of a stage: Consumes, Produces, Waits for, Released by. The actor needs no class
here, because it is a `TrainStage`.
"""

from collections.abc import Callable, Sequence

from interlace.algorithms.base import Needs
from interlace.core.payload import is_lost
from interlace.core.prompts import PromptSource
from interlace.core.recovery import Cause, SampleFailure
from interlace.core.types import EMPTY_INT, FloatArray, RewardResult, Sample, SampleGroup, TerminalEvent
from interlace.flows.steps import LoopSettings
from interlace.rewards.shaping import SourceShaping, group_shaped, shape_result
from interlace.rollouts.base import Episode
from interlace.rollouts.generate import GenerateStage
from interlace.rollouts.role_groups import CriticGroup, RewardGroup, RolloutGroup
from interlace.rollouts.stream import Columns, OnFailed, Stream
from interlace.stages.admission import Admission
from interlace.stages.batches import Batch
from interlace.stages.factory import StageFactory
from interlace.stages.group import GroupStage
from interlace.stages.map import Compute, G


class RolloutRole:
    """The role that generates samples: the engine pool, and the stage that runs an episode per sample."""

    def __init__(
        self,
        stages: StageFactory,
        engines: Sequence[RolloutGroup],
        settings: LoopSettings,
        admission: Admission,
        episode: Episode,
        on_failed: OnFailed,
    ) -> None:
        """on_failed: called with each sample whose episode raised, and with the reason."""
        params = settings.sampling
        self.pool = stages.engine_pool(engines, params, settings.membership, on_suspended=admission.changed.fire)
        self.stage = GenerateStage(
            stages.cluster,
            self.pool,
            episode,
            params,
            admission.channel,
            limits=settings.limits,
            on_generated=admission.generated,
            on_failed=on_failed,
        )

    def generate(self, prompts: PromptSource) -> Stream:
        """Generates samples for the prompts that pass the gate: `Admission`, `GenerateStage` and `EnginePool`.

        Consumes: prompts, in the order of the source.
        Produces: samples with `segments`, `finish_reason` and `text`, as they finish. If the episode raises, the sample
            ends as `failed`.
        Waits for: room in the gate, then the engines and the tools of the episode.
        Released by: a publication or a dropped group, which returns slots of the gate; then each response.
        """
        del prompts  # the admission draws from them
        return self.stage.stream


class RewardRole:
    """The role that scores samples whose episode returned no reward."""

    def __init__(
        self,
        stages: StageFactory,
        group: RewardGroup | None,
        admission: Admission,
        shaping: SourceShaping,
        *,
        on_failed: OnFailed,
        on_scored: Callable[[], None],
        is_needed: bool = True,
    ) -> None:
        """on_failed: called with each sample that could not be scored. on_scored: called for each scored sample.

        is_needed: whether a sample without a reward fails; otherwise its reward is 0.
        """
        self._admission, self._shaping, self._is_needed = admission, shaping, is_needed
        self.num_scored, self._on_failed, self._on_scored = 0, on_failed, on_scored
        self._stage = (
            stages.map_stage(
                "reward",
                [group],
                operation=RewardGroup.score,
                writes=("scored",) if shaping.compares_lengths else ("reward", "reward_parts"),
                to_columns=self._make_columns,
                on_failed=on_failed,
            )
            if group
            else None
        )

    def _count(self) -> None:
        self.num_scored += 1
        self._on_scored()

    def _make_columns(self, result: RewardResult) -> Columns | SampleFailure:
        if result.failure is not None:
            return SampleFailure(reason=result.failure, cause=result.cause)
        self._count()
        if self._shaping.compares_lengths:
            return {"scored": result}
        return {"reward": result.reward, "reward_parts": result.parts}

    def _shape_outcome(self, sample: Sample) -> RewardResult | None:
        """Returns the reward of the episode with the parts for its form; None if the scorer has to score the sample."""
        if sample.outcome is None or sample.outcome.is_partial:
            return None
        config = self._shaping.of(sample.prompt.source)
        if config.reads_tokens and is_lost(sample.segments):
            return None  # the call of the scorer reports the loss
        return shape_result(sample.outcome, sample.sampled_ids if config.reads_tokens else EMPTY_INT, config)

    def _take_outcomes(self, group: SampleGroup) -> None:
        channel = self._admission.channel
        for sample in group.samples:
            if sample.outcome is not None:
                self._count()
                channel.put(sample.key, {"reward": sample.outcome.reward, "reward_parts": sample.outcome.parts})
            elif not self._is_needed:
                channel.put(sample.key, {"reward": 0.0, "reward_parts": {}})
            else:
                reason = "its episode brought no reward, and the recipe has none"
                self._on_failed(sample.key, SampleFailure(reason=reason, cause=Cause.USER))
                channel.end(sample.key, TerminalEvent.FAILED)

    def score(self, samples: Stream) -> Stream:
        """Adds `reward` and `reward_parts`: the episode's reward if it returned one, else the scorer's.

        Consumes: generated samples.
        Produces: samples with a reward. A sample without a reward ends as `failed`.
        Waits for: a granule of samples, then the devices or processes of the scorer. A reward that depends on the whole
            group, and a run without a scorer, wait for the last sample of the group.
        Released by: samples, a closed gate with no live sample upstream, a stall.
        """
        if self._stage is None:
            own = GroupStage("reward", self._admission, min_samples=1, on_group=self._take_outcomes)
            own.attach(samples)
            return samples.plus("reward", "reward_parts")
        scored = self._stage.attach(samples, given=self._shape_outcome)
        if not self._shaping.compares_lengths:
            return scored

        def shape(group: SampleGroup) -> None:
            results = [sample.scored for sample in group.samples if sample.scored is not None]
            lengths = [sample.num_sampled for sample in group.samples]
            config = self._shaping.of(group.samples[0].prompt.source)
            for sample, result in zip(group.samples, group_shaped(results, lengths, config), strict=True):
                scored.channel.put(sample.key, {"reward": result.reward, "reward_parts": result.parts})

        GroupStage("length reward", self._admission, min_samples=1, on_group=shape).attach(scored)
        return scored.plus("reward", "reward_parts")


class ReferenceRole:
    """The role that computes log-probs of the reference policy. Without replicas it passes samples through."""

    def __init__(
        self,
        stages: StageFactory,
        replicas: Sequence[G],
        operation: Compute[G, FloatArray],
        *,
        on_failed: OnFailed,
        num_top: int = 0,
    ) -> None:
        """operation: computes [L] log-probs of each sample, or with num_top [L, 1 + 2 num_top]: log-probs, then ids and
        log-probs of the most probable tokens. on_failed: called with each sample whose content is lost.
        """

        def columns(logprobs: FloatArray) -> Columns:
            if not num_top:
                return {"ref_logprobs": logprobs}
            top = logprobs[:, 1:].reshape(len(logprobs), 2, num_top)
            return {"ref_logprobs": logprobs[:, 0], "teacher_top": top}

        self._stage = (
            stages.map_stage(
                "reference",
                replicas,
                operation=operation,
                writes=("ref_logprobs", "teacher_top") if num_top else ("ref_logprobs",),
                to_columns=columns,
                on_failed=on_failed,
            )
            if replicas
            else None
        )

    def logprobs(self, samples: Stream) -> Stream:
        """Adds `ref_logprobs`, if the algorithm needs them.

        Consumes: selected samples.
        Produces: samples with the reference policy's log-probs of their tokens.
        Waits for: a granule of samples, then the devices of the reference.
        Released by: samples, a closed gate with no live sample upstream, a stall.
        """
        return self._stage.attach(samples) if self._stage else samples


class CriticRole:
    """The role of a trained model that rates each token: a critic or a process reward model.

    Without a group it passes samples through and `update` does nothing.
    """

    def __init__(
        self,
        stages: StageFactory,
        group: CriticGroup | None,
        needs: Needs,
        *,
        whole_batch: bool,
        on_failed: OnFailed,
    ) -> None:
        """on_failed: called with each sample whose content is lost."""
        column = "process_rewards" if needs.process_reward else "values"
        self._values = self._train = None
        if group:
            self._values = stages.map_stage(
                "critic",
                [group],
                operation=CriticGroup.process_rewards if needs.process_reward else CriticGroup.values,
                writes=(column,),
                to_columns=lambda values: {column: values},
                on_failed=on_failed,
            )
            # With several minibatches, wait for the whole batch: late samples would get values of updated weights.
            whole_batch = whole_batch or stages.sizes.minibatches > 1
            self._train = stages.train_stage("critic", group, whole_batch=whole_batch)

    def values(self, samples: Stream) -> Stream:
        """Adds `values`, or `process_rewards`, if the algorithm needs them.

        Consumes: samples, with `ref_logprobs` if the algorithm has a reference.
        Produces: samples with one value or one process reward per token.
        Waits for: a granule of samples, then the devices of the critic.
        Released by: samples, a closed gate with no live sample upstream, a stall.
        """
        return self._values.attach(samples) if self._values else samples

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the critic that were started."""
        return self._train.num_updates if self._train else 0

    async def update(self, batch: Batch) -> None:
        """Trains the critic on a batch, concurrently with the actor. Does nothing without a critic.

        Consumes: the open batch, group by group.
        Produces: optimizer updates, and metrics in `batch.metrics`.
        Waits for: a granule of groups, or the whole batch, then the devices of the critic.
        Released by: groups added to the batch, the close of the batch, a stall.
        """
        if self._train:
            await self._train.update(batch)
