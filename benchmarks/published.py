"""Presets on the virtual clock, against the results in their papers.

    python benchmarks/published.py [--presets areal,...] [--devices 256] [--json FILE] [--write] presets
    python benchmarks/published.py [--only NAME] [--vary] [--write] claims
    python benchmarks/published.py [--write] ablation
    python benchmarks/published.py [--write] agents

`presets` runs every preset for text at one size. `claims` runs the pair of each published ratio, with its published
size and settings as far as they are stated; `_published_claims.py` contains them with their sources. Costs are
rooflines of data sheets (the shipped profiles), and lengths are log-normal with a share that reaches the limit, so
ratios are comparable but seconds are not. Results are kept in docs/published.json: --only measures a part of the claims
again, and the table contains all. With --vary, the assumed parameters of each claim outside the published range are
halved and doubled one by one; changes of the ratio are printed, with a note if it enters the range. `ablation` adds the
parts of StreamRL one after another. `agents` compares admission of requests and of whole episodes, as ThunderAgent
does, and two ways of running tools; `_published_agents.py` contains its assumptions.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from _page import write_table
from _published_agents import tabulate as tabulate_agents
from _published_claims import CLAIMS, NEARLY, RANKER, REASONING, STREAM, VERL_MIX, WITHIN, Claim, Setup
from _published_runs import Measured, measure, of_actor, of_rollout, with_lengths

from interlace.forecast.profile.types import Lengths, Profile
from interlace.schedule.presets import preset_names

BASELINE = "verl-colocated"
DOCS = Path(__file__).parent.parent / "docs"
PRESETS = DOCS / "presets" / "measured" / "simulated.json"
"""Figures of `presets`, from which `python docs/presets/measure.py tables` makes a column of docs/schedules.md."""
WRITTEN_DEVICES = 256
"""Number of devices of that column."""
ABLATED_PROMPTS = 64
MIXES: Mapping[str, Lengths] = {"assumed mix": REASONING, "verl's mix": VERL_MIX}
"""Mixes of lengths of the ablation; the second one reproduces the seconds that verl publishes."""
PLAIN, WHOLE = "schedule.dispatch=least_tokens", "schedule.granularity=step"
LEAST_SHIFT = 0.0005
"""Smallest change of the mean length that the table of the presets shows."""
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


def claims(steps: int, only: str, store: Path, *, vary: bool) -> str:
    """Measures the claims with `only` in their names and keeps them in the store. Returns the table of all kept ones.

    vary: also prints the ratios at other values of the assumed parameters, for claims outside the published range.
    """
    kept = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    for claim in [claim for claim in CLAIMS if only in claim.name]:
        base, ours = measure(claim.baseline, claim.baseline_setup, steps), measure(claim.preset, claim.setup, steps)
        ratio = ours.rate(claim) / base.rate(claim)
        kept[claim.name] = {"ratio": ratio, "ours": asdict(ours), "baseline": asdict(base)}
        store.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print(f"{claim.name}: {ratio:.2f}x, {claim.verdict(ratio)}", flush=True)
        if vary and not claim.holds(ratio):
            is_fitted = claim.baseline_setup.fit is not None
            for name in (*OF_LENGTHS, *(() if is_fitted else OF_COSTS)):
                print(f"{claim.name} | {name} | {sensitivity(claim, base, ours, name, steps)}", flush=True)
    return claims_table(kept)


def claims_table(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the published and the simulated ratios as Markdown. kept: results by the claim's name."""
    heads = ("claim", "published", "simulated", "verdict")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    verdicts = []
    for claim in [claim for claim in CLAIMS if claim.name in kept]:
        row = kept[claim.name]
        split, ratio = row["ours"]["split"], row["ratio"]
        verdicts.append(claim.verdict(ratio))
        lines.append(
            f"| {claim.name}{f' ({split} % generate)' if split else ''} | {claim.low:.2f}-{claim.high:.2f}x "
            f"| {ratio:.2f}x | {verdicts[-1]} |"
        )
    within, nearly = verdicts.count(WITHIN), verdicts.count(NEARLY)
    lines += ["", f"{within} of {len(verdicts)} are within the published range, {nearly} more within 10 % of it."]
    return "\n".join(lines)


def ablation(steps: int) -> str:
    """Returns the parts of StreamRL one after another, at two mixes of lengths, as Markdown."""
    heads = ("part", "published, 72B", *MIXES)
    parts: list[tuple[str, str, str, float, tuple[str, ...]]] = [
        ("colocated", "1", BASELINE, 0.0, ()),
        ("half of the devices generates, whole batches", "", "streamrl-sync", 0.0, (PLAIN, WHOLE)),
        ("and training while others generate (stream)", "", "streamrl-sync", 0.0, (PLAIN,)),
        ("and skew-aware dispatch", "1.23", "streamrl-sync", RANKER, ()),
        ("and one version ahead (asynchronous)", "1.5", "streamrl-async", RANKER, ()),
    ]
    lines, first = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"], dict[str, float]()
    for name, published, preset, correlation, settings in parts:
        ratios = []
        for mix, lengths in MIXES.items():
            setup = replace(
                STREAM,
                lengths=lengths.model_copy(update={"rank_correlation": correlation}),
                prompts=ABLATED_PROMPTS,
                splits=(50,),
                settings=settings,
            )
            score = measure(preset, setup, steps).score
            ratios.append(f"{score.tokens_per_s / first.setdefault(mix, score.tokens_per_s):.2f}")
        lines.append(f"| {name} | {published} | {' | '.join(ratios)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


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


def presets(names: Sequence[str], devices: int, steps: int, store: Path | None) -> Mapping[str, Mapping[str, Any]]:
    """Runs presets at one size, with the better of two splits. Returns the figures of each preset for schedules.md;
    writes all results into the store.
    """
    setup = Setup(devices=devices, prompts=256, samples=16, max_tokens=28672, lengths=REASONING, splits=(50, 75))
    first = measure(BASELINE, setup, steps)
    measured, rows = list[Measured](), dict[str, Mapping[str, Any]]()
    for name in names:
        measured.append(first if name == BASELINE else measure(name, setup, steps))
        rows[name] = preset_row(measured[-1], first)
        print(name, json.dumps(rows[name]), flush=True)
    if store:
        store.write_text(json.dumps([asdict(one) for one in measured], indent=1) + "\n", encoding="utf-8")
    return rows


def preset_row(one: Measured, first: Measured) -> Mapping[str, Any]:
    """Returns the share of devices that generate, the speed relative to the baseline, and the change of the length."""
    shift = one.score.length_shift
    return {
        "split": one.split,
        "ratio": round(one.score.tokens_per_s / first.score.tokens_per_s, 2),
        "length_shift": round(shift, 3) if abs(shift) >= LEAST_SHIFT else 0.0,
    }


def main() -> None:
    """Runs the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("presets", "claims", "ablation", "agents"), nargs="?", default="claims")
    text_presets = ",".join(name for name in preset_names() if "embodied" not in name)
    parser.add_argument("--presets", default=text_presets, help="of `presets`")
    parser.add_argument("--devices", type=int, default=WRITTEN_DEVICES, help="of `presets`")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="", help="claims with this in their names")
    parser.add_argument("--vary", action="store_true", help="also other values of the assumed parameters")
    parser.add_argument("--json", type=Path, help="of `presets`")
    parser.add_argument("--write", action="store_true", help="the table into RESULTS.md; `presets`: for schedules.md")
    options = parser.parse_args()
    if options.what == "presets" and options.write and options.devices != WRITTEN_DEVICES:
        parser.error(
            f"--devices {options.devices} with --write: docs/schedules.md compares presets on {WRITTEN_DEVICES} "
            "devices. Write these results to a file (--json)."
        )
    if options.what == "presets":
        rows = presets(options.presets.split(","), options.devices, options.steps, options.json)
        if options.write:
            stored = json.loads(PRESETS.read_text(encoding="utf-8"))
            stored["schedules"].update(rows)
            PRESETS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        return
    if options.what == "claims":
        text = claims(options.steps, options.only, DOCS / "published.json", vary=options.vary)
    elif options.what == "agents":
        text = tabulate_agents()
    else:
        text = ablation(options.steps)
    print(text)
    if options.write:
        write_table(Path(__file__).parent / "RESULTS.md", options.what, text)


if __name__ == "__main__":
    main()
