"""Tables show their values unchanged, including brackets."""

import io

from rich.console import Console
from rich.table import Table

from interlace.observe.goodput import Ledger
from interlace.observe.run_data import EvaluationAnswer
from interlace.observe.tables import (
    AccuracyRow,
    DerivedNumber,
    accuracy_table,
    answers_table,
    goodput_table,
    make_derived_numbers_table,
)


def printed(table: Table, width: int = 100) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(table)
    return file.getvalue()


def test_accuracy_shows_both_and_the_change() -> None:
    rows = [
        AccuracyRow(decoding="greedy", num_prompts=200, before=0.1, after=0.875),
        AccuracyRow(decoding="temperature 1", num_prompts=200, before=0.5, after=0.25),
    ]
    text = printed(accuracy_table(rows))
    for part in ("greedy", "200", "0.100", "0.875", "+0.775", "-0.250"):
        assert part in text


def test_answers_are_shown_as_they_are_and_marked_right_or_wrong() -> None:
    before = EvaluationAnswer(uid="u", prompt="[3, 1]", right_answer="1 3", response="[red]3 1[/]", correct=False)
    after = before.model_copy(update={"response": "1 3", "correct": True})
    text = printed(answers_table([(before, after)]))
    for part in ("[3, 1]", "✗ [red]3 1[/]", "✓ 1 3"):
        assert part in text


def test_a_long_answer_is_folded_and_not_cut() -> None:
    response = "".join(chr(ord("a") + i % 26) for i in range(300))
    before = EvaluationAnswer(uid="u", prompt="p", right_answer="a", response=response, correct=False)
    text = printed(answers_table([(before, before.model_copy(update={"response": ""}))]), width=60)
    assert "…" not in text
    letters = [line.split("│")[3].strip(" ✗") for line in text.splitlines() if line.count("│") == 5]
    assert "".join(letters) == response


def test_derived_numbers_say_what_they_follow_from() -> None:
    number = DerivedNumber(name="samples a step", value="128", how="prompts_per_step x samples_per_prompt")
    text = printed(make_derived_numbers_table([number]))
    assert all(part in text for part in (number.name, number.value, number.how))


def test_the_goodput_table_shows_what_there_is() -> None:
    text = printed(goodput_table(Ledger(seconds={"train": 3.0, "generate": 5.0, "tail_bubble": 2.0, "idle": 0.0})))
    for part in ("50.0%", "30.0%", "20.0%"):
        assert part in text
    assert "idle" not in text


def test_what_a_number_follows_from_is_folded_and_never_cut() -> None:
    path = "/models/" + "long-name-of-a-model/" * 5
    text = printed(make_derived_numbers_table([DerivedNumber(name="parameters", value="214k", how=path)]), width=60)
    assert path in "".join(line[18:].strip() for line in text.splitlines()[1:])
