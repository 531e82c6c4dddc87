"""Distributions on a page: staleness and lengths of the samples."""

import math
from collections import Counter
from collections.abc import Sequence

from interlace.core.types import TerminalEvent
from interlace.observe.report.panels import RUN_COLOURS, Curve, Panel
from interlace.observe.run_data import RunData

NUM_BINS = 24
GENERATED = "#8d99ae"


def distribution_panels(runs: Sequence[RunData]) -> list[Panel]:
    """Builds the histograms; one with a single value in all runs is left out."""
    staleness = [(run.name, RUN_COLOURS[at % len(RUN_COLOURS)], staleness_of(run)) for at, run in enumerate(runs)]
    lengths = [
        (f"{run.name}, trained" if len(runs) > 1 else "trained", RUN_COLOURS[at % len(RUN_COLOURS)], trained)
        for at, run in enumerate(runs)
        if (trained := run.lengths(TerminalEvent.TRAINED))
    ]
    if len(runs) == 1 and len(all_lengths := runs[0].lengths()) > sum(len(trained) for _, _, trained in lengths):
        lengths.insert(0, ("generated", GENERATED, all_lengths))  # below the trained ones
    found = [
        histogram(
            "lengths",
            "Response lengths",
            "share of samples, by tokens after the prompt, those of tools and observations included",
            lengths,
            "tokens",
        ),
        histogram("staleness", "Staleness of trained samples", "share of samples, by versions", staleness, "versions"),
    ]
    return [panel for panel in found if panel]


def histogram(
    id_: str, title: str, note: str, groups: Sequence[tuple[str, str, Sequence[int]]], unit: str
) -> Panel | None:
    """Builds a histogram of whole numbers; returns None for one value alone. groups: name, colour and values."""
    values = [value for _, _, group in groups for value in group]
    if len(set(values)) < 2:
        return None
    low, high = min(values), max(values)
    size = math.ceil((high - low + 1) / NUM_BINS)
    edges = [low + place * size for place in range((high - low) // size + 2)]
    curves = []
    for name, colour, group in groups:
        counts = Counter((value - low) // size for value in group)
        shares = [counts[place] / max(1, len(group)) for place in range(len(edges) - 1)]
        curves.append(Curve(label=name, colour=colour, dash=0, values=[*shares, 0.0]))
    shown = [float(edge) for edge in edges]
    return Panel(id=id_, title=title, note=note, kind="outline", steps=shown, curves=curves, x_label=unit)


def staleness_of(run: RunData) -> list[int]:
    """Returns, for each trained sample, the version at the start of its step minus the oldest version of its tokens."""
    after = {int(step): int(version) for step, version in run.curve("version")}
    samples = [t for t in run.transcripts if t.event == TerminalEvent.TRAINED and t.version_min is not None]
    first = min(after, default=1)
    found = []
    for sample in samples:
        began_with = after.get(sample.step - 1, max(after.get(first, 1) - 1, 0))
        found.append(max(0, began_with - (sample.version_min or 0)))
    return found


def length_sentences(runs: Sequence[RunData]) -> list[str]:
    """Describes, for each run with samples, how the trained lengths differ from the generated ones."""
    return [
        f"{run.name}: trained on {bias.trained_mean:.1f} tokens per sample, {bias.mean_shift:+.1f} compared with all "
        f"generated samples; Kolmogorov-Smirnov distance {bias.ks_distance:.3f}."
        for run in runs
        if (bias := run.length_bias)
    ]
