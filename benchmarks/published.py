"""Presets on the virtual clock, beside what their papers report.

    python benchmarks/published.py [--presets areal,...] [--devices 256] [--json FILE] [--write] [presets|claims]

`presets` runs every preset at one size. `claims` runs the pair that each published ratio compares, at the size and with
the settings it was published for, as far as these are stated; `_published_claims.py` has them, with their sources.
Costs are rooflines of data sheets (the shipped profiles), lengths are log-normal with a share that never ends: what
should agree is the ratio, not the seconds. Of each claim whose ratio is outside the published range, one assumed
parameter after the other is halved and doubled: what moves the ratio, and whether into the range, is printed.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from _page import write_table
from _published_claims import CLAIMS, REASONING, Claim, Setup

from interlace.core.profile import Profile
from interlace.jobs.scoring import score_of
from interlace.jobs.simulate import Simulation
from interlace.jobs.virtual import run_virtually
from interlace.recipes.load import load_recipe
from interlace.runtime.timeline import NoRecorder
from interlace.schedule.candidates import warm_up_steps
from interlace.schedule.plans import Fidelity, Score
from interlace.schedule.presets import preset_names
from interlace.simulate.profiles import load_profile

BASELINE = "verl-colocated"
SETTLING = 4
"""Steps, at least, that are not counted: pipelines fill, and dispatch learns lengths and how fast engines decode."""
Change = Callable[[Profile, float], Profile]


def _of_rollout(profile: Profile, **fields: object) -> Profile:
    return profile.model_copy(update={"rollout": profile.rollout.model_copy(update=fields)})


def _of_lengths(profile: Profile, **fields: object) -> Profile:
    return profile.model_copy(update={"lengths": profile.lengths.model_copy(update=fields)})


def _training(profile: Profile, factor: float) -> Profile:
    actor = profile.actor
    fields = {"token_s": factor * actor.token_s, "inference_token_s": factor * actor.inference_token_s}
    return profile.model_copy(update={"actor": actor.model_copy(update=fields)})


CHANGES: Mapping[str, Change] = {
    "median length": lambda profile, by: _of_lengths(profile, median=by * profile.lengths.median),
    "share at the limit": lambda profile, by: _of_lengths(profile, cap_share=by * profile.lengths.cap_share),
    "seconds a trained token": _training,
    "KV cache": lambda profile, by: _of_rollout(profile, kv_tokens=round(by * profile.rollout.kv_tokens)),
    "seconds to read the cache": lambda profile, by: _of_rollout(
        profile, context_token_s=by * profile.rollout.context_token_s
    ),
}
"""Parameters that no source states."""


def unchanged(profile: Profile) -> Profile:
    """Returns the profile."""
    return profile


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One simulation: means over the steps that are counted."""

    preset: str
    split: int | None
    """Share of the devices that generates, where the preset splits them."""
    score: Score

    def rate(self, claim: Claim) -> float:
        """Returns what the claim compares: trained tokens/s, or what of them is not training."""
        score = self.score
        if not claim.before_training:
            return score.tokens_per_s
        return score.tokens_per_s / (1 - score.bins["train"] - score.bins["weight_sync"])


def is_split(preset: str) -> bool:
    """Says whether a preset splits the devices."""
    return "%" in load_recipe("quickstart", [f"schedule={preset}"]).schedule.resolved.placement.of("rollout").devices


def measure(
    preset: str, setup: Setup, steps: int, change: Callable[[Profile], Profile] = unchanged, split: int | None = None
) -> Measured:
    """Simulates a preset; one that splits the devices, at a given split or the best of the setup's."""
    splits = [split] if split else setup.splits if is_split(preset) else [None]
    tried = [Measured(preset=preset, split=each, score=_score(preset, setup, steps, change, each)) for each in splits]
    return max(tried, key=lambda each: each.score.tokens_per_s)


def _score(preset: str, setup: Setup, steps: int, change: Callable[[Profile], Profile], split: int | None) -> Score:
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
    costs = change(load_profile(setup.profile).model_copy(update={"lengths": setup.lengths}))
    simulation = Simulation(profile=costs, num_devices=setup.devices)
    schedule = recipe.schedule.resolved
    counted = Fidelity(steps=steps).counted_steps(schedule)
    total = max(SETTLING, warm_up_steps(schedule)) + counted
    # A run's last steps have nothing to generate ahead for: it is stopped before them.
    recipe = recipe.model_copy(update={"steps": 4 * total + 16})
    run = run_virtually(recipe, simulation, name=preset, recorder=NoRecorder, on_step=lambda step: step.step < total)
    return score_of(run, counted, simulation, recipe)


def claims(steps: int) -> tuple[list[dict[str, object]], str]:
    """Returns each published ratio beside the simulated one, as JSON and as Markdown."""
    heads = ("claim", "published", "simulated", "seconds a step, and its baseline", "")
    lines, told = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"], []
    outside: list[tuple[Claim, Measured, Measured]] = []
    for claim in CLAIMS:
        base, ours = measure(claim.baseline, claim.baseline_setup, steps), measure(claim.preset, claim.setup, steps)
        ratio = ours.rate(claim) / base.rate(claim)
        within = claim.holds(ratio)
        share = f" ({ours.split} % generate)" if ours.split else ""
        lines.append(
            f"| {claim.name}{share} | {claim.low:.2f}-{claim.high:.2f}x | {ratio:.2f}x | {ours.score.step_s:.0f}, "
            f"{base.score.step_s:.0f} | {'within' if within else f'outside: {claim.reason}'.rstrip(': ')} |"
        )
        print(lines[-1], flush=True)
        outside += [] if within else [(claim, base, ours)]
        told.append({"name": claim.name, "low": claim.low, "high": claim.high, "ratio": ratio, "within": within,
                     "ours": asdict(ours), "baseline": asdict(base)})  # fmt: skip
    lines += ["", f"{len(told) - len(outside)} of {len(told)} are within."]
    if outside:
        lines += ["", "| outside | parameter | multiplied by: ratio |", "|---|---|---|"]
    for claim, base, ours in outside:
        for name, change in CHANGES.items():
            lines.append(f"| {claim.name} | {name} | {sensitivity(claim, base, ours, change, steps)} |")
            print(lines[-1], flush=True)
    return told, "\n".join(lines)


def sensitivity(
    claim: Claim, base: Measured, ours: Measured, change: Callable[[Profile, float], Profile], steps: int
) -> str:
    """Returns the ratios at half and twice a parameter, and at a quarter or four times where it is nearer there."""

    def ratio(by: float) -> float:
        first = measure(claim.baseline, claim.baseline_setup, steps, lambda costs: change(costs, by), base.split)
        second = measure(claim.preset, claim.setup, steps, lambda costs: change(costs, by), ours.split)
        return second.rate(claim) / first.rate(claim)

    found = {by: ratio(by) for by in (0.5, 2.0)}
    nearer = min(found, key=lambda by: claim.distance(found[by]))
    if not claim.holds(found[nearer]):
        found[nearer**2] = ratio(nearer**2)
    inside = [by for by, value in found.items() if claim.holds(value)]
    text = ", ".join(f"{by:g}: {found[by]:.2f}x" for by in sorted(found))
    return f"{text}; {f'inside at {inside[0]:g}' if inside else 'never inside'}"


def presets(names: Sequence[str], devices: int, steps: int) -> list[dict[str, object]]:
    """Presets at one size, at the better of two splits."""
    setup = Setup(devices=devices, prompts=256, samples=16, max_tokens=28672, lengths=REASONING, splits=(50, 75))
    first = measure(BASELINE, setup, steps)
    told = []
    bins = ("generate", "decode_underfilled", "train", "re_prefill", "discarded", "tail_bubble", "pipeline_bubble")
    print(f"{'preset':22s} split  s/step  ratio  {'  '.join(bins)}  staleness  length shift")
    for name in names:
        each = first if name == BASELINE else measure(name, setup, steps)
        score = each.score
        shares = "  ".join(f"{score.bins[name]:{len(name)}.0%}" for name in bins)
        ratio = score.tokens_per_s / first.score.tokens_per_s
        print(
            f"{each.preset:22s} {each.split or '-'!s:>5s}  {score.step_s:6.1f}  {ratio:4.2f}x  {shares}",
            f"  {score.staleness_mean:.2f}/{score.staleness_max:.0f}  {score.length_shift:+.1%}",
            flush=True,
        )
        told.append(asdict(each))
    return told


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("presets", "claims"), nargs="?", default="claims")
    parser.add_argument("--presets", default=",".join(preset_names()), help="of `presets`")
    parser.add_argument("--devices", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="claims into docs/simulator.md")
    options = parser.parse_args()
    if options.what == "claims":
        told, text = claims(options.steps)
        if options.write:
            write_table(Path(__file__).parent.parent / "docs" / "simulator.md", "claims", text)
    else:
        told = presets(options.presets.split(","), options.devices, options.steps)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
