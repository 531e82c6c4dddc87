"""Layout of training for a plan: the fastest one that fits into memory, as settings of the recipe."""

from statistics import fmean
from typing import TYPE_CHECKING

from interlace.forecast.costs.layouts import LayoutForecast, search_layouts
from interlace.forecast.costs.sheets import device_names, load_sheet
from interlace.forecast.profile.roofline import shape_of
from interlace.forecast.search.bounds import response_lengths
from interlace.schedule.schedule import Schedule

if TYPE_CHECKING:
    from interlace.forecast.plan import PlanRequest


def has_layouts(request: "PlanRequest") -> bool:
    """Returns whether layouts can be forecast: one kind of device, with a data sheet, and a profile of this model."""
    simulation = request.simulation
    is_same = simulation.profile.model in ("", request.recipe.model.path)
    return is_same and not simulation.pools and simulation.profile.kind in device_names()


def plan_training(request: "PlanRequest", schedule: Schedule) -> list[LayoutForecast]:
    """Returns the layouts of the actor's devices that fit into memory, the fastest first.

    Returns an empty list if none fits, or without has_layouts(). An adapter (actor.lora) is not modelled.
    """
    recipe, simulation = request.recipe, request.simulation
    profile = simulation.profile
    if not has_layouts(request):
        return []
    (devices,) = schedule.instances("actor", simulation.devices)
    most, prompt = recipe.sampling.max_new_tokens, profile.lengths.prompt_tokens
    mean = fmean(response_lengths(profile.lengths, most)) + prompt
    samples = recipe.prompts_per_step * recipe.samples_per_prompt
    return search_layouts(
        shape_of(recipe),
        load_sheet(profile.kind),
        len(devices),
        max(1, round(samples * mean / recipe.minibatches)),
        most + prompt,
    )
