"""Every algorithm learns a rewarded behaviour on a tiny model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from interlace.algorithms import Algorithm, algorithm_names, create_algorithm
from interlace.core.types import Prompt, Sample, SampleGroup, SampleKey, Segment
from interlace.engines.train import (
    CriticConfig,
    CriticEngine,
    ImplicitRewardEngine,
    LogprobEngine,
    OptimizerConfig,
    TrainConfig,
    TrainEngine,
    critic_model,
)

VOCABULARY, LENGTH, PROMPTS, SAMPLES, STEPS = 12, 4, 6, 6, 40
WANTED = 7
"""A response is rewarded by its share of this token; chance is 1 in 12."""


def tiny_policy() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)).eval()


def respond(model: PreTrainedModel, prompt_B: torch.Tensor, draw: torch.Generator | None) -> torch.Tensor:
    """[B, LENGTH] responses to one-token prompts, sampled; greedy without a generator. model: a plain copy."""
    ids = prompt_B[:, None]
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = model(ids).logits[:, -1]
            chosen = logits.argmax(-1, keepdim=True)
            ids = torch.cat(
                [ids, chosen if draw is None else torch.multinomial(logits.softmax(-1), 1, generator=draw)], 1
            )
    return ids[:, 1:]


def reward_of(response: torch.Tensor) -> float:
    return float((response == WANTED).float().mean())


class Trainer:
    """What the flow does, in its on-policy order, for one algorithm."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, needs = algorithm, algorithm.needs
        optimizer = OptimizerConfig(lr=2e-2)
        settings = algorithm.settings
        config = TrainConfig(update=settings.model_copy(update={"aggregation_length": LENGTH}))
        self.plain = tiny_policy()
        self.policy = TrainEngine(tiny_policy(), loss=algorithm.loss, optimizer=optimizer, config=config)
        self.reference = LogprobEngine(tiny_policy(), config=config)
        self.critic = CriticEngine(critic_model(tiny_policy()), config=CriticConfig(optimizer=optimizer))
        self.process_model: ImplicitRewardEngine | None = None
        if needs.process_reward:
            process = CriticConfig(optimizer=optimizer, success_reward=0.2)
            self.process_model = ImplicitRewardEngine(tiny_policy(), config=process)
        self.draw = torch.Generator().manual_seed(0)

    def step(self) -> float:
        """One update; returns the mean reward of what it was made from."""
        self.plain.load_state_dict(dict(self.policy.weights()))
        groups = [self._group(gid) for gid in range(PROMPTS)]
        rewards = [sample.reward for group in groups for sample in group.samples]
        groups = [group for group in groups if self.algorithm.keeps(group)]
        samples = [sample for group in groups for sample in self._with_advantages(group)]
        if self.algorithm.needs.batch_statistics:
            whole = self.algorithm.batch_advantages(samples)
            samples = [replace(s, advantages=a) for s, a in zip(samples, whole, strict=True)]
        half = len(samples) // 2
        for part in (samples[:half], samples[half:]):
            self.policy.accumulate(part)
            assert self.policy.optimizer_step()["actor/skipped_minibatches"] == (0 if part else 1)
        if self.algorithm.needs.critic:
            self.critic.accumulate(samples)
            self.critic.optimizer_step()
        if self.process_model is not None:
            self.process_model.accumulate(samples)
            self.process_model.optimizer_step()
        return float(np.mean(rewards))

    def _group(self, gid: int) -> SampleGroup:
        prompt_B = torch.full((SAMPLES,), gid % 3)
        prompt = Prompt(uid=str(gid), token_ids=np.array([gid % 3], np.int32), text="", answer="")
        baseline = (
            reward_of(respond(self.plain, prompt_B[:1], None)[0]) if self.algorithm.needs.greedy_baseline else None
        )
        samples = [
            Sample(
                key=SampleKey(gid, index),
                prompt=prompt,
                segments=(Segment(token_ids=response.numpy().astype(np.int32)),),
                reward=reward_of(response),
            )
            for index, response in enumerate(respond(self.plain, prompt_B, self.draw))
        ]
        found = zip(samples, self.policy.logprobs(samples), self.reference.logprobs(samples), strict=True)
        samples = [
            replace(s, segments=(replace(s.segments[0], logprobs=own),), ref_logprobs=reference)
            for s, own, reference in found
        ]
        if self.algorithm.needs.critic:
            samples = [replace(s, values=v) for s, v in zip(samples, self.critic.values(samples), strict=True)]
        if self.process_model is not None:
            found_rewards = self.process_model.process_rewards(samples)
            samples = [replace(s, process_rewards=r) for s, r in zip(samples, found_rewards, strict=True)]
        return SampleGroup(gid=gid, step=0, samples=tuple(samples), baseline_reward=baseline)

    def _with_advantages(self, group: SampleGroup) -> list[Sample]:
        found = self.algorithm.advantages(group)
        returns = found.returns or [None] * len(group.samples)
        triples = zip(group.samples, found.advantages, returns, strict=True)
        return [replace(s, advantages=advantage, returns=target) for s, advantage, target in triples]


@pytest.mark.parametrize(
    "name", [name if name == "ppo" else pytest.param(name, marks=pytest.mark.slow) for name in algorithm_names()]
)
def test_learns(name: str) -> None:
    trainer = Trainer(create_algorithm(name, {}))
    rewards = [trainer.step() for _ in range(STEPS)]
    assert np.mean(rewards[:3]) < 0.25
    assert np.mean(rewards[-3:]) > 0.6, rewards
