"""Presets on the virtual clock, against the results in their papers.

    python benchmarks/published.py [--presets areal,...] [--devices 256] [--json FILE] [--write] [presets|claims]

`presets` runs every preset at one size. `claims` runs the pair of each published ratio, with its published size and
settings as far as they are stated; `_published_claims.py` contains them with their sources. Costs are rooflines of data
sheets (the shipped profiles), and lengths are log-normal with a share that reaches the limit, so ratios are comparable
but seconds are not. For each claim outside the published range, the assumed parameters are halved and doubled one by
one; changes of the ratio are printed, with a note if it enters the range. They are not written into the page.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from _page import write_table
from _published_claims import CLAIMS, REASONING, Claim, Setup
from _published_runs import Measured, measure, of_actor, of_rollout, with_lengths

from interlace.forecast.profile.types import Profile
from interlace.schedule.presets import preset_names

BASELINE = "verl-colocated"
Change = Callable[[Profile, float], Profile]


OF_LENGTHS: Mapping[str, str] = {"median length": "median", "share at the limit": "cap_share"}
"""Parameters of the length mix, which no source states, and their fields."""
OF_COSTS: Mapping[str, Change] = {
    "seconds a trained token": lambda profile, by: of_actor(profile, by, by),
    "KV cache": lambda profile, by: of_rollout(profile, kv_tokens=round(by * profile.rollout.kv_tokens)),
    "seconds to read the cache": lambda profile, by: of_rollout(
        profile, context_token_s=by * profile.rollout.context_token_s
    ),
}
"""Parameters of a roofline that no source states. If costs are fitted, the source determines them."""


def claims(steps: int, only: str = "") -> tuple[list[dict[str, object]], str]:
    """Returns each published ratio next to the simulated one, as JSON and as Markdown. only: a part of the name."""
    heads = ("claim", "published", "simulated", "seconds a step, and its baseline", "")
    lines, told = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"], []
    outside: list[tuple[Claim, Measured, Measured]] = []
    for claim in [claim for claim in CLAIMS if only in claim.name]:
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
    for claim, base, ours in outside:
        is_fitted = claim.baseline_setup.fit is not None
        for name in (*OF_LENGTHS, *(() if is_fitted else OF_COSTS)):
            print(f"{claim.name} | {name} | {sensitivity(claim, base, ours, name, steps)}", flush=True)
    return told, "\n".join(lines)


def sensitivity(claim: Claim, base: Measured, ours: Measured, parameter: str, steps: int) -> str:
    """Returns the ratios at half and twice a parameter, and at a quarter or four times if these are closer."""

    def rate(preset: str, setup: Setup, by: float, split: int | None) -> float:
        if parameter in OF_LENGTHS:
            return measure(preset, with_lengths(setup, OF_LENGTHS[parameter], by), steps, split=split).rate(claim)
        changed = OF_COSTS[parameter]
        return measure(preset, setup, steps, lambda costs: changed(costs, by), split).rate(claim)

    def ratio(by: float) -> float:
        theirs = rate(claim.baseline, claim.baseline_setup, by, base.split)
        return rate(claim.preset, claim.setup, by, ours.split) / theirs

    found = {by: ratio(by) for by in (0.5, 2.0)}
    nearer = min(found, key=lambda by: claim.distance(found[by]))
    if not claim.holds(found[nearer]):
        found[nearer**2] = ratio(nearer**2)
    inside = [by for by, value in found.items() if claim.holds(value)]
    text = ", ".join(f"{by:g}: {found[by]:.2f}x" for by in sorted(found))
    return f"{text}; {f'inside at {inside[0]:g}' if inside else 'never inside'}"


def presets(names: Sequence[str], devices: int, steps: int) -> list[dict[str, object]]:
    """Runs presets at one size, with the better of two splits."""
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
    """Runs the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("presets", "claims"), nargs="?", default="claims")
    parser.add_argument("--presets", default=",".join(preset_names()), help="of `presets`")
    parser.add_argument("--devices", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="", help="claims with this in their names")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="claims into docs/simulator.md")
    options = parser.parse_args()
    if options.what == "claims":
        told, text = claims(options.steps, options.only)
        if options.write:
            write_table(Path(__file__).parent.parent / "docs" / "simulator.md", "claims", text)
    else:
        told = presets(options.presets.split(","), options.devices, options.steps)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
