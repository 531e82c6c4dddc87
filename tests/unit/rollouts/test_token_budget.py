"""A budget of tokens suspends a turn only if nothing else ended it, and episodes have the model's limits."""

from typing import cast

import pytest

from interlace.core.types import Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model, load_tokenizer
from interlace.rollouts.engine_jobs import Job
from interlace.rollouts.pool import TokenBudget
from interlace.run.host import episodes_of, session_limits
from interlace.run.recipe.load import load_recipe
from interlace.runtime.cluster import Cluster
from interlace.runtime.sim.loop import VirtualClock, VirtualLoop
from interlace.runtime.timeline import Timeline
from interlace.schedule.schedule import Schedule

CONTEXT = 1024
"""Positions of tiny:micro."""


@pytest.mark.parametrize(("budget", "num_tokens", "is_suspended"), [(40, 16, False), (10, 10, True)])
def test_a_turn_that_fills_the_context_is_not_suspended(budget: int, num_tokens: int, is_suspended: bool) -> None:
    engine = NativeEngine(
        load_model(ModelConfig(path="tiny:micro")).model, config=NativeConfig(max_tokens=4096, max_running=1)
    )
    schedule = Schedule(max_staleness=1, on_update="abort_resume", rollout_budget=budget)
    tokens = TokenBudget(
        schedule, Timeline(clock=VirtualClock(VirtualLoop())), expected_tokens=8, on_suspended=lambda: None
    )
    asked = Request(
        uid="p", owner=SampleKey(0, 0), prompt_ids=[5] * (CONTEXT - 16), params=SamplingParams(max_new_tokens=64)
    )
    limited = tokens.limit_request(asked, 64)
    job = Job(request=limited, order=0, expected_tokens=1, deliver=print, max_new_tokens=64)
    engine.submit(limited)
    while not (done := engine.step().finished):
        pass
    assert len(done[0].token_ids) == num_tokens
    assert tokens.charge(job, done[0]) == is_suspended


def test_episodes_are_limited_by_the_model_s_context() -> None:
    """So a budget that ends a turn at exactly the context does not suspend it."""
    recipe = load_recipe("second_guess", ["rollout.max_tokens=4096"])
    assert session_limits(recipe, None, CONTEXT, ()).max_tokens == CONTEXT
    assert session_limits(recipe, None, None, ()).max_tokens == 4096


def test_episodes_read_answers_up_to_every_end_token_of_the_model() -> None:
    """Models have more end tokens than their chat template writes, such as Llama's <|eom_id|> after a call."""
    recipe = load_recipe("calculator")
    tokenizer = load_tokenizer(recipe.model)
    other = tokenizer.convert_tokens_to_ids("<eos>")
    sampling = SamplingParams(stop_token_ids=(tokenizer.eos_token_id, other))
    _, limits = episodes_of(cast(Cluster, None), recipe, sampling)  # the cluster only closes episodes with resources
    assert limits.renderer and other != tokenizer.eos_token_id
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    message = limits.renderer.parse([*tokenizer(call)["input_ids"], other])
    assert message.content == "" and [each.error for each in message.tool_calls] == [""]
