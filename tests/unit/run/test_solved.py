"""The sampler by solve rate counts a prompt as solved by the task, and a reward model judges all sources."""

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.types import Prompt, Sample, SampleKey, TerminalEvent
from interlace.flows.steps import Ended
from interlace.rewards.shaping import OVERLONG, TASK
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.load import load_recipe
from interlace.run.step_boundary import list_solved


def test_a_penalty_for_the_form_does_not_make_a_right_answer_unsolved() -> None:
    shaping = ["reward.shaping.overlong_limit=16", "reward.shaping.overlong_buffer=4"]
    recipe = load_recipe("quickstart", ["reward=exact", "reward.correct=1", "reward.incorrect=0", *shaping])
    prompt = Prompt(uid="one", token_ids=np.zeros(1, np.int32), text="", answer="")
    parts = {TASK: 1.0, OVERLONG: -0.5}
    sample = Sample(key=SampleKey(0, 0), prompt=prompt, reward=0.5, reward_parts=parts)
    assert list_solved([Ended(sample=sample, event=TerminalEvent.TRAINED)], recipe) == [("one", 1.0)]


def test_a_reward_model_beside_rewards_of_sources_is_refused() -> None:
    sources = "[{source: chain_sum, weight: 3, reward: reasoning_gym}, {source: rows.jsonl, weight: 1}]"
    recipe = load_recipe("quickstart", ["warmup=null", f"task={sources}", "reward={name: model, model: {path: judge}}"])
    with pytest.raises(UserError, match="A model scores all sources"):
        check_settings(recipe)
