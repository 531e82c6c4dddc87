"""The result of a run is shown completely, and model output never reaches the terminal as a command."""

from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from interlace.cli import eval as eval_command
from interlace.cli.outcome import evaluation_tables, list_written_paths, outcome_tables
from interlace.observe.best import BestConfig
from interlace.observe.run_data import EvaluationAnswer
from interlace.observe.run_folder import RunFolder
from interlace.run.evaluation import Evaluation
from interlace.run.recipe.config import Recipe
from interlace.run.session import TrainReport
from interlace.run.sweep import SweepResult, SweepRow

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


def test_a_quiet_evaluation_names_answers_that_were_not_scored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluation(0.0, None, {}).model_copy(update={"num_failed": 64, "failure": "KeyError"})
    monkeypatch.setattr(eval_command, "evaluate_spec", lambda *_, **__: (RECIPE, found))
    eval_command.evaluate("run", None, None, "newest", quiet=True, as_json=False)
    assert "64 answers count as wrong" in capsys.readouterr().out


def test_the_mean_over_seeds_has_no_runs_that_ended_early() -> None:
    rows = [
        SweepRow(name=f"{seed}", values={"seed": seed}, steps=9, metric=float(seed), best=None, seconds=1.0,
                 is_finished=seed != "7")
        for seed in "137"
    ]  # fmt: skip
    found = SweepResult(folder=Path("x"), order=BestConfig(metric="reward/mean"), rows=rows)
    [(_, mean, _, count)] = found.over_seeds()
    assert (mean, count) == (2.0, 2)


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
