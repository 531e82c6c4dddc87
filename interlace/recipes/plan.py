"""Check of schedules that a planner proposes for a recipe on a real cluster: which can run there."""

from collections.abc import Callable

from interlace.core.errors import UserError
from interlace.models.loading import empty_model
from interlace.models.size import model_size
from interlace.recipes.config import Recipe, ScheduleChoice, algorithm_of
from interlace.recipes.engines import check_engine
from interlace.recipes.layout import num_spanned
from interlace.recipes.memory import MemoryLoads, check_memory, forecast_memory, largest_microbatch
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

MOST_SPANNED = 8


def spans_here(recipe: Recipe, devices: tuple[Device, ...]) -> tuple[int, ...]:
    """Returns the numbers of devices that an instance of the recipe's rollout engine may have here."""
    spanned = num_spanned(recipe, "rollout", devices[0].pool)
    if spanned is not None:
        return (spanned,)
    return tuple(size for size in (1, 2, 4, MOST_SPANNED) if size <= len(devices))


def accepts_here(recipe: Recipe, devices: tuple[Device, ...], longest_prompt: int) -> Callable[[Schedule], str | None]:
    """Returns a check of schedules: why one cannot run here, or None. Reads the model's shape once.

    longest_prompt: as in largest_microbatch().
    """
    model = empty_model(recipe.model)
    size = model_size(model)
    loads = MemoryLoads(size=size, num_lora=None, microbatch_tokens=largest_microbatch(recipe, longest_prompt))
    needs = algorithm_of(recipe).needs

    def reason(schedule: Schedule) -> str | None:
        candidate = recipe.model_copy(update={"schedule": ScheduleChoice(preset="planned", resolved=schedule)})
        try:
            check_engine(candidate, devices, model)
            check_memory(forecast_memory(candidate, needs, loads, devices))
        except UserError as error:
            return str(error)
        return None

    return reason
