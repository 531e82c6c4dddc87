"""Tables that show the outcome of a run at its end."""

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from interlace.observe.run_data import pair_answers
from interlace.observe.tables import AccuracyRow, accuracy_table, answers_table, verdict

if TYPE_CHECKING:
    from interlace.observe.run_folder import RunFolder
    from interlace.run.evaluation import Evaluation
    from interlace.run.recipe.config import Recipe
    from interlace.run.session import TrainReport


def outcome_tables(recipe: "Recipe", report: "TrainReport") -> list[Table]:
    """Returns the held-out answers and accuracy before and after training, if prompts were held out."""
    if report.before is None or report.after is None:
        return []
    accuracy = accuracy_table(_list_accuracies(recipe, report.before, report.after))
    if not report.after.answers:
        return [accuracy]
    return [answers_table(pair_answers(report.before.answers, report.after.answers)), accuracy]


def _list_accuracies(recipe: "Recipe", before: "Evaluation", after: "Evaluation") -> list[AccuracyRow]:
    pairs = [
        ("greedy", before.greedy_accuracy, after.greedy_accuracy),
        (f"temperature {recipe.evaluation.temperature:g}", before.sampled_accuracy, after.sampled_accuracy),
    ]
    return [
        AccuracyRow(decoding=decoding, num_prompts=after.num_prompts, before=old, after=new)
        for decoding, old, new in pairs
        if old is not None and new is not None
    ]


def evaluation_tables(recipe: "Recipe", evaluation: "Evaluation") -> list[Table]:
    """Returns the tables of a single evaluation: answers and accuracy."""
    answers = Table(title="Answers to held-out prompts", title_justify="left", show_lines=True)
    for heading in ("prompt", "right answer", "answer"):
        answers.add_column(heading, overflow="fold")
    for answer in evaluation.answers:
        answers.add_row(Text(answer.prompt), Text(answer.right_answer), verdict(answer))
    accuracy = _estimates_table(recipe, evaluation)
    return [answers, accuracy] if evaluation.answers else [accuracy]


def _estimates_table(recipe: "Recipe", evaluation: "Evaluation") -> Table:
    """Returns the table of all sets and estimates; without estimates, of the accuracies."""
    accuracy = Table(title="Held-out accuracy", title_justify="left")
    heading = f"temperature {recipe.evaluation.temperature:g}"
    if not evaluation.estimates:
        for column in ("decoding", "prompts", "accuracy"):
            accuracy.add_column(column)
        shares = {"greedy": evaluation.greedy_accuracy, heading: evaluation.sampled_accuracy}
        for decoding, share in shares.items():
            if share is not None:
                accuracy.add_row(decoding, str(evaluation.num_prompts), f"{share:.3f}")
        return accuracy
    for column in ("set", "decoding", "prompts", "value", "95 % interval"):
        accuracy.add_column(column, overflow="fold")
    for name, found in evaluation.estimates.items():
        for kind, each in found.items():
            decoding = kind if kind == "greedy" else f"{kind}, {heading}"
            interval = "-" if each.low is None or each.high is None else f"{each.low:.3f} - {each.high:.3f}"
            accuracy.add_row(Text(name or "all"), decoding, str(each.num_prompts), f"{each.value:.3f}", interval)
        accuracy.add_section()
    return accuracy


def list_written_paths(folder: "RunFolder", report: "TrainReport") -> Table:
    """Returns the table of the paths that a run has written."""
    found = [
        ("settings", folder.config),
        ("metrics", folder.metrics),
        ("samples", folder.samples),
        ("timeline (open in ui.perfetto.dev)", folder.timeline),
        ("checkpoint", report.checkpoint),
    ]
    table = Table(title="Written", title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for what, path in found:
        if path is not None and path.exists():
            table.add_row(Text(what), Text(str(path)))
    return table
