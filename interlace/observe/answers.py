"""answers.jsonl: the shown answers of each evaluation, one line per evaluation."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from pydantic import ValidationError

from interlace.core.config import Config
from interlace.observe.jsonl import write_step

ANSWERS_FILE = "answers.jsonl"


class EvaluationAnswer(Config):
    """One answer to a held-out prompt."""

    uid: str
    prompt: str
    right_answer: str
    response: str
    correct: bool


AnswerPair: TypeAlias = tuple[EvaluationAnswer, EvaluationAnswer]
"""Answers to one prompt at an earlier and at a later evaluation."""


def pair_answers(before: Sequence[EvaluationAnswer], after: Sequence[EvaluationAnswer]) -> list[AnswerPair]:
    """Pairs the answers of two evaluations to the same prompts."""
    later = {answer.uid: answer for answer in after}
    return [(answer, later[answer.uid]) for answer in before if answer.uid in later]


def write_answers(folder: Path, step: int, answers: Sequence[EvaluationAnswer]) -> None:
    """Appends the answers of the evaluation at a step; a resumed run replaces those of repeated evaluations."""
    write_step(folder / ANSWERS_FILE, step, {"answers": [answer.model_dump() for answer in answers]})


def read_answers(folder: Path) -> dict[int, list[EvaluationAnswer]]:
    """Reads the answers by step; damaged lines are left out."""
    path = folder / ANSWERS_FILE
    found: dict[int, list[EvaluationAnswer]] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError, ValidationError):
            row = json.loads(line)
            found[int(row["step"])] = [EvaluationAnswer.model_validate(answer) for answer in row["answers"]]
    return found
