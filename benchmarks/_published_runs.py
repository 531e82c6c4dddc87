"""One preset at one size on the virtual clock, with costs fitted to the published stages of its baseline."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from _published_claims import Claim, Setup, Stages

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.profile.types import Profile
from interlace.forecast.scoring import score_of
from interlace.forecast.search.candidates import warm_up_steps
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation
from interlace.forecast.virtual import run_virtually
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import NoRecorder

COLOCATED = "verl-colocated"
SETTLING = 4
"""Minimum number of uncounted steps: pipelines fill, and dispatch learns lengths and the speed of engines."""
FITS = 3
"""Simulations per fit; afterwards each stage is within one per cent."""


def of_rollout(profile: Profile, **fields: object) -> Profile:
    """Returns the profile with other costs of generation."""
    return profile.model_copy(update={"rollout": profile.rollout.model_copy(update=fields)})


def of_actor(profile: Profile, train: float, log_probs: float) -> Profile:
    """Returns the profile with the seconds per trained token and per token of log-probs times these factors."""
    actor = profile.actor
    fields = {"token_s": train * actor.token_s, "inference_token_s": log_probs * actor.inference_token_s}
    return profile.model_copy(update={"actor": actor.model_copy(update=fields)})


def slower_engines(profile: Profile, by: float) -> Profile:
    """Returns the profile with slower decode steps and prefill, by a factor."""
    rollout = profile.rollout
    return of_rollout(
        profile,
        steps=tuple((batch, by * seconds) for batch, seconds in rollout.steps),
        context_token_s=by * rollout.context_token_s,
        prefill_token_s=by * rollout.prefill_token_s,
    )


@cache
def fitted(setup: Setup) -> Profile:
    """Returns the setup's profile, with costs at which its baseline has the published stages."""
    profile = load_profile(setup.profile).model_copy(update={"lengths": setup.lengths})
    return _of_stages(profile, setup, setup.fit) if setup.fit else profile


def _of_stages(profile: Profile, setup: Setup, stages: Stages) -> Profile:
    if stages.train_on:
        # The relative duration of the same training on the other number of devices; the fit determines the speed of
        # one.
        number, seconds = stages.train_on
        whole = setup.devices / 2
        scaling = sorted([(setup.devices, whole), (number, whole * stages.train / seconds)])
        profile = profile.model_copy(update={"actor": profile.actor.model_copy(update={"scaling": tuple(scaling)})})
    if stages.generate_on and stages.generate_on[1] <= stages.generate:
        profile = of_rollout(profile, steps=profile.rollout.steps[:1], context_token_s=0.0)
    for _ in range(FITS):
        score = _score(COLOCATED, setup, 3, profile, None)
        train, log_probs = (score.step_s * score.bins[name] for name in ("train", "inference"))
        generate = score.step_s * (1 - score.bins["weight_sync"] - score.bins["switch"]) - train - log_probs
        profile = slower_engines(profile, stages.generate / generate)
        if stages.log_probs:
            profile = of_actor(profile, stages.train / train, stages.log_probs / log_probs)
        else:
            factor = stages.train / (train + log_probs)
            profile = of_actor(profile, factor, factor)
    return profile


def with_lengths(setup: Setup, field: str, by: float) -> Setup:
    """Returns the setup with a parameter of its length mix times a factor; costs are fitted under that mix."""
    lengths = setup.lengths.model_copy(update={field: by * getattr(setup.lengths, field)})
    base = with_lengths(setup.fitted_on, field, by) if setup.fitted_on else None
    return replace(setup, lengths=lengths, fitted_on=base)


def unchanged(profile: Profile) -> Profile:
    """Returns the profile."""
    return profile


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One simulation: means over the counted steps."""

    preset: str
    split: int | None
    """Share of the devices that generates, if the preset splits them."""
    score: Score

    def rate(self, claim: Claim) -> float:
        """Returns the compared quantity: trained tokens/s, trained tokens/s outside training, or steps/s."""
        score = self.score
        if claim.by_steps:
            return 1 / score.step_s
        if not claim.before_training:
            return score.tokens_per_s
        return score.tokens_per_s / (1 - score.bins["train"] - score.bins["weight_sync"])


def is_split(preset: str) -> bool:
    """Returns whether a preset splits the devices."""
    return "%" in load_recipe("quickstart", [f"schedule={preset}"]).schedule.resolved.placement.of("rollout").devices


def measure(
    preset: str, setup: Setup, steps: int, change: Callable[[Profile], Profile] = unchanged, split: int | None = None
) -> Measured:
    """Simulates a preset. A preset that splits the devices uses a given split, or the best of the setup's."""
    costs = change(fitted(setup.fitted_on or setup))
    splits = [split] if split else setup.splits if is_split(preset) else [None]
    tried = [Measured(preset=preset, split=each, score=_score(preset, setup, steps, costs, each)) for each in splits]
    return max(tried, key=lambda each: each.score.tokens_per_s)


def _score(preset: str, setup: Setup, steps: int, costs: Profile, split: int | None) -> Score:
    engine, roles = f"devices_per_instance: {setup.engine}", ("reference", "critic", "actor")
    devices = f"0-{split}%" if split else "all"
    where = [f"schedule.placement.rollout={{devices: '{devices}', {engine}}}"] if split or setup.engine > 1 else []
    where += [f"schedule.placement.{role}={split}-100%" for role in roles] if split else []
    recipe = load_recipe(
        "quickstart",
        [
            f"schedule={preset}",
            f"prompts_per_step={setup.prompts}",
            f"samples_per_prompt={setup.samples}",
            f"sampling.max_new_tokens={setup.max_tokens}",
            f"minibatches={setup.minibatches}",
            *where,
            *setup.settings,
        ],
    )
    simulation = Simulation(profile=costs, num_devices=setup.devices)
    schedule = recipe.schedule.resolved
    counted = Fidelity(steps=steps).count_steps(schedule)
    total = max(SETTLING, warm_up_steps(schedule)) + counted
    # A run generates nothing ahead during its last steps, so the simulation stops before them.
    recipe = recipe.model_copy(update={"steps": 4 * total + 16})
    run = run_virtually(recipe, simulation, name=preset, recorder=NoRecorder, on_step=lambda step: step.step < total)
    return score_of(run, counted, simulation, recipe)
