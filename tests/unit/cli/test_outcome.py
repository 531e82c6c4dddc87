"""The result of a run is shown completely, and model output never reaches the terminal as a command."""

from pathlib import Path

from rich.console import Console, RenderableType

from interlace.cli.outcome import evaluation_tables, list_written_paths, outcome_tables
from interlace.observe.run_data import EvaluationAnswer
from interlace.observe.run_folder import RunFolder
from interlace.run.evaluation import Evaluation
from interlace.run.recipe.config import Recipe
from interlace.run.session import TrainReport

RECIPE = Recipe.parse(
    {
        "model": "tiny:micro",
        "task": "number_sorting",
        "reward": "reasoning_gym",
        "steps": 10,
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "evaluation": {"temperature": 0.7},
    }
)


def evaluation(greedy: float, sampled: float | None, responses: dict[str, str]) -> Evaluation:
    answers = tuple(
        EvaluationAnswer(uid=uid, prompt=f"{uid}>", right_answer="321", response=text, correct=text == "321")
        for uid, text in responses.items()
    )
    return Evaluation(num_prompts=64, greedy_accuracy=greedy, sampled_accuracy=sampled, answers=answers)


def report(before: Evaluation | None, after: Evaluation | None, checkpoint: Path | None = None) -> TrainReport:
    return TrainReport(done_steps=10, num_steps=10, before=before, after=after, checkpoint=checkpoint)


def text(tables: list[RenderableType]) -> str:
    console = Console(width=200, record=True, quiet=False)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    return captured.get()


def test_accuracy_and_answers_stand_before_beside_after() -> None:
    before, after = evaluation(0.125, 0.0625, {"a": "123", "b": "x"}), evaluation(0.875, 0.75, {"a": "321"})
    shown = text([*outcome_tables(RECIPE, report(before, after))])
    greedy = next(line for line in shown.splitlines() if "greedy" in line)
    sampled = next(line for line in shown.splitlines() if "temperature 0.7" in line)
    assert [cell.strip() for cell in greedy.split("│")[2:6]] == ["64", "0.125", "0.875", "+0.750"]
    assert [cell.strip() for cell in sampled.split("│")[2:6]] == ["64", "0.062", "0.750", "+0.688"]
    answer = next(line for line in shown.splitlines() if "a>" in line)
    assert [cell.strip() for cell in answer.split("│")[1:5]] == ["a>", "321", "✗ 123", "✓ 321"]
    assert "b>" not in shown  # there is nothing to compare it with


def test_without_held_out_prompts_there_is_nothing_to_compare() -> None:
    assert outcome_tables(RECIPE, report(None, None)) == []


def test_greedy_alone_is_one_row() -> None:
    tables = outcome_tables(RECIPE, report(evaluation(0.1, None, {}), evaluation(0.2, None, {})))
    assert len(tables) == 1
    assert tables[0].row_count == 1


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    shown = text([*evaluation_tables(RECIPE, evaluation(0.5, 0.25, {"a": "\x1b[31mred\x07"}))])
    assert r"\x1b[31mred\x07" in shown
    assert "\x1b[31mred" not in shown
    assert "0.500" in shown and "0.250" in shown


def test_only_what_was_written_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "one")
    folder.write_config(RECIPE)
    shown = text([list_written_paths(folder, report(None, None))])
    assert str(folder.config) in shown
    assert "checkpoint" not in shown and "timeline" not in shown
