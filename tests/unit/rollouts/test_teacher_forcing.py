"""The record of each turn in random conversations equals a forward pass over it."""

import asyncio
import random

import numpy as np
import pytest
import torch

from interlace.core.messages import Message
from interlace.core.types import Prompt, Sample, SampleKey, SamplingParams
from interlace.models.tiny import build_tiny
from interlace.rollouts.base import Session, Turn
from interlace.rollouts.rendering.config import RendererConfig
from interlace.rollouts.rendering.load import create_renderer
from interlace.rollouts.session import SessionLimits
from interlace.run.clusters.base import ClusterConfig, run_on
from interlace.runtime.cluster import Cluster
from interlace.schedule.schedule import Schedule
from tests.support.conversations import TOOLS, answers, text, user
from tests.support.episode_runs import OneEngine


class Converses:
    """Several turns with random messages between, cut at random lengths; sometimes from the beginning again."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def run(self, prompt: Prompt, session: Session) -> float:
        rng = random.Random(prompt.uid)
        said = [Message(role="system", content=text(rng)), user(rng)]
        for _ in range(rng.randrange(2, 5)):
            params = session.params.model_copy(update={"max_new_tokens": rng.randrange(1, 40)})
            turn = await session.generate(said, tools=TOOLS, params=params)
            self.turns.append(turn)
            said += [turn.message, *(answers(turn.message, rng) or [user(rng)])]
            if rng.random() < 0.2:
                said = said[:2]
        return 1.0


def check_conversations(number: int) -> None:
    model, tokenizer = build_tiny("micro-chat", seed=0)
    renderer = create_renderer(tokenizer, RendererConfig())
    params = SamplingParams(max_new_tokens=40, stop_token_ids=renderer.stop_token_ids)
    engine = OneEngine(model="micro-chat", params=params, limits=SessionLimits(renderer=renderer))
    episode = Converses()

    async def flow(cluster: Cluster) -> list[Sample]:
        prompts = [Prompt(uid=f"c{n}", token_ids=np.array([5], np.int32), text="", answer="") for n in range(number)]
        wave = [Sample(key=SampleKey(place, 0), prompt=prompt) for place, prompt in enumerate(prompts)]
        rows, failures = await engine.play(await engine.pool(cluster, number), cluster, episode, wave)
        assert not failures
        return rows

    rows = asyncio.run(run_on(ClusterConfig(backend="local", devices="cpu:1"), Schedule(), flow))
    recorded = sum(len(segment.token_ids) for row in rows for segment in row.segments if segment.sampled is None)
    assert recorded == sum(len(turn.token_ids) for turn in episode.turns), "what was drawn, and nothing else"
    for turn in episode.turns:
        context = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.token_ids])).long()
        with torch.inference_mode():
            logits = model(context[None]).logits[0, len(turn.prompt_ids) - 1 : -1]
        forced = logits.log_softmax(-1).gather(1, context[len(turn.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(turn.logprobs, forced.numpy(), atol=2e-4)


def test_logprobs_equal_teacher_forcing_on_random_conversations() -> None:
    check_conversations(12)


@pytest.mark.slow
def test_logprobs_equal_teacher_forcing_on_many_more() -> None:
    check_conversations(200)
