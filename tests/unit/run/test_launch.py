"""Workers are made according to the recipe."""

import pytest
import torch

from interlace.models.config import ModelConfig
from interlace.run.launch import revival_rule
from interlace.run.make_engines import EngineSource, make_actor_engine, make_rollout_engine
from interlace.run.recipe.load import load_recipe
from interlace.runtime.worker import WorkerContext
from interlace.schedule.placement import role_named
from tests.support.publication import published

CONTEXT = WorkerContext(group="actor/0", rank=0, num_ranks=1, devices=("cpu:0",))


def source(*overrides: str) -> EngineSource:
    model = ModelConfig(path="tiny:micro", dtype="bfloat16")
    return EngineSource(recipe=load_recipe("quickstart", ["model.dtype=bfloat16", *overrides]), model=model)


def test_a_bfloat16_model_generates_in_bfloat16_and_is_trained_in_float32() -> None:
    rollout, (actor, _) = make_rollout_engine(source(), CONTEXT).engine, make_actor_engine(source(), CONTEXT)
    weights = actor.weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    served = published(actor)
    assert rollout.memory().weights == sum(tensor.nbytes for tensor in served.values())
    assert all(torch.equal(tensor.bfloat16(), served[name]) for name, tensor in weights.items())
    rollout.update_weights(served, 1, "keep", frozen=True)


def test_beside_an_adapter_the_weights_that_stay_are_not_blown_up() -> None:
    pytest.importorskip("peft")
    actor, _ = make_actor_engine(source("actor.lora={}"), CONTEXT)
    trained = {parameter.dtype for parameter in actor.model.parameters() if parameter.requires_grad}
    kept = {parameter.dtype for parameter in actor.model.parameters() if not parameter.requires_grad}
    assert (trained, kept) == ({torch.float32}, {torch.bfloat16})


def test_an_engine_is_made_of_the_recipe_s_rollout_section() -> None:
    plain = make_rollout_engine(source("rollout.kv=pages", "rollout.max_running=3"), CONTEXT).engine
    assert plain.report().attention.startswith("pages")


def test_an_engine_that_reads_deltas_is_replaced() -> None:
    """A delta comes with the parts that it is applied to, which a new engine reads."""
    assert revival_rule(source("weights.codec=delta").recipe, role_named("rollout"), ()) is not None


@pytest.mark.parametrize("role", ["rollout", "reward", "reference"])
def test_a_process_that_dies_at_each_start_is_not_started_without_end(role: str) -> None:
    rule = revival_rule(source(f"recovery.restarts_per_hour={{{role}: 1}}").recipe, role_named(role), ())
    assert rule is not None
    assert not rule.budget.spend(0.0)
    assert f"recovery.restarts_per_hour.{role} is 1" in rule.budget.spend(1.0)
