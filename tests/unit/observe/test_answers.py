"""The answers of an evaluation are kept by step; a repeated evaluation replaces those that follow it."""

from pathlib import Path

from interlace.observe.run_data import ANSWERS_FILE, EvaluationAnswer, read_answers, write_answers


def answer(response: str) -> EvaluationAnswer:
    return EvaluationAnswer(uid="q", prompt="1+1", right_answer="2", response=response, correct=response == "2")


def test_a_resumed_run_replaces_the_answers_of_repeated_steps(tmp_path: Path) -> None:
    for step, response in ((0, "1"), (10, "2"), (20, "3"), (10, "4")):
        write_answers(tmp_path, step, [answer(response)])
    assert {step: found[0].response for step, found in read_answers(tmp_path).items()} == {0: "1", 10: "4"}


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    write_answers(tmp_path, 0, [answer("1")])
    with (tmp_path / ANSWERS_FILE).open("a") as file:
        file.write('{"step": 1, "ans')
    assert list(read_answers(tmp_path)) == [0]
