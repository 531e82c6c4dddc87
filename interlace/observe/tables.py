"""Tables printed before and after a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from interlace.observe.goodput import BINS, Ledger
from interlace.observe.progress import printable
from interlace.observe.run_data import AnswerPair, EvaluationAnswer


@dataclass(frozen=True, kw_only=True, slots=True)
class DerivedNumber:
    """A number computed from the settings, e.g. samples per step, or a worker's memory."""

    name: str
    value: str
    """The number for display, with its unit."""
    how: str
    """Calculation of the number, such as `prompts_per_step x samples_per_prompt`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyRow:
    """Held-out accuracy with one way of decoding."""

    decoding: str
    """Way of decoding: `greedy`, `temperature 1`."""
    num_prompts: int
    before: float
    """Accuracy before the run, between 0 and 1."""
    after: float


def make_derived_numbers_table(numbers: Sequence[DerivedNumber]) -> Table:
    """Builds the table of numbers computed from the settings, shown before any work starts."""
    table = Table(
        title="Sizes derived from the settings", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False
    )
    table.add_column("name")
    table.add_column("value", justify="right", style="bold")
    table.add_column("how", style="dim", overflow="fold")
    for number in numbers:
        table.add_row(Text(number.name), Text(number.value), Text(number.how))
    return table


def accuracy_table(rows: Sequence[AccuracyRow]) -> Table:
    """Builds the table of held-out accuracy before and after."""
    table = Table(title="Held-out accuracy (prompts never trained on)", title_justify="left")
    table.add_column("decoding")
    for heading in ("prompts", "before", "after", "change"):
        table.add_column(heading, justify="right")
    for row in rows:
        change = row.after - row.before
        style = "green" if change > 0 else "red" if change < 0 else ""
        table.add_row(
            Text(row.decoding),
            str(row.num_prompts),
            f"{row.before:.3f}",
            f"{row.after:.3f}",
            Text(f"{change:+.3f}", style),
        )
    return table


def answers_table(pairs: Sequence[AnswerPair]) -> Table:
    """Builds the table of sampled answers before and after; a long answer is folded, never cut."""
    table = Table(title="Sampled answers to held-out prompts", title_justify="left", show_lines=True)
    for heading in ("prompt", "right answer", "before", "after"):
        table.add_column(heading, overflow="fold")
    for before, after in pairs:
        table.add_row(Text(before.prompt), Text(before.right_answer), verdict(before), verdict(after))
    return table


def goodput_table(ledger: Ledger) -> Table:
    """Builds the table of device-seconds by bin; the largest waste is red."""
    waste = ledger.largest_waste()
    table = Table(
        title="Device time by bin, start-up and evaluations included",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        show_header=False,
    )
    table.add_column("bin", no_wrap=True)
    table.add_column("share", justify="right", style="bold")
    table.add_column("bar")
    for name in sorted(BINS, key=ledger.fraction, reverse=True):
        share = ledger.fraction(name)
        if share >= 0.0005:
            is_waste = waste is not None and name == waste.name
            table.add_row(Text(name), f"{share:.1%}", Text("█" * round(40 * share), "red" if is_waste else "blue"))
    return table


def verdict(answer: EvaluationAnswer) -> Text:
    """Marks an answer by a sign and a colour, because some readers see no colour."""
    sign, colour = ("✓", "green") if answer.correct else ("✗", "red")
    return Text(f"{sign} " + printable(answer.response, keep="\n"), style=colour)
