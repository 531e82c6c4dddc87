"""Plans for an engine need only what this engine can do."""

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.plan import PlanRequest, PlanSettings, make_plan
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.load import load_recipe


def test_a_plan_needs_nothing_that_the_engine_lacks() -> None:
    sizes = ["prompts_per_step=4", "samples_per_prompt=2", "minibatches=1", "sampling.max_new_tokens=100"]
    simulation = Simulation(profile=load_profile("qwen2.5-7b-h800"), num_devices=2, num_prompts=64)
    settings = PlanSettings(max_staleness=8, search_s=600, search_samples=300, search_processes=1)
    refused = {}
    for engine in ("native", "vllm"):
        recipe = load_recipe("quickstart", [*sizes, f"rollout={engine}"])
        made = make_plan(PlanRequest(recipe=recipe, simulation=simulation, settings=settings, spans=(1,)))
        refused[engine] = {each.preset: each.reason for each in made.found.why_not if "cannot do this" in each.reason}
    assert not refused["native"]
    assert "kv_on_switch=offload" in refused["vllm"].pop("async-colocated") and not refused["vllm"]
