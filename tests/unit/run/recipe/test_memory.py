"""Memory of a device is the sum over the workers that the recipe places on it; its inputs have one builder."""

import math
from dataclasses import replace

import pytest

from interlace.engines.train import Adapter, new_reward_model
from interlace.engines.train.reward_model import HEAD
from interlace.forecast.recipe_check import AcceptsHere
from interlace.models.loading import empty_model, load_model
from interlace.run.clusters.base import back_end
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.config import algorithm_of
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.memory import WorkerMemory, forecast_memory, forecast_run, measure_loads, sum_by_device
from interlace.schedule.placement import Device

ROWS = ["task.reasoning_gym.train_size=16", "task.reasoning_gym.heldout_size=4", "warmup=null", "cluster.devices=cpu:1"]
LORA = "actor.lora.rank=4"

FIRST, SECOND = (Device(index=n, pool="cuda", pool_index=n, memory_bytes=100) for n in range(2))


def test_a_device_has_the_sum_of_its_workers_and_the_largest_of_them() -> None:
    actor = WorkerMemory(worker="actor/0", devices=(FIRST,), num_bytes=70, how="", transient_bytes=20, idle_bytes=30)
    engines = [WorkerMemory(worker=f"rollout/{n}", devices=(each,), num_bytes=25, how="") for n, each in
               enumerate((FIRST, SECOND))]  # fmt: skip
    first, second = sum_by_device([*engines, actor])
    assert (first.device, first.together_bytes, first.largest_bytes) == (FIRST, 25 + 70 + 20, actor.peak_bytes)
    assert not first.is_shared
    assert (second.device, second.together_bytes, second.is_shared) == (SECOND, 25, True)


def test_the_adapter_of_a_reward_model_is_forecast_with_its_head() -> None:
    pytest.importorskip("peft")
    recipe = load_recipe("reward-model", [*ROWS, LORA])
    assert recipe.actor.lora is not None
    model = new_reward_model(load_model(recipe.model).model, None, seed=0)
    adapter = Adapter(model, recipe.actor.lora, seed=0, head=HEAD)
    assert measure_loads(recipe, empty_model(recipe.model), 8).num_lora == adapter.num_parameters
    assert check_recipe(recipe).num_lora_parameters == adapter.num_parameters


def test_the_cache_of_vllm_is_forecast_as_it_is_allocated() -> None:
    """It caches one vector a token for latent attention, and ranks beyond the key and value heads hold copies."""
    devices = tuple(Device(index=n, pool="cuda", pool_index=n, memory_bytes=1 << 40) for n in range(4))
    settings = ("warmup=null", "cluster.devices=cuda:4", "schedule.placement.rollout.devices_per_instance=4")
    served = "rollout={engine: vllm, max_tokens: 4096, tensor_parallel_size: 4}"
    recipe = load_recipe("quickstart", [*settings, served])
    loads = measure_loads(recipe, empty_model(recipe.model), 8)
    size = replace(loads.size, num_kv_parts=2, latent_kv_bytes_per_token=10, kv_bytes_per_token=1000)
    loads = replace(loads, size=size)
    found = forecast_memory(recipe, algorithm_of(recipe).needs, loads, devices)
    [engine] = [each for each in found if each.worker.startswith("rollout")]
    assert engine.num_bytes == math.ceil(size.weight_bytes / 4 + recipe.rollout.kv_tokens * 10 / 2)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ((), 1),
        (("actor.ranks=2",), 2),
        (("weights.codec=cast",), 2),
        (("weights.codec=delta",), 2),
        (("weights.codec=int8", "actor.ranks=2"), 2),
        (("weights.codec=delta", "actor.ranks=2"), 4),
        (("weights.transport=folder", "weights.folder=versions"), 2),
        (("weights.transport=gloo",), 2),
        (("weights.transport=gloo", "weights.codec=int8"), 3),
        (("weights.transport=gloo", "actor.ranks=2"), 3),
        (("weights.transport=gloo", "weights.codec=delta"), 3),
        (("weights.transport=gloo", "weights.codec=delta", "actor.ranks=2"), 4),
    ],
)
def test_a_server_that_reads_joins_or_decodes_versions_holds_the_next_one_beside(
    settings: tuple[str, ...], copies: int
) -> None:
    devices = tuple(Device(index=n, pool="cpu", pool_index=n, memory_bytes=1 << 40) for n in range(4))
    places = ("warmup=null", "cluster.devices=cpu:4", "rollout={engine: interlace, max_tokens: 4096}")
    recipe = load_recipe("quickstart", [*places, *settings])
    loads = measure_loads(recipe, empty_model(recipe.model), 8)
    found = forecast_memory(recipe, algorithm_of(recipe).needs, loads, devices)
    engine = next(each for each in found if each.worker.startswith("rollout"))
    size = loads.size
    assert engine.num_bytes == copies * size.weight_bytes + 4096 * size.kv_bytes_per_token
    assert ("the next version" in engine.how) == (copies > 1)
    assert (f"{copies - 2} copies" in engine.how) == (copies > 2)


def test_a_run_on_rows_starts_with_the_forecast_that_was_checked() -> None:
    recipe = load_recipe("dpo", ROWS)
    derived = check_recipe(recipe)
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    assert forecast_run(recipe, devices, derived.max_prompt_tokens).workers == derived.memory


def test_a_proposed_schedule_is_checked_with_the_memory_of_the_adapter() -> None:
    pytest.importorskip("peft")
    recipe = load_recipe("quickstart", [*ROWS, LORA])
    check, whole = check_recipe(recipe), check_recipe(load_recipe("quickstart", ROWS))
    needed, most = (max(worker.peak_bytes for worker in found.memory) for found in (check, whole))
    assert needed < most
    small = Device(index=0, pool="cpu", pool_index=0, memory_bytes=needed)
    assert AcceptsHere(recipe, (small,), check.max_prompt_tokens)(recipe.schedule.resolved) is None
    assert AcceptsHere(load_recipe("quickstart", ROWS), (small,), check.max_prompt_tokens)(recipe.schedule.resolved)
