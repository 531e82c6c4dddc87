"""Loans on the virtual clock: verl's share that ends a loan, no share, and the share with the best prediction."""

from collections.abc import Sequence

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.profile.types import Lengths
from interlace.forecast.scoring import Workplace
from interlace.forecast.search.plans import Fidelity, Score
from interlace.forecast.simulate import Simulation
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule

PRESET = "verl-separate-async-switch"
SHARES = (None, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares that the prediction tries; 0.3 is the preset's."""
DEVICES, PROMPTS, SAMPLES, MAX_TOKENS = 32, 64, 8, 16384
LENGTHS = {
    "even": Lengths(prompt_tokens=200, median=3000, prompt_sigma=0.2, response_sigma=0.2),
    "log-normal": Lengths(prompt_tokens=200, median=2500, prompt_sigma=0.6, response_sigma=0.6),
    "3 % run to the limit": Lengths(
        prompt_tokens=200, median=2500, prompt_sigma=0.6, response_sigma=0.6, cap_share=0.03
    ),
}
LOOK, RUN = Fidelity(steps=4), Fidelity(steps=8)


def lending_table() -> str:
    """Returns the comparison as Markdown: a few steps of one seed select the share, then runs with another seed."""
    lines = ["| lengths | no loan | preset (0.3) | predicted share |", "| --- | --- | --- | --- |"]
    for name, lengths in LENGTHS.items():
        seen, run = _workplace(lengths, seed=0), _workplace(lengths, seed=1)
        rates = [_rate(seen, _until(share), LOOK) for share in SHARES]
        picked = SHARES[rates.index(max(rates))]
        asked_s = _rate(run, _until(None), RUN)
        ratios = [_rate(run, each, RUN) / asked_s for each in (_split(), _until(0.3), _until(picked))]
        lines.append(f"| {name} | {ratios[0]:.2f} | {ratios[1]:.2f} | {ratios[2]:.2f} ({picked or 'none'}) |")
    return "\n".join(lines)


def _until(share: float | None) -> Schedule:
    return load_schedule(PRESET).model_copy(update={"lend_until": share})


def _split() -> Schedule:
    """Returns the preset with its two halves on separate devices."""
    given = load_schedule(PRESET)
    rollout = given.placement.of("rollout").model_copy(update={"devices": "0-50%"})
    apart = given.placement.model_copy(update={"rollout": rollout})
    return given.model_copy(update={"placement": apart, "lend_until": None})


def _workplace(lengths: Lengths, seed: int) -> Workplace:
    overrides: Sequence[str] = (
        f"prompts_per_step={PROMPTS}", f"samples_per_prompt={SAMPLES}", f"sampling.max_new_tokens={MAX_TOKENS}",
        "minibatches=1", f"seed={seed}", "schedule=verl-colocated",
    )  # fmt: skip
    profile = load_profile("qwen2.5-7b-h800").model_copy(update={"lengths": lengths})
    simulation = Simulation(profile=profile, num_devices=DEVICES)
    return Workplace(recipe=load_recipe("longtail", overrides), simulation=simulation)


def _rate(place: Workplace, schedule: Schedule, fidelity: Fidelity) -> float:
    found = place.score(schedule, fidelity)
    if not isinstance(found, Score):
        raise ValueError(found.reason)
    return found.tokens_per_s
