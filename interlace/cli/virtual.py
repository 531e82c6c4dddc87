"""Virtual cluster named on the command line: `--devices 8xH100-80GB`, or `--devices 64,32 --profile NAME,NAME`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.core.errors import UserError

if TYPE_CHECKING:
    from interlace.core.types import JSON
    from interlace.forecast.profile.types import Profile
    from interlace.forecast.simulate import SimulatedVariant, Simulation
    from interlace.run.recipe.config import Recipe

PROFILE, ENGINES = "profile.", "engines="
MAX_DEVICES = 100_000
"""Most devices of a kind; a simulation of more would not end."""


def virtual_cluster(devices: str, profile: str | None, *, num_prompts: int = 8192) -> "Simulation":
    """Parses comma-separated numbers of devices and as many profiles. Raises UserError."""
    from interlace.forecast.simulate import Simulation

    counts = [_count_devices(devices, part) for part in devices.split(",")]
    profiles = (
        [load_given_profile(name.strip()) for name in profile.split(",")] if profile else [load_given_profile(None)]
    )
    if len(counts) != len(profiles):
        raise UserError(
            f"--devices {devices} has {len(counts)} number(s) and --profile {profile} {len(profiles)} kind(s) of "
            "device: give as many of each, with commas between."
        )
    first = profiles[0]
    if len(profiles) == 1:
        return Simulation(profile=first, num_devices=counts[0], num_prompts=num_prompts)
    kinds = [each.kind for each in profiles]
    if len(set(kinds)) < len(kinds):
        raise UserError(
            f"--profile {profile}: the devices of a mixed cluster are told apart by the `kind` in their profiles, and "
            f"these are {', '.join(kinds)}. Give each a kind of its own."
        )
    if other := next((each for each in profiles if each.model != first.model), None):
        raise UserError(
            f"--profile {profile}: one profile is of model {first.model or 'unknown'}, another of "
            f"{other.model or 'unknown'}. The kinds of devices of a cluster run one model."
        )
    mixed = first.model_copy(update={"kinds": {each.kind: each for each in profiles}})
    pools = tuple(zip(kinds, counts, strict=True))
    return Simulation(profile=mixed, num_devices=sum(counts), pools=pools, num_prompts=num_prompts)


def recipe_cluster(
    spec: str, overrides: Sequence[str], devices: str, profile: str | None, *, num_prompts: int = 8192
) -> "tuple[Simulation, list[str]]":
    """Returns the virtual cluster of a recipe, and the overrides of the recipe. Raises UserError.

    overrides: may include `profile.KEY=VALUE`, which changes the profile. devices: numbers of devices of the profiles,
    as `64,32`; or a number and a kind, as `8xH100-80GB`, whose costs follow from the recipe's model and the data sheet.
    """
    from interlace.run.recipe.load import load_recipe

    changes, rest = _split_overrides(overrides)
    return _make_cluster(lambda: load_recipe(spec, rest), changes, devices, profile, num_prompts), rest


def load_on_cluster(
    spec: str, overrides: Sequence[str], devices: str, profile: str | None
) -> "tuple[Recipe, Simulation, list[str]]":
    """Loads a recipe. Returns the recipe, its virtual cluster and its overrides; see recipe_cluster()."""
    from interlace.run.recipe.load import load_recipe

    changes, rest = _split_overrides(overrides)
    recipe = load_recipe(spec, rest)
    return recipe, _make_cluster(lambda: recipe, changes, devices, profile), rest


def _split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the changes of the profile, without their prefix, and the overrides of the recipe."""
    changes = [each.removeprefix(PROFILE) for each in overrides if each.startswith(PROFILE)]
    return changes, [each for each in overrides if not each.startswith(PROFILE)]


def _make_cluster(
    load: "Callable[[], Recipe]", changes: Sequence[str], devices: str, profile: str | None, num_prompts: int = 8192
) -> "Simulation":
    """Returns a virtual cluster. load: called if the costs follow from the recipe. changes: of the profile."""
    from interlace.forecast.costs.profiles import change_profile
    from interlace.forecast.costs.sheets import parse_cluster
    from interlace.forecast.simulate import Simulation

    sheet = parse_cluster(devices)
    if sheet is None:
        simulation = virtual_cluster(devices, profile, num_prompts=num_prompts)
    elif profile is not None:
        raise UserError(f"--devices {devices} names devices by their data sheet: leave out --profile.")
    else:
        from interlace.forecast.profile.roofline import roofline_of  # loads torch

        count, kind = sheet
        simulation = Simulation(profile=roofline_of(load(), kind), num_devices=count, num_prompts=num_prompts)
    return replace(simulation, profile=change_profile(simulation.profile, changes)) if changes else simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedSchedules:
    """A recipe simulated under several schedules."""

    simulation: "Simulation"
    results: "Sequence[SimulatedVariant]"

    def rows(self) -> "list[Mapping[str, JSON]]":
        """Returns each schedule as JSON, with its price."""
        first, price = self.results[0], self.simulation.price
        return [{**each.row(first), "price_per_million_tokens": price(each.tokens_per_s)} for each in self.results]


def simulate_schedules(
    recipe: str,
    overrides: Sequence[str],
    schedule: str | None,
    *,
    devices: str,
    profile: str | None,
    num_prompts: int,
    timeline: Path | None,
) -> SimulatedSchedules:
    """Simulates a recipe under each schedule. Raises UserError.

    overrides: may include `engines=CHANGES`, and see recipe_cluster(), also for `devices` and `profile`.
    """
    from interlace.forecast.elastic import parse_changes
    from interlace.forecast.simulate import simulate_variants

    if num_prompts < 1:
        raise UserError(f"--prompts {num_prompts}: a data set has one prompt or more.")
    engines = [each.removeprefix(ENGINES) for each in overrides if each.startswith(ENGINES)]
    given = [each for each in overrides if not each.startswith(ENGINES)]
    simulation, given = recipe_cluster(recipe, given, devices, profile, num_prompts=num_prompts)
    if engines:
        simulation = replace(simulation, engine_changes=parse_changes(",".join(engines)))
    results = simulate_variants(recipe, given, schedule, simulation, timeline=timeline)
    return SimulatedSchedules(simulation=simulation, results=results)


def load_given_profile(spec: str | None) -> "Profile":
    """Returns the profile that --profile names: a shipped one, a file, or the records of a run. Raises UserError."""
    from interlace.forecast.costs.profiles import load_profile
    from interlace.observe.run_folder import find_run

    run = find_run(spec) if spec else None
    if run is None:
        return load_profile(spec)
    from interlace.forecast.profile.from_run import profile_of_run

    return profile_of_run(run)[1]


def _count_devices(devices: str, part: str) -> int:
    if not part.strip().isdecimal() or not part.strip().strip("0"):
        raise UserError(
            f"--devices {devices}: write a number of devices (64), one for each profile (64,32), or a number and "
            "a kind (8xH100-80GB)."
        )
    if len(part.strip()) > len(str(MAX_DEVICES)) or int(part) > MAX_DEVICES:
        raise UserError(f"--devices asks for more than {MAX_DEVICES:,} devices, and a simulation has at most so many.")
    return int(part)
