"""The parts of a report, each as HTML."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from interlace.core.types import TerminalEvent
from interlace.observe.goodput import BINS, PREFIX, USEFUL, ledger_of
from interlace.observe.report.charts import Series, curves, histogram, shares_bar, stacked_bars
from interlace.observe.report.gantt import DeviceTimeline, gantt, legend_of
from interlace.observe.run_data import RunData, Transcript
from interlace.observe.step_line import number, printable, short

CURVES = (
    ("reward/mean", "Reward", "mean of the step's scored samples"),
    ("actor/loss", "Loss", "of the step's minibatches, mean"),
    ("eval/loss", "Held-out loss", "rows that are never trained on"),
    ("eval/accuracy", "Held-out accuracy of pairs", "pairs whose chosen completion has the higher reward"),
    ("actor/teacher_kl", "Distance to the teacher", "nats a token, on the student's samples"),
    ("eval/accuracy_greedy", "Held-out accuracy, greedy", "prompts that are never trained on"),
    ("eval/accuracy_sampled", "Held-out accuracy, sampled", "the same prompts at the evaluation's temperature"),
    ("response_length/mean", "Response length", "tokens, mean"),
    ("actor/entropy", "Entropy", "nats a token, of the policy"),
    ("actor/kl", "KL", "of the update, as the algorithm estimates it"),
    ("sched/staleness_mean", "Staleness", "versions, mean"),
    ("perf/throughput", "Throughput", "prompt and response tokens/s of scored samples"),
)
BIN_COLOURS: Mapping[str, str] = dict(
    zip(
        BINS,
        (
            "#1e3a8a", "#3b82f6", "#fbbf24", "#16a34a", "#7dd3fc", "#22d3ee", "#f97316", "#ef4444",
            "#ec4899", "#a855f7", "#f9a8d4", "#64748b", "#8d99ae", "#c3ccd9", "#57534e", "#e3e7ee",
        ),
        strict=True,
    )
)  # fmt: skip
"""Useful work in blues and green, waste that keeps a device busy in warm colours, waiting in greys."""
RUN_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#dc2626")
NUM_SLOWEST = 6
SHOWN_LETTERS = 4000
"""Most letters shown of a prompt or response; samples/ has the full text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One run of a report."""

    run: RunData
    colour: str
    timeline: DeviceTimeline | None
    config: str
    """Text of config.yaml."""


def figure(title: str, note: str, svg: str, *, wide: bool = False) -> str:
    """Renders a titled figure."""
    css = "figure wide" if wide else "figure"
    return f'<figure class="{css}"><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>{svg}</figure>'


def legend(colours: Mapping[str, str]) -> str:
    """Renders names with their colours."""
    chips = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in colours.items())
    return f'<p class="legend">{"".join(chips)}</p>'


def summary(entries: Sequence[Entry]) -> str:
    """Renders the table with one row per run."""
    heads = (
        "run", "steps", "s a step", "tokens/s", "trained tokens/s a device", "useful", "largest waste",
        "staleness", "reward", "accuracy",
    )  # fmt: skip
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _summary_cells(entry))}</tr>" for entry in entries)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _summary_cells(entry: Entry) -> Iterator[str]:
    run = entry.run
    books, seconds = ledger_of(run.rows), sum(run.values("timing_s/step"))
    waste = books.largest_waste()
    useful = sum(books.fraction(name) for name in USEFUL)
    rate = run.time_mean("goodput/trained_tokens_per_device_s")
    staleness = run.values("sched/staleness_max")
    yield f'<i class="chip" style="background:{entry.colour}"></i>{escape(run.name)}'
    yield str(len(run.rows))
    yield number(seconds / len(run.rows), 2)
    yield short(sum(run.values("perf/num_tokens")) / max(seconds, 1e-9))
    yield "-" if rate is None else short(rate)
    yield f"{useful:.0%}" if books.total_s else "-"
    yield f"{waste.name} {waste.fraction:.0%}" if waste else "-"
    yield f"≤ {max(staleness):.0f}" if staleness else "-"
    yield _change(run.values("reward/mean"))
    yield _change(run.values("eval/accuracy_greedy"))


def _change(values: Sequence[float]) -> str:
    return f"{number(values[0], 2)} → {number(values[-1], 2)}" if values else "-"


def learning(entries: Sequence[Entry]) -> str:
    """Draws curves over the steps, with all runs in each."""
    figures = []
    for metric, title, note in CURVES:
        series = [Series(name=e.run.name, colour=e.colour, points=e.run.curve(metric)) for e in entries]
        if svg := curves(title, series):
            figures.append(figure(title, f"{note} ({metric})", svg))
    return f'{_runs_legend(entries)}<div class="grid">{"".join(figures)}</div>'


def _runs_legend(entries: Sequence[Entry]) -> str:
    """Renders the colours of the runs; empty for a single run."""
    return legend({entry.run.name: entry.colour for entry in entries}) if len(entries) > 1 else ""


def ledgers(entries: Sequence[Entry]) -> str:
    """Draws the goodput ledger of each run."""
    parts = []
    for entry in entries:
        books = ledger_of(entry.run.rows)
        waste = books.largest_waste()
        shares = {name: books.fraction(name) for name in BINS}
        note = waste.sentence if waste else "Nothing was wasted."
        parts.append(figure(entry.run.name, note, shares_bar(entry.run.name, shares, BIN_COLOURS), wide=True))
    return "".join(parts) + legend(_present(entries))


def steps(entries: Sequence[Entry]) -> str:
    """Draws the time of each step by bin."""
    parts = []
    for entry in entries:
        bars = [
            (float(step), {name: seconds * share for name, share in _shares(entry.run, place).items()})
            for place, (step, seconds) in enumerate(entry.run.curve("timing_s/step"))
        ]
        if bars:
            svg = stacked_bars(entry.run.name, bars, BIN_COLOURS, "s")
            parts.append(figure(entry.run.name, "seconds of each step, mean over the devices", svg, wide=True))
    return "".join(parts) + legend(_present(entries))


def _shares(run: RunData, place: int) -> dict[str, float]:
    row = run.rows[place]
    found = {name: row.get(PREFIX + name) for name in BINS}
    return {name: float(share) for name, share in found.items() if isinstance(share, int | float)}


def _present(entries: Sequence[Entry]) -> dict[str, str]:
    books = [ledger_of(entry.run.rows) for entry in entries]
    return {name: colour for name, colour in BIN_COLOURS.items() if any(b.fraction(name) > 0 for b in books)}


def gantts(entries: Sequence[Entry], step: int | None) -> str:
    """Draws the operations on each device during one step; None takes the middle step."""
    parts: list[str] = []
    colours: dict[str, str] = {}
    for entry in entries:
        timeline = entry.timeline
        chosen = _chosen_step(timeline, step) if timeline else None
        if timeline is None or chosen is None:
            asked = "a whole step" if step is None else f"step {step}"
            note = f"timeline.json does not hold {asked}." if timeline else "There is no timeline.json."
            parts.append(f"<p>{escape(entry.run.name)}: {escape(note)}</p>")
            continue
        start_s, end_s = timeline.steps[chosen]
        # A part of the next step shows the transition.
        last_s = end_s + 0.15 * (end_s - start_s)
        svg = gantt(entry.run.name, timeline, start_s, last_s)
        colours |= legend_of(timeline, start_s, last_s)
        note = "; ".join(filter(None, ["and the beginning of the next", timeline.note]))
        parts.append(figure(f"{entry.run.name}, step {chosen}", note, svg, wide=True))
    return "".join(parts) + legend(colours)


def _chosen_step(timeline: DeviceTimeline, step: int | None) -> int | None:
    there = sorted(timeline.steps)
    if step is not None:
        return step if step in there else None
    return there[len(there) // 2] if there else None


def histograms(entries: Sequence[Entry]) -> str:
    """Draws staleness and lengths of samples."""
    staleness, lengths = [], []
    for entry in entries:
        name, run = entry.run.name, entry.run
        staleness.append(Series(name=name, colour=entry.colour, points=_counted(staleness_of(run))))
        trained = run.lengths(TerminalEvent.TRAINED)
        lengths.append(Series(name=f"{name}, trained", colour=entry.colour, points=_counted(trained)))
        if len(entries) == 1:
            generated = Series(name="generated", colour="#8d99ae", points=_counted(run.lengths()))
            lengths.insert(0, generated)
    notes = [_bias_note(entry) for entry in entries]
    length_note = "tokens of samples trained on" + ("; grey: all that were generated" if len(entries) == 1 else "")
    figures = [
        figure(
            "Staleness of samples trained on",
            "share of samples",
            histogram("Staleness", staleness, "versions", whole=True),
        ),
        figure(
            "Response lengths", f"share of samples; {length_note}", histogram("Response lengths", lengths, "tokens")
        ),
    ]
    grid = f'<div class="grid">{"".join(figures)}</div>'
    return f'{_runs_legend(entries)}{grid}<p class="note">{"<br>".join(notes)}</p>'


def staleness_of(run: RunData) -> list[int]:
    """Returns the staleness of each trained sample: the version at the start of its step, minus the oldest version of
    its tokens.
    """
    after = {int(step): int(version) for step, version in run.curve("version")}
    samples = [t for t in run.transcripts if t.event == TerminalEvent.TRAINED and t.version_min is not None]
    first = min(after, default=1)
    found = []
    for sample in samples:
        began_with = after.get(sample.step - 1, max(after.get(first, 1) - 1, 0))
        found.append(max(0, began_with - (sample.version_min or 0)))
    return found


def _bias_note(entry: Entry) -> str:
    bias = entry.run.length_bias
    if bias is None:
        return escape(f"{entry.run.name}: no samples to compare lengths of.")
    return escape(
        f"{entry.run.name}: trained on {bias.trained_mean:.1f} tokens a sample, {bias.mean_shift:+.1f} against what "
        f"was generated; Kolmogorov-Smirnov distance {bias.ks_distance:.3f}."
    )


def _counted(values: Sequence[int]) -> list[tuple[float, float]]:
    return [(float(value), float(count)) for value, count in sorted(Counter(values).items())]


def slowest(entries: Sequence[Entry]) -> str:
    """Shows the samples with the most tokens, which delay a step the most; one per prompt."""
    parts = []
    for entry in entries:
        descending = sorted(entry.run.transcripts, key=lambda sample: -sample.num_tokens)
        of_prompt = {sample.uid: sample for sample in reversed(descending)}
        longest = [sample for sample in descending if of_prompt[sample.uid] is sample][:NUM_SLOWEST]
        parts.append(f"<h3>{escape(entry.run.name)}</h3>" + "".join(_sample(sample) for sample in longest))
    return "".join(parts)


def _sample(sample: Transcript) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    versions = "" if sample.version_min is None else f", versions {sample.version_min} to {sample.version_max}"
    head = f"{sample.num_tokens} tokens, {reward}, {sample.event} in step {sample.step}{versions}: {sample.uid}"
    return (
        f"<details><summary>{escape(head)}</summary><h4>prompt</h4><pre>{_shown(sample.prompt)}</pre>"
        f"<h4>response</h4><pre>{_shown(sample.response)}</pre></details>"
    )


def _shown(text: str) -> str:
    cut = f"\n... {len(text) - SHOWN_LETTERS} letters more in samples/" if len(text) > SHOWN_LETTERS else ""
    return escape(printable(text[:SHOWN_LETTERS], keep="\n\t") + cut)


def configurations(entries: Sequence[Entry]) -> str:
    """Shows every setting of each run."""
    return "".join(
        f"<details><summary>{escape(entry.run.name)}</summary><pre>{escape(entry.config)}</pre></details>"
        for entry in entries
    )
