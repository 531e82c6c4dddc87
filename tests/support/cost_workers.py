"""Costs of simulated workers in tests of the runtime and the schedule, and their algorithm and prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import numpy as np

from interlace.algorithms.base import Advantages, Algorithm, AlgorithmConfig, Needs, rewards_of
from interlace.core.progress import Progress
from interlace.core.random import keyed_random
from interlace.core.row import RowName
from interlace.core.training import LossInputs, LossOutputs
from interlace.core.types import FloatArray, Prompt, Request, Sample, SampleGroup, SampleKey
from interlace.forecast.costs.lengths import ResponseLengths
from interlace.forecast.costs.pace import Pace
from interlace.forecast.costs.rollout import SimulatedEngine
from interlace.forecast.costs.workers import SimulatedInference, SimulatedReward, SimulatedTrainer
from interlace.forecast.profile.types import InferenceCosts, Lengths, Profile, RewardCosts, RolloutCosts, TrainCosts
from interlace.forecast.virtual import SimulatedRole
from interlace.runtime.worker import WorkerContext
from interlace.weights.ref import WeightRef


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in seconds, except for lengths, shares and memory."""

    decode: float = 0.01
    score: float = 0.05
    reference_token: float = 1e-4
    train_token: float = 5e-4
    optimizer: float = 0.2
    sync: float = 0.1
    median_tokens: int = 40
    max_tokens: int = 200
    fail_share: float = 0.0
    filter_share: float = 0.0
    prefill_token: float = 1e-4
    kv_tokens: int = 10**9
    """Capacity of an engine's KV cache."""
    memory: int = 10

    @property
    def profile(self) -> Profile:
        """The same costs as a profile for the simulator."""
        inference = InferenceCosts(token_s=self.reference_token, device_bytes=self.memory)
        return Profile(
            device="a test's",
            device_memory_bytes=1,
            rollout=RolloutCosts(
                steps=((1, self.decode),),
                prefill_token_s=self.prefill_token,
                kv_tokens=self.kv_tokens,
                update_s=self.sync,
                device_bytes=self.memory,
                efficiency=0.5,
            ),
            actor=TrainCosts(
                token_s=self.train_token,
                inference_token_s=self.reference_token,
                optimizer_s=self.optimizer,
                export_s=self.sync,
                device_bytes=self.memory,
                efficiency=0.5,
            ),
            reference=inference.model_copy(update={"efficiency": 0.5}),
            reward=RewardCosts(median_s=self.score / 2, sigma=0.5, fail_share=self.fail_share),
            lengths=Lengths(prompt_tokens=5, median=self.median_tokens, prompt_sigma=0.0, response_sigma=0.8),
        )

    def roles(self) -> Mapping[str, SimulatedRole]:
        """The simulator's workers with these costs."""
        profile = self.profile
        pace, lengths = Pace(profile), ResponseLengths(lengths=profile.lengths)

        def length(request: Request) -> float:
            return lengths.of(request.uid, request.attempt, request.owner.index, request.turn)

        engine = partial(CheckedEngine, costs=profile.rollout, length=length, pace=pace)
        reference = partial(SimulatedInference, costs=profile.reference, pace=pace)
        reward = partial(SimulatedReward, costs=profile.reward, seed=0, controller=pace.controller)
        return {
            "rollout": SimulatedRole(engine, CheckedEngine),
            "reward": SimulatedRole(reward, SimulatedReward),
            "reference": SimulatedRole(reference, SimulatedInference),
            "critic": SimulatedRole(partial(SimulatedTrainer, costs=profile.actor, pace=pace), SimulatedTrainer),
            "actor": SimulatedRole(partial(RememberingActor, costs=profile.actor, pace=pace), RememberingActor),
        }


class CheckedEngine(SimulatedEngine):
    """Engine that asserts the rules of its callers: no duplicate running request, and no older weights."""

    async def serve(
        self, requests: Sequence[Request], aborts: Sequence[str], ended: Sequence[SampleKey] = ()
    ) -> Progress:
        here = {*self.batch.running, *(sequence.request.id for sequence in self.batch.waiting)}
        assert not here.intersection(request.id for request in requests)
        return await super().serve(requests, aborts, ended)

    async def update_weights(self, ref: WeightRef, mode: Literal["keep", "recompute"]) -> None:
        assert ref.version > self.batch.version or self.batch.version == -1
        await super().update_weights(ref, mode)


class RememberingActor(SimulatedTrainer):
    """Trainer that records the samples of each minibatch."""

    def __init__(self, context: WorkerContext, costs: TrainCosts, pace: Pace) -> None:
        super().__init__(context, costs, pace)
        self.minibatches: list[list[Sample]] = []
        self._open: list[Sample] = []

    async def accumulate(self, samples: Sequence[Sample] | Sequence[RowName], prepared: bool = False) -> None:
        self._open += self._prepared[0] if prepared else cast("Sequence[Sample]", samples)
        await super().accumulate(samples, prepared)

    async def optimizer_step(self) -> None:
        await super().optimizer_step()
        self.minibatches.append(self._open)
        self._open = []


class CostAlgorithm(Algorithm):
    """Algorithm that keeps a random share of the groups, keyed by prompt."""

    def __init__(self, costs: Costs, needs: Needs, refill_rounds: int) -> None:
        super().__init__(AlgorithmConfig(refill_rounds=refill_rounds))
        self._costs, self._needs = costs, needs

    @property
    def needs(self) -> Needs:
        return self._needs

    @property
    def is_group_relative(self) -> bool:
        return True

    def keeps(self, group: SampleGroup) -> bool:
        prompt = group.samples[0].prompt
        return keyed_random("keep", prompt.uid, prompt.attempt).random() >= self._costs.filter_share

    def advantages(self, group: SampleGroup) -> Advantages:
        rewards = rewards_of(group)
        found = [
            np.full(s.num_tokens, r - rewards.mean(), np.float32) for s, r in zip(group.samples, rewards, strict=True)
        ]
        return Advantages(advantages=found, returns=found if self._needs.critic else None)

    def batch_advantages(self, samples: Sequence[Sample]) -> Sequence[FloatArray]:
        assert samples, "there are no statistics of nothing"
        return super().batch_advantages(samples)

    def loss(self, inputs: LossInputs) -> LossOutputs:
        raise AssertionError("cost workers compute no loss")


class CountedPrompts:
    """Prompt source of `total` prompts, or without end."""

    def __init__(self, total: int | None = None) -> None:
        self._next, self._total = 0, total

        self._again: list[Prompt] = []

    @property
    def exhausted(self) -> bool:
        return not self._again and self._total is not None and self._next >= self._total

    def copy(self) -> "CountedPrompts":
        made = CountedPrompts(self._total)
        made._next, made._again = self._next, list(self._again)
        return made

    def hand_back(self, prompts: Iterable[Prompt]) -> None:
        self._again += prompts

    def __next__(self) -> Prompt:
        if self._again:
            return self._again.pop(0)
        self._next += 1
        return Prompt(uid=f"p{self._next - 1}", token_ids=np.arange(5, dtype=np.int32), text="", answer="")
