"""Checks whether schedules that a planner proposes can run on a recipe's real cluster."""

from interlace.core.errors import UserError
from interlace.models.loading import empty_model
from interlace.run.recipe.check import check_shared_devices
from interlace.run.recipe.config import Recipe, algorithm_of, set_schedule
from interlace.run.recipe.engines import check_engine
from interlace.run.recipe.layout import num_spanned
from interlace.run.recipe.memory import check_memory, forecast_memory, measure_loads
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

MOST_SPANNED = 8


def spans_here(recipe: Recipe, devices: tuple[Device, ...]) -> tuple[int, ...]:
    """Returns the numbers of devices that an instance of the rollout engine may span on this cluster."""
    spanned = num_spanned(recipe, "rollout", devices[0].pool)
    if spanned is not None:
        return (spanned,)
    return tuple(size for size in (1, 2, 4, MOST_SPANNED) if size <= len(devices))


class AcceptsHere:
    """Check of schedules on a recipe's own cluster. Unpickling builds it again from the recipe."""

    def __init__(self, recipe: Recipe, devices: tuple[Device, ...], longest_prompt: int) -> None:
        """Reads the model's shape. longest_prompt: see largest_microbatch()."""
        self._made_of = recipe, devices, longest_prompt
        self._needs = algorithm_of(recipe).needs
        self._model = empty_model(recipe.model)
        self._loads = measure_loads(recipe, self._model, longest_prompt)

    def __reduce__(self) -> tuple[type["AcceptsHere"], tuple[Recipe, tuple[Device, ...], int]]:
        return AcceptsHere, self._made_of

    def on(self, devices: tuple[Device, ...]) -> "AcceptsHere":
        """Returns the check for another cluster."""
        recipe, _, longest_prompt = self._made_of
        return AcceptsHere(recipe, devices, longest_prompt)

    def __call__(self, schedule: Schedule) -> str | None:
        """Returns the reason why a schedule cannot run on the cluster; None if it can."""
        recipe, devices, _ = self._made_of
        candidate = set_schedule(recipe, schedule)
        try:
            check_engine(candidate, devices, self._model)
            memory = forecast_memory(candidate, self._needs, self._loads, devices)
            check_memory(memory)
            check_shared_devices(candidate, devices, memory)
        except UserError as error:
            return str(error)
        return None
