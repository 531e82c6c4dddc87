"""Inpainting of known actions: its formula, the engine's flow-matching head, and the published policies."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from interlace.core.errors import UserError
from interlace.core.guide import Guide
from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.models.action_tokens import action_tokens
from interlace.models.config import FlowConfig, RobotShape
from interlace.models.flow import FlowSchedule
from interlace.models.flow_guidance import guidance_factor, guide_velocity
from interlace.robots.models.flow_vla import FlowVLAPolicy, load_flow_vla
from interlace.robots.models.vla import build_tiny_vla
from tests.support.flow_vla_folder import CHUNK, PADDED, SIZE, STATES, flow_vla_folder


def guide(chunk: int, padded: int, size: int, known: int, value: float) -> Guide:
    weights = np.zeros((chunk, padded), np.float32)
    weights[:known, :size] = 1
    return Guide(numbers=np.full((chunk, padded), value, np.float32), weights=weights)


def test_the_correction_is_the_papers() -> None:
    schedule = FlowSchedule(config=FlowConfig(steps=4), chunk=2, size=1)
    matrix = torch.tensor([[0.5, 0.2], [-0.3, 0.1]])
    x, known = torch.tensor([[0.4, -0.2], [0.1, 0.3]]), guide(2, 1, 1, 1, 0.7)
    found = guide_velocity(schedule, 1, x, lambda state: state @ matrix, [known, None])
    plain, t = x @ matrix, 0.75
    u = 1 - t
    assert guidance_factor(schedule, 1, 5.0) == pytest.approx(t / u * (u**2 + t**2) / t**2)
    assert guidance_factor(schedule, 0, 5.0) == 4, "at pure noise the formula is infinite"
    error = torch.tensor([(0.7 - (x - t * plain)[0, 0]), 0.0])
    pull = (torch.eye(2) - t * matrix) @ error  # vector-Jacobian product of x - t x M
    torch.testing.assert_close(found[0], plain[0] - guidance_factor(schedule, 1, 5.0) * pull)
    assert torch.equal(found[1], plain[1]), "a row without a guide keeps its bits"


def test_the_engines_flow_head_approaches_the_known_actions() -> None:
    shape = RobotShape(state_size=3, action_size=2, chunk=4, head="flow", layers=1, flow=FlowConfig(steps=5))
    model, _ = build_tiny_vla(shape, seed=0)
    actions = action_tokens(model.config)
    assert actions is not None
    engine = NativeEngine(model, config=NativeConfig(max_running=8, max_tokens=4096, draft_tokens=0))
    params = SamplingParams(max_new_tokens=actions.num_tokens, temperature=0)

    def answer(*guides: Guide | None) -> list[np.ndarray]:
        for index, known in enumerate(guides):
            engine.submit(
                Request(
                    uid="act", owner=SampleKey(NO_GROUP, index), prompt_ids=actions.context([40]), params=params,
                    query_ids=actions.query_ids, inputs={"state": np.ones((1, 3), np.float32) * index}, guide=known,
                )
            )  # fmt: skip
        done: dict[int, np.ndarray] = {}
        while len(done) < len(guides):
            done |= {one.request.owner.index: actions.decode(one.token_ids) for one in engine.step().finished}
        return [done[index] for index in range(len(guides))]

    known = guide(4, 2, 2, 3, 0.6)
    free, other = answer(None, None)
    guided, unchanged = answer(known, None)
    assert np.array_equal(other, unchanged)
    assert np.abs(guided[:3] - 0.6).max() < 0.3 * np.abs(free[:3] - 0.6).max()
    assert not np.array_equal(guided[3], free[3]), "the free actions follow the known ones"
    with pytest.raises(UserError, match=r"its guide has the shapes \[3, 2\] and \[3, 2\]"):
        answer(guide(3, 2, 2, 3, 0.6))


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_published_policies_approach_the_known_actions(tmp_path: Path, kind: str) -> None:
    flow_vla_folder(tmp_path / kind, kind)
    made = FlowVLAPolicy(load_flow_vla(tmp_path / kind), AutoTokenizer.from_pretrained(tmp_path / kind / "tokenizer"))
    draw = np.random.default_rng(0)
    observation = {
        "state": draw.normal(size=STATES).astype(np.float32), "front": draw.integers(0, 255, (48, 64, 3), np.uint8),
    }  # fmt: skip
    sensed, noise = made.sense(observation, "reach the goal"), torch.from_numpy(made.draw_noise(draw)[None])
    known = guide(CHUNK, PADDED, SIZE, 3, 0.2)
    free, guided = made.network.sample(sensed, noise)[0], made.network.sample(sensed, noise, [known])[0]
    gaps = [float((chunk[:3, :SIZE] - 0.2).abs().mean()) for chunk in (free, guided)]
    assert gaps[1] < 0.6 * gaps[0]
